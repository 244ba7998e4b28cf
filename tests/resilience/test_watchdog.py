"""A run that is stuck, or has lost a process, ends by itself, with a name and a code: real processes, real signals."""

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs import events, start_group, train, train_group, write_tiny

pytestmark = pytest.mark.slow

FAULTS = ("-m", "tests.faults")
LONG = ["steps=100000", "telemetry.tensorboard=false", "log_every=1000"]


def ended(group: Sequence[subprocess.Popen[str]], within: float = 120) -> list[tuple[int, str]]:
    """Exit code and output of each, once all have ended."""
    until = time.monotonic() + within
    return [
        (process.returncode, output)
        for process in group
        for output in [process.communicate(timeout=max(until - time.monotonic(), 1))[0]]
    ]


def wait_until(condition: Callable[[], bool], group: Sequence[subprocess.Popen[str]]) -> None:
    """Fails where a process ends before."""
    while not condition():
        for process in group:
            assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def steps_done(run_dir: Path, steps: int) -> Callable[[], bool]:
    metrics = run_dir / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps


def last_error(output: str) -> str:
    """The one line for people."""
    (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
    return line


def the_fault(run_dir: Path) -> dict[str, Any]:
    (fault,) = events(run_dir, "fault")
    (stop,) = events(run_dir, "stop")
    assert stop["exit_code"] == fault["exit_code"]
    return fault


STUCK = {
    "a host thread": ("stuck=1@5", ["watchdog.step=10"], 9, "step", "stuck_main_thread"),
    "data": ("stuck-data=1@5", ["watchdog.step=5", "watchdog.data=12"], 11, "data", "stuck_main_thread"),
    "a save": ("stuck-save=1", ["watchdog.step=5", "watchdog.save=12"], 12, "save", "stuck_main_thread"),
    "a save in the background": ("slow-saves=600", ["watchdog.save=10"], 12, "save", "in slow"),
    "an evaluation": ("stuck-eval=1", ["watchdog.eval=10", "eval.every=3"], 9, "eval", "stuck_main_thread"),
    "the start": ("stuck-compile=1", ["distributed.start_timeout=25"], 9, "start", "stuck_main_thread"),
}


@pytest.mark.parametrize("name", STUCK)
def test_both_processes_end_with_the_code_of_what_is_stuck_and_name_the_one_that_is(
    name: str, tmp_path: Path, tiny_data: Path
) -> None:
    fault, limits, code, phase, function = STUCK[name]
    guilty = 0 if fault.startswith("slow-saves") else 1  # only process 0 commits a save
    arguments = [fault, str(write_tiny(tmp_path, tiny_data)), "mesh.fsdp=2", *LONG, *limits]
    results = train_group(arguments, devices=1, program=FAULTS, timeout=120)
    assert [result for result, _ in results] == [code, code], results
    first, second = (last_error(output) for _, output in results)
    assert first == second
    assert f"process {guilty} on" in first
    assert limits[-1] in first or limits[0] in first
    assert not any("Traceback" in output for _, output in results)
    seen = the_fault(tmp_path / "run")
    assert (seen["rank"], seen["phase"], seen["exit_code"]) == (guilty, phase, code)
    stacks = {int(path.stem[-1]): path.read_text() for path in (tmp_path / "run" / "crash").iterdir()}
    assert sorted(stacks) == [0, 1]
    assert function in stacks[guilty]
    assert function not in stacks[1 - guilty]


def test_a_restore_that_one_process_is_stuck_in_holds_nobody_up_for_long(tmp_path: Path, tiny_data: Path) -> None:
    """The others would wait at the barrier behind it for hours."""
    config = [str(write_tiny(tmp_path, tiny_data)), "mesh.fsdp=2"]
    results = train_group(config, devices=1)
    assert [code for code, _ in results] == [0, 0], results
    started = time.monotonic()
    results = train_group(["stuck-restore=1", *config, "watchdog.restore=15"], devices=1, program=FAULTS, timeout=120)
    assert [code for code, _ in results] == [12, 12], results
    assert "process 1 on" in last_error(results[0][1])
    assert "watchdog.restore=15" in last_error(results[0][1])
    assert time.monotonic() - started < 60
    assert events(tmp_path / "run", "fault")[-1]["rank"] == 1


def test_a_program_that_does_not_end_on_the_devices_is_told_from_a_stuck_host(tmp_path: Path, tiny_data: Path) -> None:
    arguments = ["stuck-device=5", str(write_tiny(tmp_path, tiny_data)), *LONG, "watchdog.step=6"]
    code, output = train(arguments, program=FAULTS, timeout=90)
    assert code == 10, output
    assert "the program on the devices does not end" in last_error(output)
    assert the_fault(tmp_path / "run")["what"] == "device"


LOST = [("SIGKILL", 1), ("SIGKILL", 0), ("SIGSTOP", 1), ("SIGSTOP", 0)]


@pytest.mark.parametrize(("name", "victim"), LOST)
def test_a_process_that_dies_or_falls_silent_is_named_by_the_other(
    name: str, victim: int, tmp_path: Path, tiny_data: Path
) -> None:
    """Whichever it is: JAX would abort the other one, with no name and code 134, after its own limit or at once."""
    run_dir = tmp_path / "run"
    config = [str(write_tiny(tmp_path, tiny_data)), "mesh.fsdp=2", "watchdog.step=10"]
    group = start_group([*config, *LONG], devices=1)
    try:
        wait_until(steps_done(run_dir, 8), group)
        group[victim].send_signal(getattr(signal, name))
        sent = time.monotonic()
        code, output = ended([group[1 - victim]])[0]
        seconds = time.monotonic() - sent
    finally:
        for process in group:
            process.kill()
            process.communicate()
    assert code == 8, output
    assert f"process {victim} on" in last_error(output)
    assert "after step " in last_error(output)
    assert seconds < (15 if name == "SIGKILL" else 30), "the limit and 15 s"
    assert the_fault(run_dir)["rank"] == victim  # its step and phase are those of its last word, a second old at most
    assert len(list((run_dir / "crash").iterdir())) == 1


def test_an_error_of_one_process_keeps_its_traceback_and_the_other_names_that_process(
    tmp_path: Path, tiny_data: Path
) -> None:
    config = [str(write_tiny(tmp_path, tiny_data)), "mesh.fsdp=2", *LONG]
    results = train_group(["raise=MemoryError@5/1", *config], devices=1, program=FAULTS)
    assert [code for code, _ in results] == [8, 1], results
    assert "process 1 on" in last_error(results[0][1])
    assert "failed (MemoryError: injected at step 5)" in last_error(results[0][1])
    assert "Traceback" in results[1][1]
    assert the_fault(tmp_path / "run")["phase"] == "step"
    results = train_group(["raise=RuntimeError@5", *config, f"run_dir={tmp_path / 'all'}"], devices=1, program=FAULTS)
    assert [code for code, _ in results] == [1, 1], results
    assert all("RuntimeError: injected at step 5" in output for _, output in results)
