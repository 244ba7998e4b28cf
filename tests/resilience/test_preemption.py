"""Told to leave at any moment: all processes save the same step and leave, in time, and nothing is lost."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jaxtrain.resilience.channel import Channel
from jaxtrain.resilience.preemption import Abandoned, AbandonedTogether, listening
from tests.runs import (
    checkpoint_steps,
    environment,
    events,
    row_log,
    start,
    start_group,
    step_losses,
    train,
    train_group,
    write_tiny,
)

FAULTS = ("-m", "tests.faults")
RUN = ["data.log_rows=true", "data.pack=false", "telemetry.tensorboard=false", "checkpoint.keep=1000"]


def batches_until_abandoned(together: AbandonedTogether, most: int) -> int:
    for batch in range(most):
        try:
            together.before_a_batch()
        except Abandoned:
            return batch
    return most


def test_all_leave_an_evaluation_before_the_batch_that_the_first_process_names() -> None:
    told: list[bool] = []
    channel = Channel()
    first, second = (AbandonedTogether(channel, rank, lambda: bool(told)) for rank in (0, 1))
    assert batches_until_abandoned(first, 5) == batches_until_abandoned(second, 5) == 5
    told.append(True)
    ahead = AbandonedTogether(channel, 1, lambda: True)
    assert batches_until_abandoned(ahead, 7) == 7, "the other processes don't decide"
    assert batches_until_abandoned(first, 10) == 3
    assert batches_until_abandoned(second, 10) == 3
    assert batches_until_abandoned(first, 10) == 0, "nor does a next evaluation begin"


BUSY = """
import hashlib, os, signal, sys
from jaxtrain.resilience.preemption import leave_at_once, listening
with listening() as signals:
    signals.heed = lambda: leave_at_once(7, f"told by {signals.told}")
    os.kill(os.getpid(), signal.SIGUSR1)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


def test_a_signal_is_taken_while_the_main_thread_is_busy_in_c() -> None:
    command = [sys.executable, "-c", BUSY]
    ended = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (7, "told by SIGUSR1\n")


def test_signals_are_as_they_were_behind_the_listener() -> None:
    with listening():
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_what_listens_to_signals_imports_no_jax_which_would_start_threads() -> None:
    code = "import sys, jaxtrain.train; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(1), check=False).returncode == 0


def steps_done(run_dir: Path, steps: int) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= steps


def has_compiled(run_dir: Path) -> bool:
    """The first program is compiled, and others aren't."""
    return (run_dir / "events.jsonl").exists() and bool(events(run_dir, "compile"))


def told(
    group: Sequence[subprocess.Popen[str]], name: str, victim: int, when: Callable[[], bool], within: float = 30
) -> list[str]:
    """Signals one process as soon as the run's files show `when`; all must leave with 75 in time. Their outputs."""
    try:
        while not when():
            for process in group:
                assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        group[victim].send_signal(getattr(signal, name))
        until = time.monotonic() + within
        outputs = [process.communicate(timeout=max(until - time.monotonic(), 0.1))[0] for process in group]
    finally:
        for process in group:
            process.kill()
    assert [process.returncode for process in group] == [75] * len(group), outputs
    assert not any("Traceback" in output or "error:" in output for output in outputs), outputs
    return outputs


@pytest.mark.slow
def test_without_jaxs_own_preemption_service_it_is_the_same(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_ENABLE_PREEMPTION_SERVICE", "false")
    run_dir = tmp_path / "run"
    config = [str(write_tiny(tmp_path, tiny_data)), "mesh.fsdp=2", "steps=1000", *RUN]
    told(start_group(config, devices=1), "SIGTERM", 0, lambda: steps_done(run_dir, 3))
    assert checkpoint_steps(run_dir)[-1] == max(step_losses(run_dir)) == events(run_dir, "stop")[-1]["step"]


@pytest.mark.slow
def test_one_process_is_told_and_all_save_the_same_step_and_go_on_bit_equal(tmp_path: Path, tiny_data: Path) -> None:
    """In a step, in a long evaluation, and while it compiles."""
    run_dir = tmp_path / "run"
    config = [str(write_tiny(tmp_path, tiny_data)), "mesh.fsdp=2", "steps=60", "eval.every=20", "eval.batch=2", *RUN]
    results = train_group([*config, f"run_dir={tmp_path / 'alone'}"], devices=1)
    assert [code for code, _ in results] == [0, 0], results
    told(start_group(config, devices=1), "SIGINT", 0, lambda: has_compiled(run_dir))
    assert checkpoint_steps(run_dir) == []
    assert "nothing to save" in events(run_dir, "stop")[-1]["reason"]
    told(start_group(config, devices=1), "SIGTERM", 1, lambda: steps_done(run_dir, 3))
    (preempt,) = events(run_dir, "preempt")[-1:]
    assert (preempt["signal"], preempt["rank"]) == ("SIGTERM", 1)
    newest = checkpoint_steps(run_dir)[-1]
    assert newest == max(step_losses(run_dir)) == events(run_dir, "stop")[-1]["step"] < 60
    if newest < 20:
        group = start_group(["slow-eval=3", *config], devices=1, program=FAULTS)
        told(group, "SIGUSR1", 0, lambda: 20 in step_losses(run_dir))
        assert checkpoint_steps(run_dir)[-1] == 20 == max(step_losses(run_dir))
        assert "its evaluation was left off" in events(run_dir, "stop")[-1]["reason"]
        assert events(run_dir, "eval") == []
    results = train_group(config, devices=1)
    assert [code for code, _ in results] == [0, 0], results
    assert step_losses(run_dir) == step_losses(tmp_path / "alone")
    assert row_log(run_dir) == row_log(tmp_path / "alone")
    for field in ("step", "loss"):
        assert [event[field] for event in events(run_dir, "eval")] == [
            event[field] for event in events(tmp_path / "alone", "eval")
        ]


@pytest.mark.slow
def test_a_running_save_ends_and_counts_and_without_time_for_another_the_newest_one_is_named(
    tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = tmp_path / "run"
    config = [str(write_tiny(tmp_path, tiny_data)), "steps=100000", *RUN]

    def saving(step: int) -> bool:
        return any((run_dir / "checkpoints").glob(f"{step}.orbax-checkpoint-tmp*"))

    told([start(["slow-saves=2", *config], program=FAULTS)], "SIGTERM", 0, lambda: saving(5))
    steps = checkpoint_steps(run_dir)
    assert steps[0] == 5
    assert steps[-1] == max(step_losses(run_dir))
    arguments = ["slow-saves=600", *config, "checkpoint.every=1000", "grace_seconds=4"]
    goal = max(step_losses(run_dir)) + 3
    (output,) = told([start(arguments, program=FAULTS)], "SIGTERM", 0, lambda: goal in step_losses(run_dir))
    assert f"grace_seconds=4 have passed; the newest checkpoint is of step {steps[-1]}" in output
    assert checkpoint_steps(run_dir) == steps


@pytest.mark.slow
def test_the_evaluation_after_the_last_step_is_left_off_and_done_by_the_next_start(
    tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = tmp_path / "run"
    config = [str(write_tiny(tmp_path, tiny_data)), "eval.every=50", "eval.batch=1", *RUN]
    group = [start(["slow-eval=0.7", *config], program=FAULTS)]
    told(group, "SIGTERM", 0, lambda: steps_done(run_dir, 10))
    assert checkpoint_steps(run_dir) == [5, 10]
    assert events(run_dir, "eval") == []
    for _ in range(2):
        code, output = train(config)
        assert code == 0, output
        assert [event["step"] for event in events(run_dir, "eval")] == [10]
    assert "already complete" in output


@pytest.mark.slow
def test_a_second_signal_leaves_at_once(tmp_path: Path, tiny_data: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["slow-saves=600", str(write_tiny(tmp_path, tiny_data)), "steps=100000", *RUN, "checkpoint.every=1000"]
    process = start(arguments, program=FAULTS)
    try:
        while not steps_done(run_dir, 3):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        while not any((run_dir / "checkpoints").glob("*tmp*")):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130, output
    assert "SIGINT after SIGINT: left at once" in output
