"""Who gives no sign of life is silent; who has said that its run has ended may take its time."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxtrain.launchers.vitals import Progress, Vitals
from jaxtrain.resilience.beat import Beat, write_beat
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry.events import EventLog


def beat(process: int, *, leaving: bool = False) -> Beat:
    return Beat(process, pid=7, host="node0", step=3, phase="step", since=1.0, time=2.0, leaving=leaving)


def test_a_process_that_waits_for_the_others_at_its_end_is_not_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    processes = [SimpleNamespace(code=None, is_stopped=lambda: False) for _ in range(2)]
    vitals = Vitals(cast(Any, SimpleNamespace(processes=processes, beats=tmp_path)), silence=6, start=300)
    write_beat(tmp_path, beat(0, leaving=True))
    write_beat(tmp_path, beat(1))
    silent = []
    for _ in range(8):
        silent.append(vitals.silent())
        clock[0] += 2
    assert silent[:4] == [None] * 4
    assert [rank for rank, _ in (found for found in silent if found is not None)] == [1] * 4
    processes[1].code = 0
    assert vitals.silent() is None
    for _ in range(30):
        clock[0] += 2
        last = vitals.silent()
    assert last is not None
    assert last[0] == 0, "nor for ever"


def test_progress_is_seen_through_lines_of_somebody_else_and_in_a_file_that_was_cut(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    with EventLog(directory.events) as events:
        events.write("start", step=0)
        progress = Progress(directory)
        with directory.events.open("ab") as file:
            file.write(b"\xff\n" + b"[" * 100_000 + b'\n{"kind": "save", "step": "x"}\n{"kind": "fault"}\n')
        events.write("save", step=5)
        assert progress.saved == 5
        os.truncate(directory.events, 0)
        events.write("save", step=6)
        assert progress.saved == 6
    directory.metrics.write_bytes(b'{"step": 7}\n{"step": 1e999}\n{"step": "x"}\n' + b"[" * 10_000 + b"\n")
    assert progress.step == 7
