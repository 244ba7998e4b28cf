"""`kill -9` at any moment, the same command again: the end is bit-equal to the run that was left alone."""

import functools
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxtrain.checkpoint import list_checkpoints
from tests.runs import (
    MESHES,
    checkpoint_meta,
    events,
    kill_when,
    row_log,
    start,
    step_losses,
    train,
    write_tiny,
)

pytestmark = pytest.mark.slow

RUN = ["model.dropout=0.1", "data.log_rows=true", "eval.every=10", "log_every=1"]

Moment = Callable[[Path], bool]


def write_config(folder: Path, data: Path, steps: int) -> Path:
    """So many steps, each saved unless the command says otherwise."""
    path = write_tiny(folder, data)
    path.write_text(path.read_text().replace("steps: 10", f"steps: {steps}").replace("every: 5", "every: 1"))
    return path


def while_compiling(run_dir: Path) -> bool:
    return (run_dir / "events.jsonl").exists()


def after_step(step: int, run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= step


def while_saving(step: int, run_dir: Path) -> bool:
    """A save of that step or a later one is being written."""
    temporary = [path.name for path in (run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*")]
    return any(int(name.split(".")[0]) >= step for name in temporary)


def moments(seed: int) -> list[Moment]:
    """When to kill: rising, so that each start gets further; the same in every run of the test."""
    draw = random.Random(seed)
    return [
        while_compiling,
        functools.partial(after_step, draw.randint(2, 12)),
        functools.partial(while_saving, draw.randint(20, 30)),
        functools.partial(after_step, draw.randint(38, 50)),
    ]


def assert_same_end(run_dir: Path, straight: Path) -> None:
    assert step_losses(run_dir) == step_losses(straight)
    assert newest(run_dir) == newest(straight) == max(step_losses(straight))
    ours, theirs = (checkpoint_meta(path, newest(path)) for path in (run_dir, straight))
    assert ours["checksums"] == theirs["checksums"]
    assert ours["position"] == theirs["position"]


def newest(run_dir: Path) -> int:
    return max(list_checkpoints(run_dir / "checkpoints").steps, default=0)


def assert_resumed_at_the_newest(run_dir: Path, expected: list[int]) -> None:
    """Each start after a kill went on from the newest checkpoint that was complete when the process died."""
    starts = [event["step"] for event in events(run_dir, "start")]
    # A start that was killed while it compiled has not got so far as to say where it starts.
    assert starts == expected[-len(starts) :]


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8"])
def test_one_process_killed_at_random_moments_ends_bit_equal(mesh: str, tmp_path: Path, tiny_data: Path) -> None:
    devices, overrides = MESHES[mesh]
    arguments = [str(write_config(tmp_path, tiny_data, steps=60)), *RUN, *overrides]
    run_dir, resumed_at = tmp_path / "run", []
    # A process too: how many threads a CPU device has depends on how many virtual devices there are.
    code, output = train([*arguments, f"run_dir={tmp_path / 'alone'}", "checkpoint.every=20"], devices)
    assert code == 0, output
    for moment in moments(seed=devices):
        resumed_at.append(newest(run_dir))
        kill_when(functools.partial(moment, run_dir), [start(arguments, devices)])
    resumed_at.append(newest(run_dir))
    code, output = train(arguments, devices)
    assert code == 0, output
    assert resumed_at == sorted(resumed_at)
    assert resumed_at[1] == 0, "killed while it compiled"
    assert 0 < resumed_at[2] <= resumed_at[3]
    assert_resumed_at_the_newest(run_dir, resumed_at)
    assert_same_end(run_dir, tmp_path / "alone")
    assert row_log(run_dir) == row_log(tmp_path / "alone")
