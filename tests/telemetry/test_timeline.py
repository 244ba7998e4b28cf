"""What the last steps of a rank were spent on is kept, over restarts, and read back rank by rank."""

from pathlib import Path

import pytest

from jaxtrain.resilience.verdict import Verdict
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.telemetry import timeline
from jaxtrain.telemetry.timeline import RING, Timeline, read_timeline
from tests.runs import tiny_config


def write(folder: Path, steps: range, rank: int = 0, ranks: int = 1, after: int = 0) -> None:
    line = Timeline(folder, rank, ranks, after)
    for step in steps:
        line.step(step, 1.0)
    line.close()


def test_what_no_part_was_told_of_is_the_hosts_own_and_all_parts_add_up(tmp_path: Path) -> None:
    line = Timeline(tmp_path, 0, 1, after=0)
    line.add("data", 0.25)
    line.add("data", 0.25)
    line.add("device", 1.0)
    line.step(1, 2.0)
    line.add("device", 0.5)
    line.add("probe", 0.25)
    line.probed(0.125)
    line.step(2, 1.0)
    line.close()
    ((host, steps),) = read_timeline(tmp_path).values()
    assert host
    assert steps == [
        {"step": 1, "data": 0.5, "host": 0.5, "device": 1.0},
        {"step": 2, "data": 0.0, "host": 0.25, "device": 0.5, "probe": 0.25, "probe_seconds": 0.125},
    ]


def test_shares_are_those_since_they_were_last_asked_for(tmp_path: Path) -> None:
    line = Timeline(tmp_path, 0, 1, after=0)
    assert line.shares() == {"data": 0.0, "host": 0.0, "device": 0.0}
    for part in ("data", "device", "device"):
        line.add(part, 1.0)
        line.step(1, 2.0)
    assert line.step_seconds == 2.0
    assert line.shares() == pytest.approx({"data": 1 / 6, "host": 1 / 2, "device": 1 / 3})
    assert line.step_seconds == 0


def test_the_last_256_steps_are_kept_over_restarts_without_those_that_come_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 301))
    assert [line["step"] for line in read_timeline(tmp_path)[0][1]] == list(range(301 - RING, 301))
    write(tmp_path, range(291, 295), after=290)
    assert [line["step"] for line in read_timeline(tmp_path)[0][1]] == list(range(301 - RING, 295))


def test_ranks_that_an_earlier_start_had_are_dropped(tmp_path: Path) -> None:
    for rank in range(12):
        write(tmp_path, range(1, 3), rank, ranks=12)
    assert list(read_timeline(tmp_path)) == list(range(12))
    write(tmp_path, range(3, 4), rank=0, ranks=2, after=2)
    assert list(read_timeline(tmp_path)) == [0, 1]


def test_it_is_written_every_so_often_so_that_a_kill_leaves_the_steps_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "WRITE_SECONDS", 0)
    line = Timeline(tmp_path, 0, 1, after=0)
    line.step(1, 1.0)
    assert line._writing is not None
    line._writing.result(timeout=60)
    assert [found["step"] for found in read_timeline(tmp_path)[0][1]] == [1]
    line.close()


def test_what_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write(tmp_path / "file" / "timeline", range(1, 3))


def test_what_a_crash_tore_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    (tmp_path / "rank-0.jsonl").open("a").write('{"step": 4, "da')
    (tmp_path / "rank-1.jsonl").write_text("")
    (tmp_path / "rank-x.jsonl").write_text("{}\n")
    assert {rank: len(steps) for rank, (_, steps) in read_timeline(tmp_path).items()} == {0: 3}


def test_a_process_that_the_watchdog_ends_leaves_its_timeline(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os._exit", lambda code: None)
    line = Timeline(tmp_path / "timeline", 0, 1, after=0)
    line.step(1, 1.0)
    watchdog = Watchdog(tiny_config(tmp_path, tiny_data), tmp_path / "crash", tmp_path / "events.jsonl")
    watchdog.at_end(line.write)
    watchdog._ending.end(Verdict(9, "stuck", "the main thread is stuck"))
    assert [found["step"] for found in read_timeline(tmp_path / "timeline")[0][1]] == [1]
