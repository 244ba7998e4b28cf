"""The batch-size ramp: each size is compiled once, the position counts rows, and no interruption changes a batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain import loop
from jaxtrain.config import Config
from jaxtrain.data import RowTable
from jaxtrain.errors import ConfigError
from jaxtrain.telemetry.jsonl import read
from jaxtrain.training_data import open_data
from tests.factories import make_dataset, make_documents
from tests.faults import with_nan_row
from tests.runs import (
    checkpoint_meta,
    checkpoint_steps,
    crash_after,
    events,
    run_here,
    step_losses,
    tiny_config,
    train_group,
    write_tiny,
)

RAMP = ["batch_ramp=[{steps: 3, global_batch: 2}, {steps: 2, global_batch: 4}]"]
SIZES = [2, 2, 2, 4, 4, 8, 8, 8, 8, 8]
STARTS = [0, 2, 4, 6, 10, 14, 22, 30, 38, 46]
OVERRIDES = [*RAMP, "data.log_rows=true", "model.dropout=0.5", "checkpoint.every=1", "checkpoint.keep=20"]


@pytest.fixture(scope="module")
def ramped(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Path:
    """The directory of a ramped run of ten steps that nobody disturbed."""
    config = tiny_config(tmp_path_factory.mktemp("ramped"), tiny_data, *OVERRIDES)
    run_here(config)
    return config.run_dir


def test_each_step_has_the_size_of_its_part_and_the_position_counts_rows(ramped: Path) -> None:
    lines = read(ramped / "rows-0.jsonl")
    assert [len(line["rows"]) for line in lines] == SIZES
    assert [line["position"] for line in lines] == STARTS
    assert [line["global_batch"] for line in read(ramped / "metrics.jsonl")] == SIZES
    assert [checkpoint_meta(ramped, step)["position"] for step in (2, 3, 4, 10)] == [4, 6, 10, 54]


def test_the_rows_are_those_of_a_run_without_a_ramp_in_the_same_order(ramped: Path, tmp_path: Path) -> None:
    config = tiny_config(tmp_path, tmp_path, "data.dir=" + str(_data_of(ramped)))
    order = open_data(config).order
    read_rows = [row for line in read(ramped / "rows-0.jsonl") for row in line["rows"]]
    assert read_rows == order.rows_at(np.arange(54)).tolist()


def _data_of(run_dir: Path) -> str:
    return str(checkpoint_meta(run_dir, 10)["config"]["data"]["dir"])


def test_every_size_is_compiled_once_and_before_the_first_step(ramped: Path) -> None:
    kinds = [event["kind"] for event in read(ramped / "events.jsonl")]
    compiled = [event.get("rows") for event in events(ramped, "compile") if event["what"] == "train_step"]
    assert compiled == [2, 4, 8]
    assert "compile" not in kinds[kinds.index("save") :]


@pytest.mark.parametrize("step", [2, 3, 5, 6])
def test_a_run_stopped_in_the_middle_of_a_ramp_goes_on_bit_equal(
    step: int, ramped: Path, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, *OVERRIDES)
    with crash_after(step + 1):
        run_here(config)
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "restore")] == [step]
    assert step_losses(config.run_dir) == step_losses(ramped)
    assert read(config.run_dir / "rows-0.jsonl") == read(ramped / "rows-0.jsonl")
    sums = [checkpoint_meta(run_dir, 10)["checksums"] for run_dir in (config.run_dir, ramped)]
    assert sums[0] == sums[1]


def test_a_ramp_has_the_same_losses_on_two_devices_with_micro_batches(
    ramped: Path, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, *OVERRIDES, "mesh.fsdp=2", "microbatch=1")
    run_here(config, 2)
    np.testing.assert_allclose(
        list(step_losses(config.run_dir).values()), list(step_losses(ramped).values()), rtol=1e-5
    )


@pytest.mark.parametrize("bad_step", [2, 3, 4], ids=["inside a part", "the last of a part", "the first of a part"])
def test_a_skipped_batch_counts_in_its_part_and_the_run_resumes_behind_it(
    bad_step: int, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size follows the position: batches are the same ones as without the skip, one more of them."""
    overrides = [*OVERRIDES, "data.pack=false", "non_finite=skip"]

    def config(name: str) -> Config:
        return tiny_config(tmp_path, tiny_data, *overrides, f"run_dir={tmp_path / name}")

    bad_row = int(open_data(config("straight")).order.row(STARTS[bad_step - 1]))
    monkeypatch.setattr(RowTable, "assemble", with_nan_row(bad_row))
    run_here(config("straight"))
    lines = read(tmp_path / "straight" / "rows-0.jsonl")
    assert [line["position"] for line in lines] == [*STARTS, 54]
    assert [len(line["rows"]) for line in lines] == [*SIZES, 8]
    assert [line["position"] for line in lines if line["skipped"]] == [STARTS[bad_step - 1]]
    meta = checkpoint_meta(tmp_path / "straight", 10)
    assert (meta["position"], meta["skipped"]) == (62, 1)
    with crash_after(4):
        run_here(config("stopped"))
    run_here(config("stopped"))
    assert step_losses(tmp_path / "stopped") == step_losses(tmp_path / "straight")
    assert checkpoint_meta(tmp_path / "stopped", 10)["position"] == 62


def finite(folder: Path, *overrides: str) -> Config:
    """27 rows, once."""
    if not (folder / "data").exists():
        make_dataset(folder / "data", make_documents([20] * 27))
    return tiny_config(folder, folder / "data", "data.pack=false", "data.epochs=1", *overrides)


def test_the_length_of_finite_data_is_counted_in_the_ramps_sizes(tmp_path: Path) -> None:
    config = finite(tmp_path, *RAMP, "steps=null")
    assert loop.planned_steps(config, open_data(config)) == 7, "2 2 2 4 4 and then 13 rows"
    run_here(config)
    assert checkpoint_steps(config.run_dir)[-1] == 7
    assert checkpoint_meta(config.run_dir, 7)["position"] == 30
    run_here(config)
    assert events(config.run_dir, "stop")[-1]["reason"] == "already complete"


def test_more_steps_than_finite_data_give_in_the_ramps_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="after batch_ramp allow 7 steps; set steps to at most 7"):
        run_here(finite(tmp_path, *RAMP, "steps=8"))


def test_a_ramp_that_takes_all_of_finite_data_is_refused(tmp_path: Path) -> None:
    config = finite(tmp_path, "steps=null", "batch_ramp=[{steps: 14, global_batch: 2}]")
    with pytest.raises(ConfigError, match=r"batch_ramp takes 14 steps of the run, steps=14"):
        run_here(config)


def test_learning_rates_that_follow_the_batch_are_those_of_each_size(tmp_path: Path, tiny_data: Path) -> None:
    scaling = ["optimizer.batch_scaling=linear", "optimizer.reference_batch=8", "optimizer.schedule.kind=constant"]
    metrics = run_here(tiny_config(tmp_path, tiny_data, *RAMP, *scaling))
    assert [line["learning_rate"] for line in metrics] == pytest.approx([1e-2 * size / 8 for size in SIZES])


def test_another_ramp_is_refused_on_resume(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, *OVERRIDES)
    with crash_after(2):
        run_here(config)
    with pytest.raises(ConfigError, match=r"batch_ramp: +\[\{.steps.: 3"):
        run_here(tiny_config(tmp_path, tiny_data, *OVERRIDES[1:], "batch_ramp=[{steps: 5, global_batch: 2}]"))


@pytest.mark.slow
def test_two_processes_ramp_as_one(ramped: Path, tmp_path: Path, tiny_data: Path) -> None:
    arguments = [str(write_tiny(tmp_path, tiny_data)), *OVERRIDES, "mesh.data=2"]
    results = train_group(arguments, devices=1)
    assert [code for code, _ in results] == [0, 0], results
    np.testing.assert_allclose(
        list(step_losses(tmp_path / "run").values()), list(step_losses(ramped).values()), rtol=1e-5
    )
    rows: list[Any] = [read(tmp_path / "run" / f"rows-{process}.jsonl") for process in (0, 1)]
    together = [a["rows"] + b["rows"] for a, b in zip(*rows, strict=True)]
    assert together == [line["rows"] for line in read(ramped / "rows-0.jsonl")]
