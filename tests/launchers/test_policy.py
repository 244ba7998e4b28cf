"""What follows from how a process ended, as a table: no process is started."""

import signal

import pytest

from jaxtrain import errors
from jaxtrain.launchers.policy import FATAL, Ending, Policy, Restart, Stop, first_cause, manner

KILLED = -signal.SIGKILL


def decide(policy: Policy, code: int | None, step: int | None = 3, saved: int = 0, stepped: bool = True) -> object:
    return policy.decide(Ending(0, code, step), saved=saved, stepped=stepped)


@pytest.mark.parametrize("code", [*sorted(FATAL), errors.EXIT_REQUEUE, errors.EXIT_INTERRUPTED])
def test_what_another_start_would_not_change_ends_the_run_with_its_own_code(code: int) -> None:
    assert decide(Policy(10), code) == Stop(code)


@pytest.mark.parametrize("code", [1, 6, 8, 9, 10, 11, 12, 134, -signal.SIGABRT, -signal.SIGSEGV, KILLED, None])
def test_all_else_is_followed_by_a_restart_and_the_first_one_at_once(code: int | None) -> None:
    assert decide(Policy(10), code) == Restart(0.0)


def test_every_exit_code_is_decided_on() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")} - {errors.EXIT_COMPLETE}
    assert all(isinstance(decide(Policy(10), code), Restart | Stop) for code in codes)


def test_waits_grow_to_a_limit_and_differ_from_run_to_run() -> None:
    def waits(seed: int) -> list[float]:
        policy = Policy(12, seed)
        decisions = [decide(policy, KILLED, step) for step in range(12)]
        return [decision.wait for decision in decisions if isinstance(decision, Restart)]

    first = waits(0)
    assert first == waits(0) != waits(1)
    for index, wait in enumerate(first[1:]):
        whole = min(60.0, 2.0**index)
        assert whole / 2 <= wait <= whole


def test_a_new_checkpoint_gives_the_budget_back_and_a_step_alone_does_not() -> None:
    policy = Policy(2)
    for saved in (10, 20, 30, 40):
        assert decide(policy, KILLED, step=saved + 1, saved=saved) == Restart(0.0)
        assert isinstance(decide(policy, KILLED, step=saved + 2, saved=saved), Restart)
    end = decide(policy, KILLED, step=43, saved=40)
    assert isinstance(end, Stop)
    assert end.code == errors.EXIT_TOO_MANY_RESTARTS
    assert "2 restarts brought no new checkpoint: rank 0 died of SIGKILL after step 43" in end.reason


def codes_of(policy: Policy, *endings: tuple[int | None, int | None, bool]) -> list[int | None]:
    decisions = [policy.decide(Ending(0, code, step), saved=0, stepped=stepped) for code, step, stepped in endings]
    return [decision.code if isinstance(decision, Stop) else None for decision in decisions]


def test_the_same_crash_three_times_in_a_row_at_the_same_step_is_the_runs_own() -> None:
    assert codes_of(Policy(10), (1, 5, True), (1, 6, True), (1, 5, True)) == [None, None, 15], "known to one step"
    assert codes_of(Policy(10), (1, None, False), (1, None, False), (1, None, False)) == [None, None, 15], "at start"
    assert codes_of(Policy(10), (-11, 5, True), (-11, 5, True), (-11, 5, True)) == [None, None, 15]


def test_bad_luck_is_not_taken_for_a_crash_of_the_run() -> None:
    other_step = [(1, 5, True), (1, 9, True), (1, 5, True)]
    other_code = [(1, 5, True), (134, 5, True), (1, 5, True)]
    killed_at_start = [(KILLED, 5, False)] * 3
    for endings in (other_step, other_code, killed_at_start):
        assert codes_of(Policy(10), *endings) == [None, None, None], endings


def test_a_kill_that_comes_at_the_same_step_each_time_is_the_runs_own() -> None:
    """So does the kernel where a step needs more memory than there is."""
    assert codes_of(Policy(10), *[(KILLED, 5, True)] * 3) == [None, None, 15]


def test_the_cause_is_who_ended_first_for_a_reason_of_its_own() -> None:
    lost, aborted, died = Ending(0, 8), Ending(2, -signal.SIGABRT), Ending(1, KILLED)
    assert first_cause([lost, aborted, died, Ending(3, 1)]) == died
    assert first_cause([aborted, lost]) == aborted
    assert first_cause([lost, Ending(1, None)]) == Ending(1, None), "one that is silent"


def test_endings_are_told_in_words() -> None:
    assert str(Ending(3, KILLED, 7, "save")) == "rank 3 died of SIGKILL after step 7 (save)"
    assert str(Ending(0, 1)) == "rank 0 ended with exit code 1"
    assert manner(None) == "gave no sign of life"
    assert manner(-63) == "died of signal 63"
