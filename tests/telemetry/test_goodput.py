"""Where a run's wall time went, from events written by hand."""

import random
from pathlib import Path

import pytest

from jaxtrain.telemetry.events import read_events
from jaxtrain.telemetry.goodput import KINDS, Account, account
from tests.telemetry.timeline import Timeline, killed_twice


def account_of(run: Timeline) -> Account:
    found = account(run.events)
    assert found is not None
    return found


def nonzero(found: Account) -> dict[str, float]:
    return {kind: round(seconds, 6) for kind, seconds in found.seconds.items() if seconds}


def test_a_run_that_was_killed_twice_accounts_for_every_second(tmp_path: Path) -> None:
    found = account(read_events(killed_twice().written(tmp_path / "events.jsonl")))
    assert found is not None
    assert found.total == pytest.approx(119.1)
    assert nonzero(found) == {
        "productive": pytest.approx(40 - 1.5),
        "lost": pytest.approx(5 + 4 + 85.7 - 84.2),
        "waiting": pytest.approx(1.5),
        "evaluating": pytest.approx(3.0),
        "saving": pytest.approx(0.4 + 0.2 + 2.0),
        "restoring": pytest.approx(4.0),
        "compiling": pytest.approx(30.0),
        "starting": pytest.approx(3 * 5.0 + 0.5 + 1.0),
        "idle": pytest.approx(49.5 - 40.4 + 89.0 - 85.7),
        "other": pytest.approx(0.1),
    }


def test_spans_follow_each_other_without_a_gap_and_sum_up_exactly() -> None:
    found = account_of(killed_twice())
    for before, after in zip(found.spans, found.spans[1:], strict=False):
        assert before.end == after.begin
        assert before.begin < before.end
    assert sum(found.seconds.values()) == pytest.approx(found.total, abs=1e-6)


def test_a_run_that_is_killed_at_any_event_has_an_account_that_sums_up() -> None:
    events = killed_twice().events
    for count in range(1, len(events) + 1):
        found = account(events[:count])
        if found is None:
            assert not any(event["kind"] == "progress" for event in events[:count])
            continue
        assert found.total == pytest.approx(
            max(event["time"] - event.get("seen_after", 0) for event in events[:count] if event["kind"] != "restart")
            - 1e6,
            abs=1,
        )
        assert sum(found.seconds.values()) == pytest.approx(found.total, abs=1e-6)
        assert set(found.seconds) == set(KINDS)


def test_events_in_disorder_or_with_wrong_numbers_still_sum_up() -> None:
    draw = random.Random(0)
    for _ in range(50):
        events = [dict(event) for event in killed_twice().events]
        draw.shuffle(events)
        for event in draw.sample(events, 8):
            event["seconds"] = draw.choice([None, -1.0, 1e5, "x"])
        found = account([*events, {"kind": "odd"}, {"time": "x", "kind": "start"}])
        if found is not None:
            assert sum(found.seconds.values()) == pytest.approx(found.total, abs=1e-5)
            assert all(seconds >= 0 for seconds in found.seconds.values())


def test_steps_that_were_never_saved_are_lost_and_those_that_two_starts_did_count_once() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).progress(46, 31, 30, 30.0).save(46.5, 20, 1.0, 0.0)
    assert account_of(run).seconds["productive"] == pytest.approx(20)
    assert account_of(run).seconds["lost"] == pytest.approx(11 + 0.5)
    run.start(60, 10).progress(78, 11, 1, 1.0)
    assert account_of(run).seconds["productive"] == pytest.approx(10), "it went on from step 10, whatever was saved"
    assert account_of(run).seconds["lost"] == pytest.approx(21 + 1 + 0.5)
    run.at(80, "save", step=11, seconds=0.5)
    assert account_of(run).seconds["productive"] == pytest.approx(11)


def test_a_start_that_dies_before_its_first_step_loses_nothing_of_others() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).progress(25, 10, 9, 9.0).save(25.5, 10, 0.5, 0.5)
    run.at(30, "start", step=10, steps=100, seconds=2.0).at(40, "compile", what="train_step", seconds=8.0)
    found = account_of(run)
    assert found.seconds["productive"] == pytest.approx(10)
    assert found.seconds["compiling"] == pytest.approx(18)
    assert found.seconds["lost"] == 0.0


def test_a_start_from_nothing_loses_all_before_it() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).progress(25, 10, 9, 9.0)
    run.start(30, 0).progress(46, 1, 1, 1.0).save(47, 1, 0.5, 0.5)
    assert account_of(run).seconds["lost"] == pytest.approx(10.5), "and what came after its last event"
    assert account_of(run).seconds["productive"] == pytest.approx(1)


def test_a_rewind_loses_the_steps_that_come_again() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).progress(25, 10, 9, 9.0).save(25.2, 10, 0.2, 0.2)
    run.progress(45.2, 30, 20, 20.0).at(47.2, "rewind", step=30, to=10, position=400, seconds=2.0)
    run.progress(57.2, 20, 10, 10.0).save(58, 20, 0.8, 0.8)
    found = account_of(run)
    assert found.seconds["lost"] == pytest.approx(20)
    assert found.seconds["productive"] == pytest.approx(20)
    assert found.seconds["restoring"] == pytest.approx(2)


def test_what_steps_do_not_account_for_is_named_other() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).progress(26, 11, 10, 8.0).save(26.5, 11, 0.5, 0.5)
    assert account_of(run).seconds["other"] == pytest.approx(2)


def test_a_save_to_local_disks_stands_still_too() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).at(17, "save_local", step=1, seconds=1.0, stall=0.3)
    run.progress(26, 11, 10, 9.7)
    assert account_of(run).seconds["saving"] == pytest.approx(0.3)


def test_the_wait_for_the_last_save_is_saving() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).save(20, 1, 3.9, 0.1)
    run.at(20, "stop", step=1, reason="complete", exit_code=0)
    assert account_of(run).seconds["saving"] == pytest.approx(3.9)


def test_a_start_that_found_the_run_complete_is_no_part_of_it() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).save(17, 1, 0.5, 0.5)
    run.at(17, "stop", step=1, reason="complete", exit_code=0)
    run.at(1e5, "start", step=1, steps=1, seconds=5.0).at(1e5 + 1, "stop", step=1, reason="already", exit_code=0)
    assert account_of(run).total == pytest.approx(17)


def test_a_run_without_any_progress_has_no_account() -> None:
    assert account([]) is None
    assert account(Timeline().start(0, 0).events) is None
