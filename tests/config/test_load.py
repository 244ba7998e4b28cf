"""Files, bases and overrides: what is read, where it came from, and what is refused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jaxtrain.config import (
    AdamWConfig,
    Config,
    ConstantSchedule,
    DecoderConfig,
    OwnDataConfig,
    OwnModelConfig,
    SgdConfig,
    VitConfig,
    dump,
    load,
)
from jaxtrain.errors import ConfigError

Write = Callable[..., Path]
RUN = "run_dir: runs/r\nsteps: 10\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes, name: str = "c.yml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def faults(path: Path, *overrides: str) -> list[str]:
    """The lines of the refusal, with the directory of the file left out."""
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{path.parent}/", "").splitlines()


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("optimzer: {learning_rate: 1e-3}", "unknown key optimzer at the top level; did you mean optimizer?"),
        ("learning_rate: 1e-3", "unknown key learning_rate at the top level; did you mean optimizer.learning_rate?"),
        ("lr: 1e-4", "unknown key lr at the top level; did you mean optimizer.learning_rate?"),
        ("num-layers: 2", "unknown key num-layers at the top level; did you mean model.layers?"),
        ("LR: 2", "unknown key LR at the top level; did you mean optimizer.learning_rate?"),
        ("model.layers: 2", "model.layers: in a file, sections are nested; dots are for overrides"),
        ("num_kv_heads: 2", "unknown key num_kv_heads at the top level; did you mean model.kv_heads?"),
        ("numLayers: 2", "unknown key numLayers at the top level; did you mean model.layers?"),
        ("d_model: 64", "unknown key d_model at the top level; did you mean model.embed?"),
        ("vocab: 64", "unknown key vocab at the top level; did you mean model.vocab or data.vocab?"),
        ("data: {vocb: 64}", "unknown key vocb in section data; did you mean data.vocab?"),
        ("model: {rope: {thta: 1.0}}", "unknown key thta in section model.rope; did you mean model.rope.theta?"),
        (
            "checkpoint: {zzz: 1}",
            "unknown key zzz in section checkpoint; valid keys are checkpoint.every, checkpoint.every_minutes, "
            "checkpoint.interval, checkpoint.failures_per_day, checkpoint.failures_per_day_per_host, "
            "checkpoint.patience, checkpoint.local, "
            "checkpoint.dir, checkpoint.keep, checkpoint.keep_every, checkpoint.keep_every_hours, checkpoint.keep_best",
        ),
        ("optimizer: {lr: 1}", "unknown key lr in section optimizer; did you mean optimizer.learning_rate?"),
        ("optimizer: {momentum: 0.5}", "optimizer.momentum is only for optimizer.name=sgd or muon"),
    ],
)
def test_an_unknown_key_is_refused_with_its_line_section_and_the_nearest_key(
    write: Write, line: str, nearest: str
) -> None:
    assert faults(write(RUN + line)) == [f"c.yml:3: {nearest}"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--optim.lrr=1", "unknown key optim.lrr; did you mean optimizer.learning_rate?"),
        ("learning_rate=1", "unknown key learning_rate; did you mean optimizer.learning_rate?"),
        ("steps.x=1", "unknown key steps.x; steps holds a value, not keys"),
        ("base=other.yml", "unknown key base; "),
        ("optimizer.momentum=0.5", "optimizer.momentum is only for optimizer.name=sgd or muon"),
        ("seed=", "has no value; write seed=null for none"),
        ("run_dir=@here", "not valid YAML: "),
        ("seed", "must have the form key.path=value"),
        ("seed=true", "seed: true is true or false, not a whole number"),
        ("data={vocb: 3}", "unknown key vocb in section data; did you mean data.vocab?"),
    ],
)
def test_a_wrong_override_is_refused_by_name(write: Write, override: str, message: str) -> None:
    (line,) = faults(write(RUN), override)
    assert line.startswith(f"override {override}: {message}")


def test_a_repeated_key_is_refused_with_both_lines(write: Write) -> None:
    path = write(RUN + "model:\n  layers: 2\n  heads: 4\n  layers: 3\nsteps: 11\n")
    assert faults(path) == [
        "c.yml:6: model.layers is given twice, first at c.yml:4; keep one",
        "c.yml:7: steps is given twice, first at c.yml:2; keep one",
    ]


def test_a_repeated_override_is_refused(write: Write) -> None:
    assert faults(write(RUN), "seed=1", "--seed=2") == [
        "override --seed=2: seed is given twice, first as seed=1; keep one"
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("seed: true", "seed: true is true or false, not a whole number"),
        ('seed: "3"', 'seed: "3" is text, not a whole number; write it without quotes'),
        ("seed: 3.0", "seed: 3.0 is not a whole number; write 3"),
        ("seed: [3]", "seed: a list is not a whole number"),
        ("seed: {a: 3}", "seed: a section is not a whole number"),
        ("seed:", "seed: has no value; give a whole number"),
        ("seed: -1", "seed: must be at least 0, not -1"),
        ("sharding: {zero: 3}", "sharding.zero: must be 0 or 1 or 2, not 3"),
        ("microbatch: 0", "microbatch: must be above 0, not 0 (or null)"),
        ("deterministic: on", 'deterministic: "on" is text, not true or false'),
        ("deterministic: 1", "deterministic: 1 is not true or false"),
        ("precision: bf16", 'precision: must be float32 or bfloat16, not "bf16"; the nearest is bfloat16'),
        ("model: {dropout: 1.0}", "model.dropout: must be below 1.0, not 1.0"),
        ("model: {loss: {label_smoothing: 1}}", "model.loss.label_smoothing: must be below 1.0, not 1"),
        ("model: {norm_epsilon: .nan}", "model.norm_epsilon: NaN is not a finite number"),
        ("model: {norm_epsilon: false}", "model.norm_epsilon: false is true or false, not a number"),
        ("model: {rope: {theta: big}}", 'model.rope.theta: "big" is text, not a number'),
        ("model: {window: 0}", "model.window: must be above 0, not 0 (or null)"),
        ("model:", "model is a section, not null; it holds family, vocab, "),
        ("optimizer: adam", 'optimizer is a section, not "adam"; it holds name, learning_rate, '),
        (
            "optimizer: {name: adam}",
            'optimizer.name: must be adamw or sgd or adafactor or lion or muon, not "adam"; the nearest is adamw',
        ),
        ("optimizer: {name: [sgd]}", "optimizer.name: must be adamw or sgd or adafactor or lion or muon, not a list"),
        ("optimizer: {frozen: embed}", 'optimizer.frozen: "embed" is text, not a list'),
        ("batch_ramp: 4", "batch_ramp: 4 is not a list"),
        ("batch_ramp: [{steps: 4}]", "batch_ramp.0.global_batch is missing"),
        ("batch_ramp: [{steps: 0, global_batch: 1}]", "batch_ramp.0.steps: must be above 0, not 0"),
        ("ema: 0.9", "ema is a section, not 0.9; it holds decay, evaluate (or null)"),
        ("ema: {decay: 1.0}", "ema.decay: must be below 1.0, not 1.0"),
        ("optimizer: {learning_rate: -1}", "optimizer.learning_rate: must be at least 0.0, not -1"),
        ("optimizer: {schedule: {kind: cosin}}", "optimizer.schedule.kind: must be cosine or linear or constant or "),
        ("data: {dir: ''}", 'data.dir: "" is empty'),
        ("data: {dir: 2024}", "data.dir: 2024 is not a path; put it in quotes: '2024'"),
        ("data: {source: stdlib}", 'data.source: must be python_stdlib, not "stdlib" (or null)'),
        ("checkpoint: {dir: 7}", "checkpoint.dir: 7 is not a path; put it in quotes: '7' (or null)"),
        ("model: {rope: {scaling: {factor: 8}}}", "model.rope.scaling.low_frequency_factor is missing (Frequencies"),
        ("seed: !!int abc", "seed: invalid literal"),
        ("seed: !python 3", "seed: could not determine a constructor for the tag"),
        ("model: &m {rope: *m}", "model.rope: this alias stands inside what it stands for"),
    ],
)
def test_a_wrong_value_is_refused_with_its_line_and_key(write: Write, line: str, message: str) -> None:
    assert faults(write(RUN + line))[0].startswith(f"c.yml:3: {message}")


def test_all_faults_are_listed_at_once_one_line_each(write: Write) -> None:
    path = write("steps: 1.5\nsteps: 3\nmodel:\n  heads: four\n  layrs: 2\nlr: 1\n")
    lines = faults(path, "--sed=1", "data.sequence=long")
    files = ["c.yml:2", "override --sed=1", "c.yml", "c.yml:1", "c.yml:4", "c.yml:5"]
    assert [line.split(": ")[0] for line in lines] == [*files, "override data.sequence=long", "c.yml:6"]
    assert lines[2].startswith("c.yml: run_dir is missing")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "c.yml: is empty"),
        (b"# only a comment\n", "c.yml: is empty"),
        (b"- run_dir\n", "c.yml: must be lines of `key: value`, not a list"),
        (b"words\n", "c.yml: must be lines of `key: value`, not the value words"),
        (b"\xff\xfe\x00\x01", "c.yml: is not text in UTF-8"),
        (b"run_dir: a\x00b\n", "c.yml: not valid YAML: "),
        (b"run_dir: a\nmodel:\n\tlayers: 2\n", "c.yml:3: not valid YAML: a tab can't indent"),
        (b"run_dir: a\nmodel: {layers: 2\nsteps: 3\n", "c.yml:3: not valid YAML: "),
        (b"run_dir: a\nsteps: 3: 4\n", "c.yml:2: not valid YAML: "),
        (b"run_dir: a\n---\nsteps: 3\n", "c.yml:2: not valid YAML: a second document starts here"),
        (b"run_dir: *other\n", "c.yml:1: not valid YAML: found undefined alias"),
        (b"? [a, b]\n: 3\n", "c.yml:1: a key must be a word"),
    ],
)
def test_a_file_that_holds_no_config_is_refused_with_the_line(write: Write, text: bytes, message: str) -> None:
    assert faults(write(text))[0].startswith(message)


def test_a_missing_file_is_refused_with_the_one_that_was_meant(write: Write, tmp_path: Path) -> None:
    write(RUN, "quickstart.yml")
    missing = tmp_path / "quikstart.yml"
    assert faults(missing) == ["quikstart.yml: no such file; did you mean quickstart.yml?"]
    assert faults(tmp_path) == [f"{tmp_path.name}: is a directory; name a YAML file in it"]


def test_yaml_is_read_as_yaml_1_2(write: Write) -> None:
    config = load(write(RUN + "seed: 010\nlog_every: 0x10\noptimizer: {learning_rate: 1e-4, weight_decay: 1}\n"))
    assert (config.seed, config.log_every) == (10, 16)
    assert config.optimizer.learning_rate == 1e-4
    assert type(config.optimizer.weight_decay) is float
    assert load(write("run_dir: on\nsteps: 10")).run_dir == Path("on")


def test_an_override_sets_any_key_with_a_yaml_value(write: Write) -> None:
    config = load(
        write(RUN + "model: {window: 5, heads: 4}\n"),
        [
            "--optimizer.learning_rate=1e-3",
            "model.window=null",
            "model.qk_norm=true",
            "data={sequence: 8}",
            "run_dir=a=b",
        ],
    )
    assert config.optimizer.learning_rate == 1e-3
    assert (config.model.window, config.model.qk_norm, config.model.heads) == (None, True, 4)
    assert (config.data.sequence, config.run_dir) == (8, Path("a=b"))


def test_bases_are_merged_key_by_key_along_the_chain(write: Write) -> None:
    write(RUN + "model: {layers: 2, heads: 4, rope: {theta: 5.0}}\nseed: 1\n", "ground.yml")
    write("base: ../ground.yml\nmodel: {layers: 3}\nseed: 2\n", "sub/middle.yml")
    config = load(write("base: sub/middle.yml\nmodel: {rope: {theta: 7.0}}\n"), ["model.embed=64"])
    assert (config.model.layers, config.model.heads, config.model.embed) == (3, 4, 64)
    assert (config.model.rope.theta, config.seed) == (7.0, 2)


def test_each_key_knows_where_it_was_written(write: Write, tmp_path: Path) -> None:
    write(RUN + "model:\n  layers: 2\n  heads: 4\n", "ground.yml")
    path = write("base: ground.yml\nmodel:\n  layers: 3\n")
    origins = load(path, ["--model.embed=64"]).origins
    assert origins["model.heads"] == f"{tmp_path}/ground.yml:5"
    assert origins["model.layers"] == f"{path}:3"
    assert origins["model.embed"] == "override --model.embed=64"
    assert "model.mlp" not in origins


def test_a_fault_in_a_base_is_placed_in_the_base(write: Write) -> None:
    write(RUN + "model: {layers: two}\n", "ground.yml")
    assert faults(write("base: ground.yml\n")) == ['ground.yml:3: model.layers: "two" is text, not a whole number']


def test_a_circle_of_bases_is_refused_with_the_chain(write: Write) -> None:
    write("base: c.yml\n", "b.yml")
    (line,) = faults(write("seed: 1\nbase: b.yml\n"))
    assert line == "b.yml:1: base goes in a circle: c.yml -> b.yml -> c.yml; remove one of these base lines"


def test_a_circle_is_seen_under_any_spelling_of_a_path(write: Write) -> None:
    write("", "sub/empty.yml")
    assert faults(write("base: sub/../c.yml\n")) == [
        "c.yml:1: base goes in a circle: c.yml -> sub/../c.yml; remove one of these base lines"
    ]


def test_a_wrong_base_is_refused_where_it_is_named(write: Write) -> None:
    assert faults(write(RUN + "base: gone.yml\n")) == ["c.yml:3: gone.yml: no such file"]
    assert faults(write(RUN + "base: [a]\n")) == [
        "c.yml:3: base: must be the path of a YAML file, relative to this one"
    ]


def test_another_variant_leaves_the_keys_of_the_base_variant_behind(write: Write) -> None:
    write(RUN + "optimizer: {b1: 0.5, clip: 2.0, schedule: {warmup: 3, final: 0.5}}\n", "ground.yml")
    path = write("base: ground.yml\noptimizer: {name: sgd, schedule: {kind: constant}}\n")
    optimizer = load(path, ["optimizer.momentum=0.5"]).optimizer
    assert isinstance(optimizer, SgdConfig)
    assert (optimizer.clip, optimizer.momentum) == (2.0, 0.5)
    assert optimizer.schedule == ConstantSchedule(kind="constant", warmup=3)
    back = load(path, ["optimizer.b2=0.5", "optimizer.name=adamw"]).optimizer
    assert isinstance(back, AdamWConfig)
    assert back.b2 == 0.5


def test_a_variant_is_strict_about_the_keys_given_with_it(write: Write) -> None:
    write(RUN + "optimizer: {b1: 0.5}\n", "ground.yml")
    path = write("base: ground.yml\noptimizer: {name: sgd, b2: 0.5}\n")
    assert faults(path) == ["c.yml:2: optimizer.b2 is only for optimizer.name=adamw or lion or muon"]
    assert faults(write(RUN), "optimizer.b1=0.5", "optimizer.name=sgd") == [
        "override optimizer.b1=0.5: optimizer.b1 is only for optimizer.name=adamw or lion or muon"
    ]


def test_a_key_that_no_variant_has_is_refused_in_the_base_too(write: Write) -> None:
    write(RUN + "optimizer: {lr: 1}\n", "ground.yml")
    assert faults(write("base: ground.yml\noptimizer: {name: sgd}\n")) == [
        "ground.yml:3: unknown key lr in section optimizer; did you mean optimizer.learning_rate?"
    ]


def test_the_variant_of_a_base_holds_where_the_child_names_none(write: Write) -> None:
    write(RUN + "optimizer: {name: sgd, momentum: 0.5}\n", "ground.yml")
    optimizer = load(write("base: ground.yml\noptimizer: {learning_rate: 0.1}\n")).optimizer
    assert optimizer == SgdConfig(name="sgd", momentum=0.5, learning_rate=0.1)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["optimizer.name=sgd", "optimizer.schedule.kind=constant"],
        ["optimizer.learning_rate=1e-7", "optimizer.epsilon=1.2345678901234567e-30", "model.rope.theta=1e22"],
        ["model.rope.scaling={factor: 8, low_frequency_factor: 1, high_frequency_factor: 4, original_sequence: 8192}"],
        ["run_dir='010'", "data.dir='a: b # c'", "checkpoint.dir=/scratch/täglich", "compile_cache=null"],
        [f"run_dir={'long name ' * 30}x", "distributed={coordinator: 'h:1', processes: 2, process_id: 0}"],
    ],
)
def test_the_printed_config_reads_back_equal(write: Write, overrides: list[str]) -> None:
    config = load(write(RUN), overrides)
    printed = dump(config)
    again = load(write(printed, "printed.yml"))
    assert again == config
    assert hash(again) == hash(config)
    assert dump(again) == printed


def test_the_printed_config_has_every_key_in_the_order_of_the_schema(write: Write) -> None:
    printed = [line.split(":")[0] for line in dump(load(write(RUN))).splitlines() if not line.startswith(" ")]
    assert printed == list(Config.model_fields)


def test_configs_differ_by_value_and_not_by_place(write: Write) -> None:
    here, there = load(write(RUN)), load(write("\n" + RUN, "other.yml"))
    assert here == there
    assert here != load(write(RUN), ["seed=1"])
    assert here.model_copy(update={"seed": 1}).origins == here.origins


def test_paths_in_the_home_directory_are_expanded(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(write(RUN), ["data.dir=~/text", "checkpoint.dir=~/checkpoints"])
    assert config.data.dir == Path("/home/someone/text")
    assert config.checkpoint_dir == Path("/home/someone/checkpoints")
    assert config.compile_cache == Path("/home/someone/.cache/jaxtrain/compile")


@pytest.mark.parametrize("key", ["run_dir", "data.dir", "checkpoint.dir"])
def test_a_url_where_a_directory_is_needed_is_refused(write: Write, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.*is a URL; a local or mounted directory is needed"):
        load(write(RUN), [f"{key}=gs://bucket/x"])


def test_nulls_resolve_to_what_they_stand_for() -> None:
    config = Config.model_validate({"run_dir": "r", "global_batch": 6, "model": {"vocab": 99, "embed": 60, "heads": 6}})
    assert (config.checkpoint_dir, config.eval_batch, config.data_vocab) == (Path("r/checkpoints"), 6, 99)
    assert (config.model.resolved_kv_heads, config.model.resolved_head_dim) == (6, 10)
    update = {"eval": {"batch": 4}, "data": {"vocab": 9}, "checkpoint": {"dir": "b/c"}}
    model = {"embed": 60, "heads": 6, "kv_heads": 2, "head_dim": 8}
    config = Config.model_validate({"run_dir": "r", "model": model, **update})
    assert (config.checkpoint_dir, config.eval_batch, config.data_vocab) == (Path("b/c"), 4, 9)
    assert (config.model.resolved_kv_heads, config.model.resolved_head_dim) == (2, 8)


HUGE = "9" * 26


@pytest.mark.parametrize(
    "key", ["steps", "model.vocab", "model.heads", "global_batch", "data.workers", "distributed.start_timeout"]
)
def test_a_number_beyond_what_devices_count_with_is_refused_at_once(write: Write, key: str) -> None:
    (line,) = faults(write(RUN), f"{key}={HUGE}")
    assert line.startswith(f"override {key}={HUGE}: {key}: must be at most ")


def test_the_divisors_of_the_largest_number_are_found_at_once(write: Write) -> None:
    (line,) = faults(write(RUN), f"model.heads={2**31 - 2}", "model.kv_heads=4", "model.head_dim=2")
    assert "kv_heads may be 1, 2, 3, 6, 7, 9," in line


@pytest.mark.parametrize("key", ["run_dir", "data.dir", "compile_cache", "checkpoint.dir"])
def test_a_path_that_no_file_can_have_is_refused_with_its_key(write: Write, key: str) -> None:
    (line,) = faults(write(RUN), f"{key}=~nobody-of-this-name/x")
    assert f"{key}: " in line
    assert "home directory that is not known here" in line
    (line,) = faults(write(RUN), f'{key}="a\\0b"')
    assert "null character" in line


def test_a_base_that_no_file_can_have_is_refused_with_its_line(write: Write) -> None:
    (line,) = faults(write(RUN + "base: ~nobody-of-this-name/x.yml\n"))
    assert line.startswith("c.yml:3: base: ")
    assert "home directory that is not known here" in line
    (line,) = faults(write(RUN + 'base: "a\\0b"\n'))
    assert line.startswith("c.yml:3: base: ")


def test_a_link_that_leads_to_itself_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "c.yml").symlink_to("c.yml")
    (line,) = faults(tmp_path / "c.yml")
    assert line.startswith("c.yml: can't be read: ")


@pytest.mark.parametrize(
    "value", ["[" * 2000 + "]" * 2000, "{a: " * 2000 + "}" * 2000, "{a: " * 60 + "1" + "}" * 60, "[" * 300 + "]" * 300]
)
def test_nesting_without_end_is_refused_in_one_line(write: Write, value: str) -> None:
    (line,) = faults(write(f"{RUN}seed: {value}\n"))
    assert line.startswith("c.yml")
    assert "nested too deeply" in line or "is not a whole number" in line


def test_a_list_tagged_as_a_mapping_is_refused_with_its_line(write: Write) -> None:
    (line,) = faults(write(RUN + "model: !!omap [layers: 3]\n"))
    assert line.startswith("c.yml:3: model: a list tagged as a mapping")


OWN = RUN + "model: {target: 'mine.tasks:Mine', width: 3, nested: {deep: [1, two]}}\n"


def test_naming_ones_own_code_chooses_it_and_its_keys_are_kept_as_they_are(write: Write) -> None:
    config = load(write(OWN), ["data.target=mine:data", "data.rows=7", "data.shuffle=false", "model.nested.more=1e-4"])
    assert isinstance(config.model, OwnModelConfig)
    assert isinstance(config.data, OwnDataConfig)
    assert (config.model.family, config.model.target, config.data.kind) == ("target", "mine.tasks:Mine", "target")
    assert config.model.own_keys == {"width": 3, "nested": {"deep": [1, "two"], "more": 1e-4}}
    assert (config.data.own_keys, config.data.shuffle) == ({"rows": 7}, False)
    assert config.origins["data.rows"] == "override data.rows=7"
    again = load(write(dump(config), "printed.yml"))
    assert again == config
    assert hash(again) == hash(config)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("model: {target: mine}", 'model.target: "mine" must be MODULE:NAME, such as my_package.my_module:MyTask'),
        ("model: {target: 'mine.py:Task-1'}", 'model.target: "mine.py:Task-1" must be MODULE:NAME'),
        ("model: {target: 3}", "model.target: 3 is not text; put it in quotes: '3'"),
        ("model: {family: target, width: 3}", "model.target is missing (MODULE:NAME of a callable"),
        ("model: {family: decoder, target: 'm:T'}", "model.target is only for model.family=target"),
        ("model: {family: gpt}", 'model.family: must be decoder or vit or target, not "gpt"'),
        ("model: {family: vit, vocab: 3}", "model.vocab is only for model.family=decoder"),
        ("data: {kind: digits, dir: x}", "data.dir is only for data.kind=tokens"),
        ("model: {width: 3}", "unknown key width in section model; did you mean "),
        ("data: {target: 'm:d', when: 2024-01-01}", 'data.when: "2024-01-01" is a date, not a number, text, list or'),
        ("data: {target: 'm:d', share: [.inf]}", "data.share: a list is no finite number"),
        ("data: {target: 'm:d', workers: two}", 'data.workers: "two" is text, not a whole number'),
    ],
)
def test_a_wrong_family_kind_or_target_is_refused_with_its_line(write: Write, line: str, message: str) -> None:
    assert faults(write(RUN + line))[0].startswith(f"c.yml:3: {message}")


def test_another_family_leaves_the_keys_of_the_base_behind_and_back(write: Write) -> None:
    write(RUN + "model: {vocab: 99, layers: 3, qk_norm: true}\n", "ground.yml")
    own = load(write("base: ground.yml\nmodel: {target: 'm:T', layers: 5}\n")).model
    assert isinstance(own, OwnModelConfig)
    assert own.own_keys == {"layers": 5}
    vit = load(write("base: c.yml\nmodel: {family: vit, layers: 7}\ndata: {kind: digits}\n", "v.yml")).model
    assert vit == VitConfig(family="vit", layers=7)
    back = load(write("base: v.yml\nmodel: {family: decoder, vocab: 11}\ndata: {kind: tokens}\n", "d.yml")).model
    assert back == DecoderConfig(vocab=11, layers=7)
    by_name = load(write("base: v.yml\nmodel: {target: 'm:T', mine: 1}\n", "o.yml")).model
    assert by_name == OwnModelConfig.model_validate({"target": "m:T", "mine": 1})
    assert (
        load(write("base: o.yml\nmodel: {family: decoder}\ndata: {kind: tokens}\n", "p.yml")).model == DecoderConfig()
    )


def test_the_key_of_another_own_task_is_kept_and_judged_by_its_code(write: Write) -> None:
    write(OWN, "ground.yml")
    model = load(write("base: ground.yml\nmodel: {target: 'm:Other'}\n")).model
    assert isinstance(model, OwnModelConfig)
    assert set(model.own_keys) == {"width", "nested"}
