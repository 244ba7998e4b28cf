"""The keys of a mixture: named faults, and what may change on resume."""

from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import Config, MixtureDataConfig, difference, dump, load
from jaxtrain.errors import ConfigError

MIXTURE = """run_dir: r
steps: 10
data:
  kind: mixture
  mixture:
    code: {dir: a, weight: 0.3}
    web: {dir: b, weight: 0.7}
"""
STAGE = "  stages:\n    - {position: 50, weights: {code: 1, web: 0}}\n"


def config(folder: Path, extra: str = "", *overrides: str) -> Config:
    (folder / "mixture.yml").write_text(MIXTURE + extra)
    return load(folder / "mixture.yml", list(overrides))


def test_a_mixture_reads_back_equal_from_what_it_prints(tmp_path: Path) -> None:
    read = config(tmp_path, STAGE, "data.mixture.code.weight=0.5")
    assert isinstance(read.data, MixtureDataConfig)
    assert read.data.mixture["code"].weight == 0.5
    assert read.data.stages[0].weights == {"code": 1, "web": 0}
    (tmp_path / "again.yml").write_text(dump(read))
    assert load(tmp_path / "again.yml") == read


@pytest.mark.parametrize(
    ("extra", "override", "message"),
    [
        ("", "data.mixture.code.weigth=1", "unknown key weigth in section data.mixture.code; did you mean weight?"),
        ("", "data.mixture.code.color=1", "valid keys are dir, weight"),
        ("", "data.mixture.code=3", "data.mixture.code is a section, not 3; it holds dir, weight"),
        ("", "data.mixture=3", "data.mixture is a section, not 3; it holds sections under names of your own"),
        ("", "data.mixture.code.weight=-1", "data.mixture.code.weight: must be at least 0.0, not -1"),
        ("", "data.mixture.code.weight=0.1234567", "come out even only after 8234567 rows"),
        ("    c d: {dir: x, weight: 1}\n", "", "'c d' is no name"),
        ("  epochs: 1\n", "", "a mixture has no epochs"),
        ("  dir: x\n", "", "data.dir is only for data.kind=tokens"),
        ("  stages: 3\n", "", "data.stages: 3 is not a list"),
        (STAGE.replace("position", "positon"), "", "unknown key positon in section data.stages.0; did you mean pos"),
        (STAGE.replace("50", "0"), "", "data.stages.0.position: must be above 0"),
        (STAGE + STAGE.partition("\n")[2], "", "data.stages.1.position=50 must be after 50"),
        (STAGE.replace("web: 0", "wb: 0"), "", "data.stages.0.weights names wb, which data.mixture lacks"),
        (STAGE.replace(", web: 0", ""), "", "data.stages.0.weights lacks a weight for web; give one for each of code"),
        (STAGE.replace("code: 1", "code: 0"), "", "data.stages.0: all weights are 0"),
        ("model: {family: vit}\n", "", "model.family=vit reads images, but data.kind=mixture are text"),
    ],
)
def test_a_fault_is_named_with_its_place(tmp_path: Path, extra: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, extra, *([override] if override else []))
    assert message in str(error.value)
    assert f"override {override}" in str(error.value) if override else "mixture.yml:" in str(error.value)


def test_a_data_set_may_move_on_resume_and_nothing_else_of_a_mixture_may_change(tmp_path: Path) -> None:
    saved: dict[str, Any] = config(tmp_path, STAGE).to_dict()
    for override, key, may_change in (
        ("data.mixture.code.dir=/elsewhere", "data.mixture.code.dir", True),
        ("data.mixture.code.weight=0.4", "data.mixture.code.weight", False),
        ("data.stages=[]", "data.stages", False),
    ):
        (change,) = difference(saved, config(tmp_path, STAGE, override))
        assert (change.key, change.may_change) == (key, may_change)


@pytest.mark.parametrize("value", ["best_fit", "true", "false"])
def test_packing_is_one_of_three_words(tmp_path: Path, value: str) -> None:
    data = config(tmp_path, "", f"data.pack={value}").data
    assert isinstance(data, MixtureDataConfig)
    assert data.pack == {"best_fit": "best_fit", "true": True, "false": False}[value]
    with pytest.raises(ConfigError, match='must be true or false or best_fit, not "bestfit"; the nearest is best_fit'):
        config(tmp_path, "", "data.pack=bestfit")
