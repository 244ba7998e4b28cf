"""The moving average of the weights: what it is, where it lies, what it is evaluated for."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.models.parameters import named_leaves
from jaxtrain.optimizer import updated_average, weights
from tests.runs import (
    MESHES,
    checkpoint_meta,
    crash_after,
    events,
    make_batches,
    read_checkpoint,
    run_here,
    tiny_config,
    tiny_program,
    train_on,
)

EMA = "ema={decay: 0.75}"


def averages(values: list[float], decay: float) -> list[float]:
    """The average after each update that made one of these values, started from 1,000."""
    average: Any = {"w": jnp.float32(1000)}
    found = []
    for step, value in enumerate(values, start=1):
        average = updated_average(average, {"w": jnp.float32(value)}, jnp.int32(step), jnp.float32(decay))
        found.append(average["w"].item())
    return found


def test_the_average_is_the_mean_of_all_weights_until_its_window_is_full_and_then_forgets() -> None:
    values = [3.0, -1.0, 4.0, 1.0, -5.0, 9.0]
    want = [3.0, 1.0, 2.0, 1.75]
    want.append(0.75 * want[-1] + 0.25 * -5.0)
    want.append(0.75 * want[-1] + 0.25 * 9.0)
    assert averages(values, 0.75) == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("mesh", ["one device", "data=2 fsdp=2 tensor=2"])
def test_the_average_of_a_run_is_that_of_its_weights_and_lies_as_they_do(mesh: str) -> None:
    devices, overrides = MESHES[mesh]
    program = tiny_program(devices, EMA, *overrides)
    state, seen = None, []
    for batch in make_batches(6):
        run = train_on(program, [batch], state=state)
        state = run.state
        seen.append(run.parameters())
    for name, leaf in named_leaves(state["ema"]).items():
        values = [parameters[name].astype(np.float64) for parameters in seen]
        want = np.mean(values[:4], 0)
        for value in values[4:]:
            want = 0.75 * want + 0.25 * value
        np.testing.assert_allclose(leaf, want, rtol=1e-5, atol=1e-6, err_msg=name)
        assert leaf.dtype == jnp.float32
        assert leaf.sharding.is_equivalent_to(named_leaves(state["params"])[name].sharding, leaf.ndim)


def test_an_average_changes_no_weight() -> None:
    plain, averaged = (train_on(tiny_program(1, *overrides), make_batches(3)) for overrides in ((), (EMA,)))
    assert averaged.losses.tolist() == plain.losses.tolist()


def test_a_skipped_update_leaves_the_average_bit_unchanged() -> None:
    program, batches = tiny_program(1, EMA), make_batches(3)
    before = train_on(program, batches[:2])
    kept = jax.device_get(before.state["ema"])
    poisoned = {**batches[2], "weights": np.where(batches[2]["weights"] > 0, np.nan, 0.0)}
    bad = train_on(program, [poisoned], state=before.state)
    assert bad.metrics[0]["skipped"]
    for name, leaf in named_leaves(jax.device_get(bad.state["ema"])).items():
        assert leaf.tobytes() == named_leaves(kept)[name].tobytes(), name


def test_a_run_evaluates_both_and_saves_and_restores_the_average(tmp_path: Path, tiny_data: Path) -> None:
    def config(name: str, *mesh: str):
        return tiny_config(tmp_path, tiny_data, EMA, "eval.every=5", f"run_dir={tmp_path / name}", *mesh)

    metrics = run_here(config("straight"))
    evaluations = [line for line in metrics if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [5, 10]
    assert all(line["eval_ema_loss"] != line["eval_loss"] for line in evaluations)
    with crash_after(7):
        run_here(config("stopped"))
    run_here(config("stopped", "ema.evaluate=false"))
    sums = [checkpoint_meta(tmp_path / name, 10)["checksums"] for name in ("straight", "stopped")]
    assert sums[0] == sums[1]
    assert "ema.embed.table" in sums[0]
    saved = read_checkpoint(tmp_path / "straight", 10)
    assert {name[4:] for name in saved if name.startswith("ema.")} == {
        name[7:] for name in saved if name.startswith("params.")
    }
    event = events(tmp_path / "straight", "eval")[0]
    assert event["loss"] == evaluations[0]["eval_loss"]


def test_an_average_evaluated_and_saved_in_zero_s_parts_goes_on_on_one_device(tmp_path: Path, tiny_data: Path) -> None:
    overrides = (EMA, "eval.every=5", "checkpoint.every=5")
    with crash_after(7):
        run_here(tiny_config(tmp_path, tiny_data, *overrides, "mesh.data=2", "mesh.fsdp=2", "sharding.zero=1"), 4)
    metrics = run_here(tiny_config(tmp_path, tiny_data, *overrides))
    alone = run_here(tiny_config(tmp_path, tiny_data, *overrides, f"run_dir={tmp_path / 'alone'}"))
    found = [[line["eval_ema_loss"] for line in lines if "eval_ema_loss" in line] for lines in (metrics, alone)]
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_the_weights_to_use_are_the_run_s_or_their_average_with_what_is_frozen() -> None:
    program = tiny_program(1, EMA, 'optimizer.frozen=["embed.*"]')
    state = train_on(program, make_batches(2)).state
    assert weights(state, "params") is state["params"]
    averaged = weights(state, "ema")
    assert jax.tree.structure(averaged) == jax.tree.structure(state["params"])
    assert averaged["embed"]["table"] is state["params"]["embed"]["table"]
    assert averaged["head"]["projection"] is state["ema"]["head"]["projection"]
    with pytest.raises(ConfigError, match="ema: null"):
        weights({"params": {}}, "ema")
