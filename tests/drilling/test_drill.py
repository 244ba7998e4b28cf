"""What the drill takes for a return, from events alone."""

from types import SimpleNamespace

import pytest

from jaxtrain.drilling import drill
from jaxtrain.drilling.drill import Outcome
from jaxtrain.drilling.plan import Fault
from jaxtrain.drilling.strikes import Event

START = 1000.0


class Recorded(drill.Supervised):
    """A run that is struck at START, and all of whose events come then, a second apart."""

    def __init__(self, events: list[Event]):
        self._coming = [event | {"time": START + number} for number, event in enumerate(events)]
        self._come: list[Event] = []
        self.consumed = 0

    def events(self) -> list[Event]:
        return self._come

    def step(self) -> int:
        return 100

    def reach(self, step: int, tell: drill.Tell) -> None:
        """It has got there."""

    def target(self) -> SimpleNamespace:
        self._come = self._coming
        return SimpleNamespace(strike=lambda fault: None)

    def ended(self) -> None:
        """It runs."""


def outcome(fault: Fault, events: list[Event], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(drill.time, "time", lambda: START)
    request = SimpleNamespace(patience=0.1, processes=2)
    watch = drill._Watch(fault, Recorded(events), request, lambda name, step: None)  # type: ignore[arg-type]
    return watch.survive()


LAUNCH: Event = {"kind": "launch", "processes": 2}
PROGRESS: Event = {"kind": "progress"}
TOLD: Event = {"kind": "preempt", "signal": "SIGTERM"}


def test_a_step_of_the_attempt_that_is_leaving_is_no_return(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [TOLD, PROGRESS, PROGRESS, LAUNCH, PROGRESS]
    assert outcome(Fault("term", 50, 1), events, monkeypatch).back == 4.0


def test_a_run_that_is_not_started_again_has_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcome(Fault("term", 50, 1), [TOLD, PROGRESS], monkeypatch)
    assert found.back is None
    assert found.problems == ["was not started again within 0.1 s"]
