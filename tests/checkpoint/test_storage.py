"""A storage that is slow, broken or full: the loop goes on, or the run ends at once; nothing complete is lost."""

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import pytest

from jaxtrain.errors import CheckpointError
from jaxtrain.recorder import Recorder
from tests.runs import (
    STRAIGHT,
    Straight,
    checkpoint_steps,
    environment,
    events,
    run_here,
    step_losses,
    tiny_config,
    write_tiny,
)


def at_step(monkeypatch: pytest.MonkeyPatch, step: int, then: Callable[[], None]) -> None:
    """Does something when the numbers of a step are read."""
    record = Recorder.step

    def watching(recorder: Recorder, metrics: dict[str, Any]) -> None:
        record(recorder, metrics)
        if metrics["step"] == step:
            then()

    monkeypatch.setattr(Recorder, "step", watching)


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_save_that_is_due_while_one_still_runs_is_left_out_and_training_goes_on(
    straight: Straight, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = step_losses(straight("one device"))
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, "checkpoint.every=2", "checkpoint.patience=0")
    storage, finalize = threading.Event(), ocp.CompositeCheckpointHandler.finalize

    def slow(handler: Any, directory: Any) -> None:
        assert storage.wait(60)
        finalize(handler, directory)

    def recover() -> None:
        storage.set()
        wait_until(lambda: [event["step"] for event in events(config.run_dir, "save")] == [2])

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", slow)
    at_step(monkeypatch, 7, recover)
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "left_out")] == [4, 6]
    assert "checkpoint.patience=0 s" in events(config.run_dir, "left_out")[0]["reason"]
    assert checkpoint_steps(config.run_dir)[0] == 2
    assert checkpoint_steps(config.run_dir)[-1] == 10, "the last one waits"
    assert step_losses(config.run_dir) == undisturbed


@pytest.mark.parametrize(
    ("number", "code"), [(errno.EIO, 12), (errno.ESTALE, 12), (errno.ENOSPC, 4), (errno.EDQUOT, 4)]
)
def test_a_background_save_that_fails_ends_the_run_at_the_next_step(
    number: int, code: int, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 12, after which a supervisor starts it again, unless another start would meet the same."""

    def broken(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number))

    def saving() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "async_save" in thread.name]

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", broken)
    at_step(monkeypatch, 6, lambda: wait_until(lambda: not saving()))
    config = tiny_config(tmp_path, tiny_data, "steps=1000", "checkpoint.every=5")
    with pytest.raises(CheckpointError, match=f"{config.checkpoint_dir}: save failed: .*{os.strerror(number)}"):
        run_here(config)
    assert max(step_losses(config.run_dir)) == 6
    assert events(config.run_dir, "stop")[-1]["exit_code"] == code


def test_a_disk_on_which_checkpoints_will_not_fit_is_told_at_the_start(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    config = tiny_config(tmp_path, tiny_data, "steps=1", "checkpoint.keep=2")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with caplog.at_level(logging.WARNING):
        run_here(config)
    assert f"{config.checkpoint_dir} has 1.0 MiB free, and 3 more checkpoints of " in caplog.text


CAN_MOUNT = subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode == 0
FULL = """
mount -t tmpfs -o size=$1 tmpfs "$2"; cd "$2"; shift 2
"$@" && exit 1 || echo "ended with $?, holds $(ls -d [0-9] [0-9][0-9] 2>&-)"
mount -o remount,ro "$PWD"
"$@" && exit 1 || echo "then ended with $?, holds $(ls -d [0-9] [0-9][0-9] 2>&-)"
mount -o remount,rw,size=256m "$PWD"
exec "$@"
"""


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MOUNT, reason="no file system can be mounted here")
def test_a_full_disk_and_a_read_only_one_end_the_run_and_leave_what_was_complete(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    """A real one, with space for one checkpoint and a half; with more space, the same command goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    files = [path for path in (straight("one device") / "checkpoints" / "5").rglob("*") if path.is_file()]
    one = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    config = [str(write_tiny(tmp_path, tiny_data)), *STRAIGHT, f"checkpoint.dir={disk}", "checkpoint.keep=2"]
    command = ["unshare", "-rm", "sh", "-ec", FULL, "sh", str(one * 3 // 2), str(disk)]
    result = subprocess.run(
        [*command, sys.executable, "-m", "jaxtrain.train", *config],
        env=environment(1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout
    assert "ended with 4, holds 5\n" in result.stdout
    assert "will not fit" in result.stdout
    assert "then ended with 2, holds 5\n" in result.stdout
    error, refusal = [line for line in result.stdout.splitlines() if line.startswith("error: ")]
    assert f"{disk}: save failed: No space left on device (" in error
    assert refusal.endswith("Read-only file system; choose one that can be written")
    assert f"checkpoint.dir={disk}" in refusal
    assert [event["step"] for event in events(tmp_path / "run", "restore")] == [5]
    assert sorted(step_losses(tmp_path / "run")) == list(range(1, 11))
