"""The account of a real run that was killed."""

import functools
import json
import time
from pathlib import Path

import pytest

from jaxtrain.report import main
from tests.runs import checkpoint_steps, events, kill_when, start, step_losses, train, write_tiny


def has_a_checkpoint_and_a_step_more(run_dir: Path) -> bool:
    saved = max(checkpoint_steps(run_dir), default=None)
    return saved is not None and max(step_losses(run_dir)) > saved


@pytest.mark.slow
def test_a_run_that_was_killed_accounts_for_its_time_from_start_to_end(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(write_tiny(tmp_path, tiny_data)), "steps=80", "checkpoint.every=10", "eval.every=40"]
    run_dir, began = tmp_path / "run", time.time()
    kill_when(functools.partial(has_a_checkpoint_and_a_step_more, run_dir), [start(arguments)])
    killed = time.time()
    code, output = train(arguments)
    assert code == 0, output
    wall = time.time() - began

    assert main([str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "goodput" in shown
    assert "1st step" in shown
    assert (run_dir / "goodput.png").exists()
    written = json.loads((run_dir / "goodput.json").read_text())
    seconds = written["seconds"]
    assert sum(seconds.values()) == pytest.approx(written["total"], abs=0.02)
    assert written["total"] < wall
    for kind in ("productive", "compiling", "starting", "restoring", "evaluating"):
        assert seconds[kind] > 0, kind
    (back,) = written["returns"]
    assert back["fault"] == "ended without a word"
    parts = [value for part, value in back.items() if part not in ("fault", "starts", "total")]
    assert sum(parts) == pytest.approx(back["total"], abs=0.02)
    first = next(event for event in events(run_dir, "progress") if event["time"] > killed)
    assert first["steps"] == 1, "the first step after a start is told at once"
    assert back["total"] == pytest.approx(first["time"] - killed, abs=3), "but for what was not told any more"
    assert back["restore"] > 0
    assert written["starts"] == 2
