"""Where a process says that it is."""

import threading

import pytest

from jaxtrain.resilience.whereabouts import Whereabouts


def names(here: Whereabouts) -> list[str]:
    return [phase.name for phase in here.phases]


def test_the_innermost_phase_counts_and_the_outer_one_begins_anew_behind_it() -> None:
    here = Whereabouts()
    (start,) = here.phases
    began = start.since
    with here.phase("eval"):
        with here.phase("reading", limit="data"):
            assert [(phase.name, phase.limit) for phase in here.phases] == [("reading", "data")]
        assert names(here) == ["eval"]
        before = here.phases[0].since
        here.progress()
        assert here.phases[0].since >= before
    assert names(here) == ["start"]
    assert here.phases[0].since > began


def test_a_phase_that_ends_by_an_error_has_ended() -> None:
    here = Whereabouts()
    with pytest.raises(FileNotFoundError), here.phase("restore"), here.wait("agreement"):
        assert here.waiting == "agreement"
        raise FileNotFoundError
    assert names(here) == ["start"]
    assert here.waiting == ""
    assert here.failed_in == "restore"
    with here.phase("save"):
        pass  # such as closing what is open
    assert here.failed_in == "restore"
    here.finished(1, 0.1)
    assert here.failed_in == ""


def test_what_goes_on_in_the_background_stands_beside_the_main_thread() -> None:
    here = Whereabouts()
    inside, leave = threading.Event(), threading.Event()

    def save() -> None:
        with here.background("save"):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=save)
    thread.start()
    inside.wait()
    with here.phase("step"):
        assert names(here) == ["step", "save"]
    leave.set()
    thread.join()
    assert names(here) == ["start"]


def test_the_median_needs_a_few_steps_and_forgets_old_ones() -> None:
    here = Whereabouts()
    for step, seconds in enumerate((9.0, 1.0), 1):
        here.finished(step, seconds)
    assert here.median() is None
    here.finished(3, 2.0)
    assert here.median() == 2.0
    for step in range(4, 104):
        here.finished(step, 3.0)
    assert (here.step, here.median()) == (103, 3.0)
