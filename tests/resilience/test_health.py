"""Probes come as often as their cost allows; a thread tells and judges them, and the loop waits for no other rank."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxtrain.config import HealthConfig
from jaxtrain.resilience.channel import Channel
from jaxtrain.resilience.health import FOLDER, Health
from jaxtrain.resilience.judge import Finding, Probed, Report
from jaxtrain.resilience.probe import Probe, Result
from jaxtrain.telemetry.timeline import Timeline


class FakeProbe(Probe):
    """Gives what it is told to, at once."""

    def __init__(self, wrong: tuple[str, ...] = ()):
        self.devices = tuple(jax.devices()[:1])
        self.result = Result(0.01, wrong)

    def __call__(self, repeats: int = 1) -> list[Result]:
        return [self.result]


@dataclass
class Watched:
    """A `Health` with what it found and asked for."""

    health: Health
    timeline: Timeline
    found: list[tuple[Finding, str]] = field(default_factory=list)
    stops: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Any]:
    made: list[Watched] = []

    def make(probe: Probe, channel: Channel | None = None, **config: Any) -> Watched:
        timeline = Timeline(tmp_path / "timeline", 0, 1, after=0)
        watched = Watched(None, timeline)  # type: ignore[arg-type]
        watched.health = Health(
            HealthConfig(**config),
            probe,
            channel or Channel(),
            timeline,
            lambda finding, action: watched.found.append((finding, action)),
            watched.stops.set,
            tmp_path / "excluded.json",
        )
        made.append(watched)
        return watched

    yield make
    for watched in made:
        watched.health.close()
        watched.timeline.close()


def probed(watched: Watched, step_seconds: float, steps: int) -> list[int]:
    """The steps after which a probe was due, each of which cost what `health._cost` says."""
    due = []
    for step in range(1, steps + 1):
        watched.timeline.step(step, step_seconds)
        if watched.health.due():
            due.append(step)
    return due


def test_probes_come_twice_as_rarely_until_they_take_their_share_of_the_time(watch: Any) -> None:
    for step_seconds, steps in ((1.0, [5, 10, 15, 20]), (0.3, [10, 20]), (0.15, [20])):
        watched = watch(FakeProbe(), every=5, share=0.01)
        watched.health._cost = 0.02
        assert probed(watched, step_seconds, 20) == steps


def test_wrong_numbers_are_told_with_the_policys_action(watch: Any, tmp_path: Path) -> None:
    for policy, stops in (("warn", False), ("stop", True)):
        watched = watch(FakeProbe(("memory",)), policy=policy)
        watched.health.probe(7)
        watched.health.close()
        ((finding, action),) = watched.found
        assert (finding.what, finding.step, action) == ("checksum", 7, policy)
        assert watched.stops.is_set() == stops
        listed = tmp_path / "excluded.json"
        assert listed.exists() is stops
        assert not stops or [entry["step"] for entry in json.loads(listed.read_text())] == [7]


def test_slow_data_never_stops_a_run(watch: Any, tmp_path: Path) -> None:
    watched = watch(FakeProbe(), policy="stop", patience=2)
    for step in range(1, 5):
        watched.timeline.add("data", 0.5)
        watched.timeline.step(step, 1.0)
        watched.health.probe(step)
        watched.health.due()
    watched.health.close()
    assert [(finding.what, action) for finding, action in watched.found] == [("data", "warn")]
    assert not watched.stops.is_set()
    assert not (tmp_path / "excluded.json").exists()


class Held(Channel):
    """A channel on which every call waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def put(self, key: str, text: str) -> None:
        self.free.wait(60)
        super().put(key, text)


def test_the_loop_does_not_wait_for_the_channel_and_late_numbers_are_judged_all_the_same(watch: Any) -> None:
    channel = Held()
    watched = watch(FakeProbe(("memory",)), channel)
    for step in range(3):
        watched.health.probe(step)  # returns while the thread is held
    assert not watched.found
    channel.free.set()
    watched.health.close()
    assert [finding.step for finding, _ in watched.found] == [0]


def test_the_first_process_judges_by_the_numbers_of_all(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    channel = Channel()
    watched = watch(FakeProbe(), channel)
    other = Report("node1", ["cuda:0"], ["H100"], [Probed(0, 3, [0.01], [["memory"]], 0.0, 0.0)])
    watched.health.probe(3)
    channel.put(f"{FOLDER}/1", other.encode())
    watched.health.close()
    ((finding, _),) = watched.found
    assert (finding.rank, finding.host) == (1, "node1")
