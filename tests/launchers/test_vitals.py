"""Who gives no sign of life is silent; who has said that its run has ended may take its time."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxtrain.launchers.vitals import Vitals
from jaxtrain.resilience.beat import Beat, write_beat


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
