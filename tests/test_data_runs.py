"""Runs over finite, ragged and mismatched data."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.data import ROW_IDS, host_batches
from jaxtrain.errors import ConfigError, DataError
from jaxtrain.placement import Placement
from jaxtrain.program import build
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.training_data import open_data
from tests.factories import make_dataset, make_documents
from tests.runs import (
    checkpoint_meta,
    checkpoint_steps,
    read_checkpoint,
    row_log,
    run_here,
    step_losses,
    tiny_config,
    train,
    train_group,
    train_steps,
    write_tiny,
)

ROWS = ["data.pack=false", "data.log_rows=true"]
EPOCH = [*ROWS, "steps=null", "data.epochs=1"]


def dataset(folder: Path, rows: int) -> Path:
    """Rows of 3 to 31 counted targets."""
    make_dataset(folder / "data", make_documents([4 + (5 * row) % 29 for row in range(rows)]))
    return folder / "data"


def targets(rows: int) -> int:
    return sum(3 + (5 * row) % 29 for row in range(rows))


def test_the_last_partial_batch_is_one_update_with_the_weight_of_its_rows(tmp_path: Path) -> None:
    data = dataset(tmp_path, 20)
    plain, accumulated = (
        train_steps(tiny_config(tmp_path, data, *EPOCH, "optimizer.name=sgd", microbatch), 3)
        for microbatch in ("microbatch=8", "microbatch=2")
    )
    assert len(plain.metrics) == len(accumulated.metrics) == 3
    np.testing.assert_allclose(accumulated.losses, plain.losses, rtol=1e-5)
    for name, value in plain.parameters().items():
        np.testing.assert_allclose(accumulated.parameters()[name], value, rtol=1e-5, atol=1e-8, err_msg=name)


def test_fillers_of_the_last_batch_are_not_counted(tmp_path: Path) -> None:
    data = dataset(tmp_path, 12)
    config = tiny_config(tmp_path, data, *EPOCH)
    metrics = run_here(config)
    assert [line["step"] for line in metrics] == [1, 2]
    assert sum(line["tokens"] for line in metrics) == targets(12)

    first = train_steps(config, 1)
    program = build(tiny_config(tmp_path, data, *EPOCH, "global_batch=4"), jax.devices()[:1])
    place, opened = Placement(program.batch), open_data(config)
    batch = next(host_batches(opened.table, opened.order, 4, place.rows, start=8, prefetch=0))
    batch.pop(ROW_IDS)
    _, alone = program.train_step(first.state, place(batch), program.inputs(2))
    assert metrics[1]["loss"] == pytest.approx(alone["loss"].item(), rel=1e-5)
    assert metrics[1]["tokens"] == alone["tokens"].item()


def test_a_tokenizer_larger_than_the_model_is_refused_at_start(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_documents([20] * 8), vocab=260)
    with pytest.raises(ConfigError, match=r"model\.vocab: 256, but the tokenizer of .* has 260 entries"):
        run_here(tiny_config(tmp_path, tmp_path / "data"))
    assert not (tmp_path / "run").exists()


def bad_id_at_step_4(folder: Path) -> Path:
    """Token id 300 in the third row of the fourth batch, in a data set that says its ids end at 255."""
    documents = make_documents([20] * 80)
    documents[3 * 8 + 2][5] = 300
    make_dataset(folder / "data", documents, vocab=301, claimed_vocab=256)
    return folder / "data"


NOT_THERE = {
    "data.dir": "data.dir={gone}",
    "eval.sets.other": "eval={{every: 5, sets: {{other: {gone}}}}}",
    "data.mixture.b.dir": "data={{kind: mixture, mixture: {{b: {{dir: {gone}, weight: 1}}}}}}",
}


@pytest.mark.parametrize("key", NOT_THERE)
def test_a_data_set_that_is_not_there_is_refused_with_its_key(key: str, tiny_data: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    named = tiny_config(tmp_path, tiny_data, NOT_THERE[key].format(gone=gone))
    with pytest.raises(ConfigError, match=rf"^{key}={gone}: {gone}: no such directory"):
        open_data(named)


def test_a_bad_token_id_stops_the_run_with_its_name_before_its_step(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path, bad_id_at_step_4(tmp_path), "data.shuffle=false", "data.pack=false", "checkpoint.every=1"
    )
    with pytest.raises(DataError, match=r"token id 300, outside model\.vocab 256") as error:
        run_here(config)
    assert "document 26" in str(error.value)
    assert error.value.exit_code == 5
    assert max(step_losses(config.run_dir)) <= 3
    assert all(np.isfinite(list(step_losses(config.run_dir).values())))
    assert max(checkpoint_steps(config.run_dir)) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_bad_token_id_ends_every_process_with_a_failure(processes: int, tmp_path: Path) -> None:
    arguments = [str(write_tiny(tmp_path, bad_id_at_step_4(tmp_path)))]
    arguments += ["data.shuffle=false", "data.pack=false", "distributed.heartbeat_timeout=10"]
    results = [train(arguments)] if processes == 1 else train_group([*arguments, "mesh.data=8"])
    assert all(code != 0 for code, _ in results)
    code, output = results[0]  # row 2 of the batch is process 0's
    assert code == 5, output
    assert "token id 300, outside model.vocab 256" in output
    assert "Traceback" not in output


def test_more_steps_than_the_data_allow_are_refused_with_the_number_that_they_do(tmp_path: Path) -> None:
    data = dataset(tmp_path, 20)
    with pytest.raises(ConfigError, match=r"steps=50, but data\.epochs=1 of 20 rows .* allow 3 steps"):
        run_here(tiny_config(tmp_path, data, *ROWS, "data.epochs=1", "steps=50"))
    assert not (tmp_path / "run").exists()


def test_one_epoch_ends_after_the_last_row_with_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, dataset(tmp_path, 20), *EPOCH)
    metrics = run_here(config)
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert checkpoint_steps(config.run_dir) == [3]
    assert checkpoint_meta(config.run_dir, 3)["position"] == 24
    shown = capsys.readouterr().out
    assert "attention: blocks in XLA (there is no flash kernel for cpu)" in shown
    assert "complete: 3 steps" in shown
    assert metrics[-1]["learning_rate"] == pytest.approx(1e-3), "the schedule ends with the data"
    run_here(config)
    assert "already complete" in capsys.readouterr().out


def test_two_epochs_train_on_every_row_twice(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, dataset(tmp_path, 20), *ROWS, "steps=null", "data.epochs=2")
    metrics = run_here(config)
    rows = [row for rows in row_log(config.run_dir).values() for row in rows]
    assert sorted(rows) == sorted([*range(20), *range(20)])
    assert sum(line["tokens"] for line in metrics) == 2 * targets(20)


def test_data_that_repeat_end_with_the_steps(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, dataset(tmp_path, 4), "steps=5", "data.pack=false", "data.log_rows=true")
    run_here(config)
    assert [sorted(rows) for rows in row_log(config.run_dir).values()] == [sorted([*range(4), *range(4)])] * 5
    assert read_checkpoint(config.run_dir, 5)["step"] == 5


@pytest.mark.slow
def test_two_processes_share_one_file_and_a_ragged_epoch_and_few_held_out_rows(tmp_path: Path) -> None:
    """15 rows in global batches of 16: one process has a full batch, the other 7; 3 held-out rows for 8 devices."""
    rows = make_documents([4 + (5 * row) % 29 for row in range(15)])
    made = make_dataset(tmp_path / "data", rows, make_documents([9, 20, 31], seed=1))
    assert len(made.manifest.splits["train"].shards) == 1
    arguments = [*ROWS, "steps=null", "data.epochs=3", "global_batch=16", "eval.every=1", "mesh.data=8"]
    results = train_group([str(write_tiny(tmp_path, tmp_path / "data")), *arguments], timeout=120)
    assert [code for code, _ in results] == [0, 0], results
    run_dir = tmp_path / "run"
    logs = [row_log(run_dir, process) for process in (0, 1)]
    assert sorted(logs[0]) == sorted(logs[1]) == [1, 2, 3]
    for step in (1, 2, 3):
        assert len(logs[0][step]) == len(logs[1][step]) == 8
    together = [row for log in logs for step in log.values() for row in step if row >= 0]
    assert sorted(together) == sorted([*range(15)] * 3)
    assert sorted([*logs[0][1], *logs[1][1]][:15]) == list(range(15)), "the first epoch: disjoint and complete"
    one_process = tiny_config(tmp_path, tmp_path / "data", *arguments, f"run_dir={tmp_path / 'one'}")
    expected = {line["step"]: line["eval_loss"] for line in run_here(one_process, 8) if "eval_loss" in line}
    lines = [line for line in _metrics(run_dir) if "eval_loss" in line]
    assert {line["step"]: line["eval_loss"] for line in lines} == pytest.approx(expected, rel=1e-5)
    assert len(lines) == 3


def _metrics(run_dir: Path) -> list[dict[str, float]]:
    return read_metrics(run_dir / "metrics.jsonl")
