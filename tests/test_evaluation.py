"""Evaluation is exact: each held-out row once, whatever the batch, the mesh and the tail."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.data import Order, host_batches
from jaxtrain.errors import ConfigError
from jaxtrain.evaluation import Evaluator
from jaxtrain.placement import Placement
from jaxtrain.program import build
from jaxtrain.training_data import open_data
from tests.factories import make_dataset, make_documents
from tests.runs import MESHES, run_here, tiny_config

COUNTS = [1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31]


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int, str], dict[str, float]]:
    """(held-out rows, batch, mesh) -> the evaluation of the initial parameters."""
    folder = tmp_path_factory.mktemp("evaluation")

    def run(rows: int, batch: int, mesh: str) -> dict[str, float]:
        data = folder / f"data-{rows}"
        if not data.exists():
            held_out = make_documents([count + 1 for count in COUNTS[:rows]], seed=1)
            make_dataset(data, make_documents([20] * 8), held_out)
        devices, overrides = MESHES[mesh]
        config = tiny_config(folder, data, "eval.every=1", f"eval.batch={batch}", "data.pack=false", *overrides)
        program = build(config, jax.devices()[:devices])
        source = open_data(config).held_out
        assert source is not None
        params = program.init(program.initial_key())["params"]
        return Evaluator(program.eval_step, Placement(program.eval_batch), source, batch, prefetch=2)(params)

    return run


@pytest.fixture(scope="module")
def row_by_row(evaluate: object, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], float]:
    """The mean over all counted targets of the first rows, summed one row at a time in float64."""
    folder = tmp_path_factory.mktemp("row-by-row")
    make_dataset(folder / "data", make_documents([20] * 8), make_documents([count + 1 for count in COUNTS], seed=1))
    config = tiny_config(folder, folder / "data", "eval.every=1", "eval.batch=1", "data.pack=false")
    program = build(config, jax.devices()[:1])
    params = program.init(program.initial_key())["params"]
    source = open_data(config).held_out
    assert source is not None
    place = Placement(program.eval_batch)
    order = Order(rows=11, seed=0, shuffle=False, epochs=1)
    losses, counts = [], []
    for batch in host_batches(source, order, 1, place.rows, prefetch=0):
        mean = jax.device_get(program.eval_step(params, place(batch))["loss"])
        losses.append(np.float64(mean.total))
        counts.append(float(mean.weight))
    assert counts == COUNTS
    return lambda rows: float(np.sum(losses[:rows]) / np.sum(counts[:rows]))


@pytest.mark.parametrize("batch", [8, 4, 16])
def test_eleven_ragged_rows_give_the_exact_mean_in_any_batch(
    batch: int, evaluate: Callable[..., dict[str, float]], row_by_row: Callable[[int], float]
) -> None:
    assert evaluate(11, batch, "one device")["loss"] == pytest.approx(row_by_row(11), rel=1e-5)


@pytest.mark.parametrize("batch", [8, 16])
@pytest.mark.parametrize("rows", [11, 3])
def test_shards_without_a_row_change_nothing(
    rows: int, batch: int, evaluate: Callable[..., dict[str, float]], row_by_row: Callable[[int], float]
) -> None:
    assert evaluate(rows, batch, "data=8")["loss"] == pytest.approx(row_by_row(rows), rel=1e-5)


def test_the_mean_is_over_targets_and_not_over_batches(
    evaluate: Callable[..., dict[str, float]], row_by_row: Callable[[int], float]
) -> None:
    assert row_by_row(11) != pytest.approx(np.mean([row_by_row(8), row_by_row(11)]), rel=1e-5)
    assert evaluate(11, 8, "one device").keys() == {"loss"}


def test_an_evaluation_batch_that_the_mesh_does_not_divide_is_refused_by_name(
    evaluate: Callable[..., dict[str, float]],
) -> None:
    with pytest.raises(ConfigError, match=r"eval\.batch=4"):
        evaluate(11, 4, "data=8")


def test_a_run_trains_on_eight_rows_and_evaluates_on_more_at_a_time(tmp_path: Path, tiny_data: Path) -> None:
    small = run_here(tiny_config(tmp_path, tiny_data, "steps=2", "eval.every=1", f"run_dir={tmp_path / 'a'}"))
    large = run_here(
        tiny_config(tmp_path, tiny_data, "steps=2", "eval.every=1", "eval.batch=16", f"run_dir={tmp_path / 'b'}")
    )
    evaluations = [[line["eval_loss"] for line in metrics if "eval_loss" in line] for metrics in (small, large)]
    assert len(evaluations[0]) == 2
    np.testing.assert_allclose(*evaluations, rtol=1e-5)


def test_a_data_set_without_held_out_rows_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_documents([20] * 8), held_out=())
    with pytest.raises(ConfigError, match=r"eval\.every=1, but data\.dir=.* holds nothing out .* set eval\.every=0"):
        run_here(tiny_config(tmp_path, tmp_path / "data", "eval.every=1"))
    assert not (tmp_path / "run").exists()
