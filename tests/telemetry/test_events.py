import os
import subprocess
import sys
import time
from datetime import datetime

import pytest

from jaxtrain.telemetry.events import EventLog, read_events


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "events.jsonl"


def test_an_event_carries_when_what_and_who(path):
    before = time.time()
    with EventLog(path, process=3) as events:
        events.write("save", step=5, seconds=0.25)
    (event,) = read_events(path)
    assert before - 0.001 <= event["time"] <= time.time() + 0.001
    date = datetime.fromisoformat(event["date"])
    assert date.utcoffset().total_seconds() == 0
    assert date.timestamp() == pytest.approx(event["time"], abs=0.002)
    assert {key: event[key] for key in ("kind", "process", "step", "seconds")} == {
        "kind": "save",
        "process": 3,
        "step": 5,
        "seconds": 0.25,
    }


def test_a_restart_goes_on_in_the_same_file(path):
    for _ in range(2):
        with EventLog(path) as events:
            events.write("start", step=0)
    assert [event["kind"] for event in read_events(path)] == ["start", "start"]


def test_a_line_torn_by_a_crash_spoils_only_itself(path):
    with EventLog(path) as events:
        events.write("start")
    with path.open("a") as file:
        file.write('{"time": 17')
    assert [event["kind"] for event in read_events(path)] == ["start"]
    with EventLog(path) as events:
        events.write("stop")
    assert [event["kind"] for event in read_events(path)] == ["start", "stop"]


def test_only_a_stop_waits_for_the_disk(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with EventLog(path) as events:
        events.write("save", step=1)
        assert synced == []
        events.write("stop", reason="complete")
        assert len(synced) == 1


def test_a_field_may_not_hide_what_each_event_carries(path):
    with EventLog(path) as events, pytest.raises(ValueError, match="'process'"):
        events.write("save", process=1)


def test_lines_of_several_processes_do_not_mix(path):
    program = (
        "import sys; from pathlib import Path; from jaxtrain.telemetry.events import EventLog\n"
        "with EventLog(Path(sys.argv[1]), int(sys.argv[2])) as events:\n"
        "    for number in range(200): events.write('save', step=number, filler='x' * 200)\n"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), str(process)]) for process in range(2)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    events = read_events(path)
    for process in range(2):
        assert [event["step"] for event in events if event["process"] == process] == list(range(200))


NO_EVENTS = (
    '{"kind": "save", "process": 0}',
    '{"time": "noon", "kind": "save", "process": 0}',
    '{"time": 1e300, "kind": "save", "process": 0}',
    '{"time": 1, "kind": 3, "process": 0}',
    '{"time": 1, "kind": "save"}',
    '{"time": 1, "kind": "save", "process": 0, "step": []}',
    '{"time": 1, "kind": "save", "process": 0, "step": 1, "seconds": "x"}',
    '{"time": 1, "kind": "save", "process": 0, "step": 1e999}',
    "[" * 100_000,
)


def test_what_somebody_else_wrote_is_passed_over(path, caplog):
    path.parent.mkdir()
    path.write_text("\n".join(NO_EVENTS) + "\n")
    with EventLog(path) as events:
        events.write("fault", step=None, exit_code=None, rank=1)
    assert [event["kind"] for event in read_events(path)] == ["fault"]
    assert f"{path}, line {len(NO_EVENTS)} is not" in caplog.text
