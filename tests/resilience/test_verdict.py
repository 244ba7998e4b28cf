"""Who is to blame, from what all processes say of themselves."""

from dataclasses import replace

import pytest

from jaxtrain.resilience.verdict import Status, Verdict, judge

WAITING = Status(0, "a", step=5, phase="step", seconds=21, waiting="devices", limit="watchdog.step=20", over=True)


def among(*others: Status, first: Status = WAITING) -> dict[int, Status]:
    return {status.rank: status for status in (first, *others)}


BUSY = {
    "a host thread": ("step", "watchdog.step=20", 9),
    "a profile": ("profile", "watchdog.save=20", 9),
    "data": ("data", "watchdog.data=20", 11),
    "opening the data": ("prepare", "watchdog.prepare=20", 11),
    "a save": ("save", "watchdog.save=20", 12),
    "a restore": ("restore", "watchdog.restore=20", 12),
}


@pytest.mark.parametrize("name", BUSY)
def test_the_one_that_does_not_wait_is_named_with_the_code_of_its_phase(name: str) -> None:
    phase, limit, code = BUSY[name]
    late = Status(1, "b", step=5, phase=phase, seconds=20.5, limit=limit, over=True)
    verdict = judge(among(late), silent=[])
    assert verdict is not None
    assert (verdict.code, verdict.rank, verdict.host, verdict.step, verdict.phase) == (code, 1, "b", 5, phase)
    for word in ("process 1 on b", "after step 5", limit):
        assert word in verdict.words


def test_nobody_is_blamed_while_no_limit_has_passed() -> None:
    assert judge(among(Status(1, "b", phase="data"), first=replace(WAITING, over=False)), silent=[1]) is None


def test_those_who_wait_bear_with_one_that_is_within_its_own_limit() -> None:
    late = Status(1, "b", step=5, phase="data", seconds=100, limit="watchdog.data=600")
    assert judge(among(late), silent=[]) is None
    assert judge(among(replace(late, limit="")), silent=[]) is None, "for ever, where the limit is null"


def test_a_silent_process_comes_before_one_that_is_busy() -> None:
    busy = Status(1, "b", step=5, phase="data", seconds=30, over=True)
    silent = Status(2, "c", step=4, phase="step", waiting="devices")
    verdict = judge(among(busy, silent), silent=[2])
    assert verdict is not None
    assert (verdict.code, verdict.what, verdict.rank, verdict.step) == (8, "silent", 2, 4)


def test_of_two_busy_ones_the_earlier_step_is_named() -> None:
    early = Status(2, "c", step=4, phase="step", seconds=22, over=True)
    late = Status(1, "b", step=5, phase="step", seconds=40, over=True)
    verdict = judge(among(early, late), silent=[])
    assert verdict is not None
    assert verdict.rank == 2


def test_where_all_wait_for_the_devices_no_process_is_named_unless_one_is_behind() -> None:
    verdict = judge(among(replace(WAITING, rank=1)), silent=[])
    assert verdict is not None
    assert (verdict.code, verdict.what, verdict.rank) == (10, "device", None)
    assert "all 2 processes" in verdict.words
    verdict = judge(among(replace(WAITING, rank=1, host="b", step=4)), silent=[])
    assert verdict is not None
    assert (verdict.code, verdict.rank, verdict.host) == (10, 1, "b")


def test_one_process_alone_is_named() -> None:
    verdict = judge({0: WAITING}, silent=[])
    assert verdict is not None
    assert (verdict.code, verdict.rank) == (10, 0)


def test_at_a_barrier_the_one_that_has_not_come_is_named() -> None:
    at_barrier = replace(WAITING, phase="restore", waiting="agreement", limit="watchdog.restore=20")
    verdict = judge(among(Status(1, "b", phase="restore", seconds=21, over=True), first=at_barrier), silent=[])
    assert verdict is not None
    assert (verdict.code, verdict.rank) == (12, 1)


def test_a_save_in_the_background_is_blamed_on_the_process_that_others_wait_for() -> None:
    going_on = Status(0, "a", step=9, phase="step", behind="a save in the background for 60 s", behind_waits=True)
    writing = Status(1, "b", step=9, phase="step")
    verdict = judge(among(writing, first=going_on), silent=[])
    assert verdict is not None
    assert (verdict.code, verdict.rank, verdict.phase) == (12, 1, "save")
    verdict = judge(among(writing, first=replace(going_on, behind_waits=False)), silent=[])
    assert verdict is not None
    assert verdict.rank == 0


def test_one_that_has_left_in_good_order_is_not_waited_for() -> None:
    verdict = judge(among(Status(1, "b", step=9, ended=True)), silent=[1])
    assert verdict is not None
    assert (verdict.code, verdict.rank) == (10, 0)


def test_what_is_said_is_what_is_heard() -> None:
    assert Status.read(WAITING.text()) == WAITING
    verdict = Verdict(9, "stuck", "words", 1, "b", 5, "step")
    assert Verdict.read(verdict.text()) == verdict
