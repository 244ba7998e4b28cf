"""A drill puts real faults into a run, and tells whether the run survived them all."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain import drill
from jaxtrain.config import parse_arguments
from jaxtrain.drilling.comparison import Finding
from jaxtrain.drilling.drill import Outcome, Report
from jaxtrain.drilling.plan import Fault
from jaxtrain.telemetry.events import read_events
from jaxtrain.telemetry.jsonl import read
from tests.launchers.launched import is_alive, wait_until
from tests.runs import ROOT, environment, write_tiny

RUN = ["mesh.fsdp=2", "data.pack=false"]


@pytest.mark.slow
def test_a_run_survives_a_kill_a_signal_to_leave_and_a_checkpoint_that_changed_on_the_disk(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment(devices=1).items():
        monkeypatch.setenv(name, value)
    arguments = [str(write_tiny(tmp_path, tiny_data)), *RUN, "steps=120", "--faults", "kill,term,corrupt"]
    code, shown = drill.main(arguments), capsys.readouterr().out
    assert code == 0, shown
    assert shown.count("passed") == 6
    assert "every bit the same" in shown
    events = read(tmp_path / "run-drill" / "disturbed" / "events.jsonl")
    assert sum(event["kind"] == "launch" for event in events) == 4
    assert not (tmp_path / "run").exists(), "the config's own directory is not touched"


REFUSED = {
    "no steps": (["steps=null", "data.epochs=1"], "steps is not set"),
    "no checkpoints": (["checkpoint.every=0"], "checkpoint.every=0"),
    "too short": (["steps=20"], "steps=20: 8 faults with a checkpoint before each need at least 59 steps"),
    "an unknown fault": (["--faults", "kill,flood"], "--faults flood: there is no such fault"),
    "a fault twice": (["--faults", "nan,kill,nan"], "--faults nan,nan: "),
    "no fault": (["--faults", ""], "--faults : there is no such fault"),
    "no process": (["--processes", "0"], "argument --processes: must be at least 1"),
    "no time": (["--silence", "0.5"], "argument --silence: must be at least 1"),
    "no place": (["steps=100", "--dir", "/proc/drill"], "--dir /proc/drill"),
    "nobody left": (["--faults", "lost", "--processes", "1"], "--processes 1: a drill that loses one needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_drilled_is_refused_before_anything_is_trained(
    name: str, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, message = REFUSED[name]
    assert drill.main([str(write_tiny(tmp_path, tiny_data)), *RUN, *given]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run-drill").exists()


def test_a_directory_with_an_earlier_drill_is_left_alone(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "run-drill" / "undisturbed" / "metrics.jsonl"
    earlier.parent.mkdir(parents=True)
    earlier.write_text(json.dumps({"step": 1}))
    assert drill.main([str(write_tiny(tmp_path, tiny_data)), *RUN, "steps=30", "--faults", "kill"]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert earlier.exists()


def test_one_thing_that_is_not_as_it_must_be_fails_the_drill() -> None:
    survived, lost = Outcome(Fault("kill", 5, 1), 0.1, 4.0), Outcome(Fault("stop", 9, 0), problems=["was not seen"])
    same, other = Finding("losses", "bit-equal", True), Finding("losses", "apart", False)
    assert Report([survived], [same]).passed
    assert not Report([survived, lost], [same]).passed
    assert not Report([survived], [other]).passed
    text = drill.as_text(Report([survived, lost], [other]))
    assert "FAILED: was not seen" in text
    assert text.endswith("FAILED\n")


def test_checkpoints_that_lie_apart_are_not_touched(tmp_path: Path, tiny_data: Path) -> None:
    apart = tmp_path / "apart"
    given = [str(write_tiny(tmp_path, tiny_data)), *RUN, "steps=100", f"checkpoint.dir={apart}"]
    options, rest = drill._parser().parse_known_args([*given, "--faults", "corrupt"])
    request = drill.make_request(parse_arguments("drill", rest), rest, options)
    for config in (request.undisturbed, request.disturbed):
        assert config.checkpoint_dir == config.run_dir / "checkpoints"


@pytest.mark.slow
def test_no_process_outlives_a_drill_that_is_killed(tmp_path: Path, tiny_data: Path) -> None:
    command = [sys.executable, "-m", "jaxtrain.drill", str(write_tiny(tmp_path, tiny_data)), *RUN, "steps=100000"]
    events = tmp_path / "run-drill" / "undisturbed" / "events.jsonl"

    def pids() -> list[int]:
        found = read_events(events) if events.exists() else []
        return [pid for event in found if event["kind"] == "launch" for pid in event["pids"]]

    with subprocess.Popen([*command, "--faults", "kill"], env=environment(devices=1), cwd=ROOT) as process:
        wait_until(lambda: pids() or process.poll() is not None)
        process.terminate()
    assert pids()
    wait_until(lambda: not any(map(is_alive, pids())))
