"""A real run under the supervisor: killed and started again, on fewer processes or with warm ones, it is one run."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.errors import EXIT_REPEATED_CRASH
from jaxtrain.telemetry.jsonl import read
from tests.event_files import read_scalars
from tests.faults import VARIABLE
from tests.launchers.launched import is_alive, wait_until
from tests.runs import (
    ROOT,
    checkpoint_meta,
    checkpoint_steps,
    environment,
    events,
    row_log,
    run_here,
    step_losses,
    tiny_config,
    train_group,
    write_tiny,
)

pytestmark = pytest.mark.slow

RUN = ["steps=24", "global_batch=24", "model.dropout=0.1", "data.log_rows=true", "checkpoint.every=4"]


WITH_FAULTS = """
import sys
from jaxtrain.command import leave
from jaxtrain.launch import main
leave(main(sys.argv[1:], module="tests.faults"))
"""


@contextmanager
def launched(arguments: list[str], devices: int, fault: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """`launch local` with so many virtual devices in each process, and a fault of tests.faults in each."""
    program = ["-m", "jaxtrain.launch"] if fault is None else ["-c", WITH_FAULTS]
    process = subprocess.Popen(
        [sys.executable, *program, "local", *arguments],
        env=environment(devices) | {VARIABLE: fault or ""}, cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def pids(run_dir: Path) -> list[int]:
    """The processes of the newest attempt."""
    return list(events(run_dir, "launch")[-1]["pids"])


def wait_for_step(step: int, run_dir: Path, attempt: int, process: subprocess.Popen[str]) -> None:
    """Until an attempt has got so far, or all has ended."""

    def reached() -> bool:
        if process.poll() is not None:
            raise AssertionError(f"ended before step {step}: {process.stdout.read() if process.stdout else ''}")
        if not (run_dir / "metrics.jsonl").exists() or len(events(run_dir, "launch")) < attempt:
            return False
        restored = len(events(run_dir, "restore")) >= attempt - 1
        return restored and max(step_losses(run_dir), default=0) >= step

    wait_until(reached)


def times_written(cache: Path) -> dict[Path, int]:
    """Of the programs of processes other than the first."""
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.suffix == ".executable"}


def test_killed_processes_are_named_at_once_and_the_end_is_bit_equal(tmp_path: Path, tiny_data: Path) -> None:
    cache = tmp_path / "cache"
    arguments = [str(write_tiny(tmp_path, tiny_data)), *RUN, "mesh.fsdp=8", f"compile_cache={cache}"]
    alone, run_dir = tmp_path / "alone", tmp_path / "run"
    results = train_group([*arguments, f"run_dir={alone}"])
    assert [code for code, _ in results] == [0, 0], results
    compiled = times_written(cache)
    assert compiled
    with launched(["--processes", "2", "--spares", "1", *arguments], devices=4) as process:
        for attempt, (step, rank) in enumerate([(6, 1), (14, 0)], start=1):
            wait_for_step(step, run_dir, attempt, process)
            os.kill(pids(run_dir)[rank], signal.SIGKILL)
            wait_until(lambda attempt=attempt: len(events(run_dir, "launch")) > attempt)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    # A survivor may have had the time to write down what it saw, too.
    faults = [fault for fault in events(run_dir, "fault") if fault["process"] == -1]
    assert [(fault["rank"], fault["exit_code"]) for fault in faults] == [(1, -9), (0, -9)]
    assert [fault["step"] >= step for fault, step in zip(faults, (6, 14), strict=True)] == [True, True]
    assert all(fault["seen_after"] < 5 for fault in faults)
    assert [event["attempt"] for event in events(run_dir, "launch")] == [1, 2, 3]
    assert not any(is_alive(pid) for event in events(run_dir, "launch") for pid in event["pids"])
    assert step_losses(run_dir) == step_losses(alone)
    assert checkpoint_meta(run_dir, 24)["checksums"] == checkpoint_meta(alone, 24)["checksums"]
    assert all(row_log(run_dir, rank) == row_log(alone, rank) for rank in (0, 1))
    assert "[0] complete: 24 steps" in output
    assert times_written(cache) == compiled, "a restart has compiled anew"


def test_restarts_pass_over_what_is_no_checkpoint_and_an_error_that_repeats_keeps_its_traceback(
    tmp_path: Path, tiny_data: Path
) -> None:
    arguments = [str(write_tiny(tmp_path, tiny_data)), *RUN, "checkpoint.keep=2", "mesh.fsdp=2"]
    run_dir = tmp_path / "run"
    checkpoints = run_dir / "checkpoints"
    with launched(["--processes", "2", *arguments], devices=1, fault="raise=MemoryError@14/1") as process:
        wait_for_step(10, run_dir, 1, process)
        wait_until(lambda: checkpoint_steps(run_dir) == [4, 8])
        (checkpoints / "70").mkdir()
        (checkpoints / "90.orbax-checkpoint-tmp-0").mkdir()
        shutil.copytree(checkpoints / "8", checkpoints / "80")
        (checkpoints / "80" / "_CHECKPOINT_METADATA").unlink()
        shutil.rmtree(checkpoints / "8" / "state" / "d")
        os.kill(pids(run_dir)[0], signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == EXIT_REPEATED_CRASH, output
    assert [event["step"] for event in events(run_dir, "restore")] == [4, 12, 12]
    for name in ("checkpoints/70 is not", "checkpoints/80 is not", "90.orbax-checkpoint-tmp-0 is left over"):
        assert name in output
    assert "MemoryError: injected at step 14" in output
    assert "Traceback" in (run_dir / "logs" / "attempt-4-rank-1.log").read_text()
    assert checkpoint_steps(run_dir) == [8, 12]
    steps = [line["step"] for line in read(run_dir / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1))
    assert 14 <= steps[-1] <= 16  # process 0 may be ahead of the numbers that the other reads
    assert [step for step, _ in read_scalars(run_dir / "tensorboard")["train/loss"]] == steps


def test_a_run_goes_on_with_fewer_processes_and_comes_back_with_the_same_losses(
    tmp_path: Path, tiny_data: Path
) -> None:
    """Four, three without a lost slot, four again; the batch of 24 in passes of at most six rows a device."""
    config, run_dir = write_tiny(tmp_path, tiny_data), tmp_path / "run"
    run_here(tiny_config(tmp_path, tiny_data, *RUN, f"run_dir={tmp_path / 'alone'}"))
    with launched(["--processes", "4", "--elastic", "2", str(config), *RUN], devices=1) as process:
        wait_for_step(6, run_dir, 1, process)
        (run_dir / "excluded.json").write_text(json.dumps([{"rank": 3, "reason": "lost"}]))
        os.kill(pids(run_dir)[3], signal.SIGKILL)
        wait_for_step(14, run_dir, 2, process)
        (run_dir / "excluded.json").write_text("[]")
        os.kill(pids(run_dir)[0], signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert [event["slots"] for event in events(run_dir, "launch")] == [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]]
    here, there = step_losses(tmp_path / "alone"), step_losses(run_dir)
    assert here.keys() == there.keys() == set(range(1, 25))
    np.testing.assert_allclose(list(there.values()), list(here.values()), rtol=1e-5)
    rows = [row_log(run_dir, rank) for rank in range(4)]
    whole = row_log(tmp_path / "alone")
    for step, expected in whole.items():
        assert sorted(row for log in rows for row in log.get(step, [])) == sorted(expected)
