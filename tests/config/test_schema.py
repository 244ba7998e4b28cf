"""The schema: complete, described, published, and the same as what is shipped and documented."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import (
    AdamWConfig,
    Config,
    CosineSchedule,
    DecoderConfig,
    DigitsDataConfig,
    MixtureDataConfig,
    ModelConfig,
    OwnDataConfig,
    OwnModelConfig,
    RoleFactors,
    Section,
    TokenDataConfig,
    TokenRowsConfig,
    VitConfig,
    flat,
    json_schema,
    load,
)
from jaxtrain.config.data import DataSection
from jaxtrain.config.nearest import ELSEWHERE, nearest_keys
from jaxtrain.config.tree import ROOT, Variants, keys
from jaxtrain.schema import main
from tests.sizes import PARAMETERS

CONFIGS = Path(__file__).parents[2] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yml"))
MAY_CHANGE = {
    "log_every", "microbatch", "compile_cache", "cpu_devices", "resume", "remat", "remat_save",
    "remat_offload", "run_dir", "deterministic", "non_finite",
    "max_hours", "grace_seconds", "checkpoint.keep_best", "checkpoint.local",
    "data.dir", "data.workers", "data.prefetch", "data.log_rows", "data.source", "model.loss.chunk",
    "ema.evaluate",
}  # fmt: skip
NULL_SECTIONS = ("model.rope.scaling.", "checkpoint.keep_best.", "checkpoint.local.")
SECTIONS_THAT_MAY_CHANGE = {
    "mesh",
    "fsdp",
    "pipeline",
    "sharding",
    "distributed",
    "eval",
    "checkpoint",
    "telemetry",
    "profile",
    "spikes",
    "health",
    "watchdog",
}


def classes(variants: Variants = ROOT) -> list[type[Section]]:
    below = [classes(variants.below(name)) for cls in variants.classes for name in cls.model_fields]
    return [*variants.classes, *(cls for found in below for cls in found)]


def test_every_key_is_described_and_says_whether_it_may_change_on_resume() -> None:
    for cls in classes():
        for name, field in cls.model_fields.items():
            assert field.description, f"{cls.__name__}.{name}"
            assert field.description.endswith("."), f"{cls.__name__}.{name}"
            extra = field.json_schema_extra
            if field.default_factory is None:
                assert isinstance(extra, dict), f"{cls.__name__}.{name}"
                assert isinstance(extra["may_change_on_resume"], bool)


def test_exactly_the_keys_that_leave_the_numbers_alone_may_change() -> None:
    may_change = {key.path for key in keys().values() if key.may_change}
    expected = {
        path
        for path, key in keys().items()
        if path in MAY_CHANGE or (path.split(".")[0] in SECTIONS_THAT_MAY_CHANGE and not key.is_section)
    }
    assert may_change == expected
    assert expected >= MAY_CHANGE


def test_the_keys_of_every_variant_are_known() -> None:
    assert {"optimizer.b1", "optimizer.momentum", "optimizer.schedule.final"} <= set(keys())


def _published(schema: dict[str, Any], node: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    references = [node, *node.get("oneOf", []), *node.get("anyOf", [])]
    for reference in [part["$ref"] for part in references if "$ref" in part]:
        found |= _published(schema, schema["$defs"][reference.rpartition("/")[2]], prefix)
    for name, child in node.get("properties", {}).items():
        found |= {prefix + name: child, **_published(schema, child, f"{prefix}{name}.")}
    return found


def test_the_published_schema_covers_every_key() -> None:
    schema = json_schema()
    published = _published(schema, schema)
    assert published.pop("base")["type"] == "string"
    assert set(published) == set(keys())
    for path, key in keys().items():
        assert published[path]["description"]
        if not key.is_section:
            assert published[path]["may_change_on_resume"] is key.may_change
    assert schema["additionalProperties"] is False
    assert schema["anyOf"] == [{"required": ["run_dir"]}, {"required": ["base"]}]


def test_the_schema_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == json_schema()
    assert main(["--output", str(tmp_path / "schema.json")]) == 0
    assert (tmp_path / "schema.json").read_text() == printed


@pytest.mark.parametrize("argv", [["--output"], ["extra"], ["--output", "/nowhere/at/all.json"]])
def test_a_schema_that_cannot_be_written_ends_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1


def parameters(model: ModelConfig) -> int:
    if isinstance(model, VitConfig):
        layer = 4 * model.embed**2 + 2 * model.embed * model.mlp + 2 * model.embed
        patches = (model.patch**2 * model.channels + model.patches) * model.embed
        return model.layers * layer + patches + model.embed + model.embed * model.classes
    assert isinstance(model, DecoderConfig)
    attention = model.embed * model.resolved_head_dim * 2 * (model.heads + model.resolved_kv_heads)
    layer = attention + 3 * model.embed * model.mlp + 2 * model.embed
    embeddings = model.vocab * model.embed * (1 if model.tied_embeddings else 2)
    return embeddings + model.layers * layer + model.embed


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_has_the_parameters_it_claims(path: Path) -> None:
    config = load(path)
    count = parameters(config.model)
    assert count == PARAMETERS[path.stem]
    opening = path.read_text().split("\nrun_dir:")[0]
    assert f"{count:,}" in opening
    assert f"configs/{path.name}" in opening
    assert all(word in opening for word in ("# Needs", "# Expect"))
    assert f"| {count:,} |" in (CONFIGS / "README.md").read_text()
    if isinstance(config.data, TokenDataConfig):
        assert config.data.source == "python_stdlib"


def test_all_configs_with_fixed_names_are_shipped() -> None:
    assert {path.stem for path in SHIPPED} == set(PARAMETERS)


def test_data_prepared_for_another_vocabulary_lies_elsewhere() -> None:
    found = [(config.data, config.data_vocab) for config in map(load, SHIPPED)]
    tokens = [(data.dir, vocab) for data, vocab in found if isinstance(data, TokenDataConfig)]
    assert len(set(tokens)) == len({folder for folder, _ in tokens})


def documented(folder: Path, heading: str, before: str = "") -> Path:
    """A file with the first YAML block below a heading of configs/README.md."""
    block = (CONFIGS / "README.md").read_text().split(f"## {heading}\n")[1].split("```yaml\n")[1].split("```")[0]
    path = folder / "reference.yml"
    path.write_text(before + block)
    return path


def test_the_documented_defaults_are_the_defaults(tmp_path: Path) -> None:
    path = documented(tmp_path, "Every key")
    config = load(path, ["steps=10"])
    assert config == Config(run_dir=Path("runs/quickstart"), steps=10)
    usual = {f"optimizer.{name}" for name in AdamWConfig.model_fields}
    usual |= {f"optimizer.schedule.{name}" for name in CosineSchedule.model_fields}
    usual |= {f"optimizer.factors.{name}" for name in RoleFactors.model_fields}
    others = {key for key in keys() if key.startswith("ema.")}
    others |= {key for key in keys() if key.startswith("optimizer.")} - usual
    readme = (CONFIGS / "README.md").read_text()
    assert {key for key in others if f"`{key.rpartition('.')[2]}: " not in readme} <= {"ema.decay", "ema.evaluate"}
    assert "{decay: 0.999, evaluate: true}" in readme
    variant_only = {"model.target", "data.target", "data.mixture", "data.stages", *others}
    variant_only |= {key for key in keys() if key.startswith(NULL_SECTIONS)}
    variant_only |= {f"model.{name}" for name in set(VitConfig.model_fields) - set(DecoderConfig.model_fields)}
    assert set(config.origins) == set(keys()) - variant_only

    lines = path.read_text().splitlines()
    for key, place in config.origins.items():
        if place.startswith(str(path)):
            assert ("# ~" in lines[int(place.rpartition(":")[2]) - 1]) is keys()[key].may_change, key


def test_the_documented_defaults_of_images_are_the_defaults(tmp_path: Path) -> None:
    config = load(documented(tmp_path, "Images", "run_dir: r\n"), ["steps=10"])
    assert (config.model, config.data) == (VitConfig(family="vit"), DigitsDataConfig(kind="digits"))
    written = {key for key in config.origins if key.startswith(("model.", "data."))}
    common = {f"data.{name}" for name in DataSection.model_fields} - {"data.kind"}
    assert written | common == {key for key in flat(config.to_dict()) if key.startswith(("model.", "data."))}


def test_the_documented_keys_of_mixtures_are_all_there_are(tmp_path: Path) -> None:
    config = load(documented(tmp_path, "Mixtures", "run_dir: r\n"), ["steps=10"])
    assert isinstance(config.data, MixtureDataConfig)
    own = set(MixtureDataConfig.model_fields) - set(TokenRowsConfig.model_fields) | {"kind"}
    assert {f"data.{name}" for name in own} == {key for key in config.origins if key.count(".") == 1}
    assert {key.rpartition(".")[2] for key in config.origins if key.count(".") == 3} == {"dir", "weight"}


def test_the_documented_keys_of_own_code_are_its_arguments(tmp_path: Path) -> None:
    config = load(documented(tmp_path, "Your own model and data", "run_dir: r\n"), ["steps=10"])
    assert isinstance(config.model, OwnModelConfig)
    assert isinstance(config.data, OwnDataConfig)
    assert (config.model.own_keys, config.data.own_keys) == ({"width": 64}, {"rows": 4096})


def test_a_config_never_changes_and_takes_no_unknown_key() -> None:
    config = Config(run_dir=Path("r"))
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 1
    with pytest.raises(ValueError, match="Extra inputs"):
        Config.model_validate({"run_dir": "r", "sed": 1})


def test_names_from_elsewhere_lead_to_keys_that_exist() -> None:
    assert set(ELSEWHERE) <= set(keys())
    for path, names in ELSEWHERE.items():
        for name in names:
            assert path in nearest_keys(name), name


def test_a_config_is_read_without_importing_jax() -> None:
    command = (
        "import sys, jaxtrain.config as c; c.load(sys.argv[1]); "
        "sys.exit(','.join(m for m in sys.modules if m.split('.')[0] in ('jax', 'flax', 'numpy')) or 0)"
    )
    arguments = [sys.executable, "-c", command, str(SHIPPED[0])]
    ran = subprocess.run(arguments, capture_output=True, text=True, cwd=CONFIGS.parent, check=False)
    assert (ran.stderr, ran.returncode) == ("", 0)
