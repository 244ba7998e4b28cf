"""Frozen parameters: by name, bit-unchanged, without moments, without gradient."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.models.parameters import named_leaves
from tests.runs import (
    checkpoint_meta,
    crash_after,
    make_batches,
    read_checkpoint,
    run_here,
    tiny_config,
    tiny_program,
    train_on,
)

FROZEN = 'optimizer.frozen=["embed.*", layers.attention.query]'
NAMES = {"embed.table", "layers.attention.query"}


@pytest.mark.parametrize("microbatch", [(), ("microbatch=2",)], ids=["one pass", "accumulated"])
def test_frozen_parameters_keep_their_bits_and_all_others_train(microbatch: tuple[str, ...]) -> None:
    program = tiny_program(1, FROZEN, *microbatch)
    before = named_leaves(jax.device_get(program.init(program.initial_key())["params"]))
    run = train_on(program, make_batches(3))
    for name, leaf in run.parameters().items():
        assert (leaf.tobytes() == before[name].tobytes()) is (name in NAMES), name


def test_frozen_parameters_have_no_moments_and_no_average() -> None:
    state = tiny_program(1, FROZEN, "ema={decay: 0.9}").state
    for part in ("optimizer", "ema"):
        names = named_leaves(state[part])
        assert any(name.endswith("layers.attention.key") for name in names)
        assert [name for name in names if name.endswith(tuple(NAMES))] == []


def test_a_frozen_parameter_has_no_part_in_the_gradients_norm() -> None:
    free, frozen = (train_on(tiny_program(1, *overrides), make_batches(1)) for overrides in ((), (FROZEN,)))
    assert frozen.metrics[0]["loss"] == free.metrics[0]["loss"]
    assert frozen.metrics[0]["grad_norm"] < 0.9 * free.metrics[0]["grad_norm"]


def test_the_others_train_as_if_the_gradient_were_only_theirs() -> None:
    """Without clipping and decay, the first update of a parameter doesn't depend on who else is trained."""
    sgd = "optimizer={name: sgd, learning_rate: 0.1, clip: null}"
    free, frozen = (train_on(tiny_program(1, sgd, *overrides), make_batches(1)) for overrides in ((), (FROZEN,)))
    for name, leaf in frozen.parameters().items():
        if name not in NAMES:
            np.testing.assert_allclose(leaf, free.parameters()[name], rtol=1e-6, atol=1e-7, err_msg=name)


def products(*overrides: str) -> int:
    program = tiny_program(1, *overrides)
    text = program.train_step.lower(program.state, program.batch, program.abstract_inputs()).as_text()
    return text.count("stablehlo.dot_general")


def test_no_gradient_of_a_frozen_matrix_is_computed() -> None:
    assert products('optimizer.frozen=["layers.mlp.*"]') == products() - 3


def test_a_frozen_trunk_needs_less_memory_in_micro_batches_too() -> None:
    def temporary(*overrides: str) -> int:
        program = tiny_program(1, "microbatch=2", "model.vocab=4096", *overrides)
        compiled = program.train_step.lower(program.state, program.batch, program.abstract_inputs()).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    saved = temporary() - temporary('optimizer.frozen=["embed.*"]')
    assert saved >= 4 * 4096 * 64, "the accumulated gradient of the embedding"


def test_the_start_up_table_says_what_is_frozen(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, tiny_data, FROZEN, "steps=2")
    run_here(config)
    shown = [line.split(" (frozen)")[0].strip() for line in capsys.readouterr().out.splitlines() if "(frozen)" in line]
    assert set(shown) == NAMES


def test_a_run_with_frozen_parameters_resumes_bit_equal(tmp_path: Path, tiny_data: Path) -> None:
    def config(name: str):
        overrides = (FROZEN, "optimizer.name=muon", "ema={decay: 0.9}")
        return tiny_config(tmp_path, tiny_data, *overrides, f"run_dir={tmp_path / name}")

    run_here(config("straight"))
    with crash_after(7):
        run_here(config("stopped"))
    run_here(config("stopped"))
    sums = [checkpoint_meta(tmp_path / name, 10)["checksums"] for name in ("straight", "stopped")]
    assert sums[0] == sums[1]
    first, last = (read_checkpoint(tmp_path / "straight", step) for step in (5, 10))
    assert {name for name in first if name.startswith("params.") and (first[name] == last[name]).all()} == {
        f"params.{name}" for name in NAMES
    }


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("embd.*", r"optimizer\.frozen: embd\.\* matches no parameter; did you mean embed\.table\?"),
        ("layers.attention.qery", r"layers\.attention\.qery matches no parameter; did you mean .*attention\.query"),
        ("xyz", r"xyz matches no parameter; the parameters are embed\.table, head\.norm\.scale"),
        ("*", r"optimizer\.frozen: \* leaves no parameter to train"),
    ],
)
def test_a_pattern_without_a_parameter_is_refused_with_the_nearest_names(
    pattern: str, message: str, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, f'optimizer.frozen=["{pattern}"]')
    with pytest.raises(ConfigError, match=message) as error:
        run_here(config)
    assert str(error.value).startswith("override optimizer.frozen=")
    assert not (tmp_path / "run").exists()
