"""What became of a run's wall time, from its events alone: every second is in exactly one of `KINDS`.

An attempt's events carry how long things took, so each covers a stretch before it. Where nothing else is told, an
attempt starts until its first step; then `progress` tells how much of the time since the event before was stepping.
Steps count as productive if no later start or rewind did them again and a save has them. After the last event of an
attempt that died, nobody knows what it did: to a supervisor that time is lost, without one it can't be told from idle.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtrain.errors import EXIT_COMPLETE
from jaxtrain.telemetry.attempts import Attempt, Event, read_attempts, seconds_of

KINDS: Mapping[str, str] = {
    "productive": "steps that were saved",
    "lost": "steps done again, or never saved",
    "waiting": "for data, while no step computed",
    "evaluating": "on held-out rows",
    "saving": "the loop stood still for it",
    "restoring": "after a start, or to go back",
    "compiling": "or reading the compile cache",
    "starting": "processes, data, all before the first step",
    "idle": "between an end and the next start",
    "other": "of the loop, between steps",
}
"""Each kind of time with what it is."""

_TOLD = {
    "compile": "compiling",
    "restore": "restoring",
    "init_from": "restoring",
    "rewind": "restoring",
    "eval": "evaluating",
}


@dataclass(frozen=True)
class Span:
    """A stretch of wall time, in unix seconds."""

    begin: float
    end: float
    kind: str


@dataclass(frozen=True)
class Account:
    """The wall time of a run. `spans` follow each other without a gap, from the first attempt to the last event."""

    attempts: list[Attempt]
    spans: list[Span]

    @property
    def total(self) -> float:
        """Seconds of wall time."""
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each kind; together `total`."""
        return {kind: math.fsum(span.end - span.begin for span in self.spans if span.kind == kind) for kind in KINDS}

    @property
    def goodput(self) -> float:
        """The share of productive time."""
        return self.seconds["productive"] / self.total if self.total else 0.0


def account(events: Sequence[Event]) -> Account | None:
    """The account of a run with these events, whether it goes on, has ended or was killed; None without any progress.

    Args:
        events: as `read_events` gives them.
    """
    attempts = read_attempts(events)
    if not any(attempt.first("progress") for attempt in attempts):
        return None
    bounds = kept_steps(attempts)
    spans: list[Span] = []
    for attempt in attempts:
        if spans and attempt.begin > spans[-1].end:
            spans.append(Span(spans[-1].end, attempt.begin, "idle"))
        spans += _merged(_spans_of(attempt, bounds))
    return Account(attempts, spans)


def kept_steps(attempts: Sequence[Attempt]) -> dict[int, float]:
    """For each event of progress, by its `id`: the last step up to which what was done before it is still there."""
    bound, bounds = _last_saved(attempts), {}
    for attempt in reversed(attempts):
        for event in reversed(attempt.events):
            if event["kind"] == "progress":
                bounds[id(event)] = bound
            elif event["kind"] in ("restore", "rewind"):
                bound = min(bound, _step_of_state(event))
        if attempt.first("progress") is not None and attempt.first("restore") is None:
            bound = min(bound, 0)
    return bounds


def _last_saved(attempts: Sequence[Attempt]) -> float:
    saved = 0.0
    for attempt in attempts:
        for event in attempt.events:
            if event["kind"] in ("save", "restore", "rewind"):
                saved = _step_of_state(event)
            elif event["kind"] == "stop" and event.get("exit_code") == EXIT_COMPLETE:
                saved = math.inf
    return saved


def _step_of_state(event: Event) -> float:
    step = event.get("to" if event["kind"] == "rewind" else "step")
    return float(step) if isinstance(step, int | float) else 0.0


@dataclass(frozen=True)
class _Stepping:
    """The stretch that an event of progress tells of, and what its seconds were."""

    begin: float
    end: float
    shares: dict[str, float]

    @classmethod
    def of(cls, begin: float, event: Event, kept: float) -> "_Stepping":
        seconds, steps = seconds_of(event), max(seconds_of(event, "steps"), 1.0)
        waiting = min(seconds_of(event, "data_wait"), seconds)
        lost = min(max(seconds_of(event, "step") - kept, 0.0) / steps, 1.0)
        stepping = seconds - waiting
        shares = {"productive": stepping * (1 - lost), "waiting": waiting, "lost": stepping * lost}
        return cls(begin, event["time"], shares)

    def fitted(self, room: float) -> deque[tuple[str, float]]:
        """The shares, made smaller where the stretch has less room: times of two clocks are rounded apart."""
        scale = min(1.0, room / seconds) if (seconds := math.fsum(self.shares.values())) else 1.0
        return deque((kind, share * scale) for kind, share in self.shares.items())


def _steppings(attempt: Attempt, bounds: Mapping[int, float]) -> list[_Stepping]:
    found: list[_Stepping] = []
    for event in attempt.of_kind("progress"):
        before = found[-1].end if found else max(attempt.begin, event["time"] - seconds_of(event))
        found.append(_Stepping.of(before, event, bounds[id(event)]))
    return found


def _spans_of(attempt: Attempt, bounds: Mapping[int, float]) -> Iterator[Span]:
    """An attempt's time from its begin to its end."""
    steppings = _steppings(attempt, bounds)
    told = [_told(event) for event in attempt.events if event["kind"] in _TOLD]
    saves = [event for event in attempt.events if event["kind"] in ("save", "save_local")]
    saving = [Span(event["time"] - seconds_of(event), event["time"], "saving") for event in saves]
    stalls = [seconds_of(event, "stall") for event in saves]
    told += [Span(save.begin, save.begin + stall, "saving") for save, stall in zip(saving, stalls, strict=True)]
    steps = [Span(stepping.begin, stepping.end, "steps") for stepping in steppings]
    # After the last step of an attempt that ended in order the loop waits for its last save; else it may have gone on.
    waited_for = saving if _ended_in_order(attempt) else []
    layers = [told, steps, waited_for, _around(attempt, steppings)]
    yield from _with_steps(list(_first_of(attempt.begin, attempt.end, layers)), steppings)


def _told(event: Event) -> Span:
    return Span(event["time"] - seconds_of(event), event["time"], _TOLD[event["kind"]])


def _around(attempt: Attempt, steppings: Sequence[_Stepping]) -> list[Span]:
    """What the time before the first and after the last step is, where nothing else is told."""
    if not steppings:
        return [Span(attempt.begin, attempt.end, "starting")]
    return [
        Span(attempt.begin, steppings[0].begin, "starting"),
        Span(steppings[-1].end, attempt.end, "other" if _ended_in_order(attempt) else "lost"),
    ]


def _ended_in_order(attempt: Attempt) -> bool:
    return attempt.first("stop") is not None and attempt.fault is None


def _first_of(begin: float, end: float, layers: Sequence[Sequence[Span]]) -> Iterator[Span]:
    """The time from `begin` to `end`, each moment with the kind that the first layer has there."""
    changes: list[tuple[float, int, str, int]] = []
    for depth, layer in enumerate(layers):
        for span in layer:
            clipped = (max(span.begin, begin), min(span.end, end))
            if clipped[0] < clipped[1]:
                changes += [(clipped[0], depth, span.kind, 1), (clipped[1], depth, span.kind, -1)]
    open_: list[dict[str, int]] = [{} for _ in layers]
    at = begin
    for time, depth, kind, change in sorted([*changes, (end, 0, "", 0)], key=lambda entry: entry[0]):
        if time > at:
            yield Span(at, time, next((found for layer in open_ for found in layer), "other"))
            at = time
        if change:
            count = open_[depth].pop(kind, 0) + change
            if count:
                open_[depth][kind] = count


def _with_steps(pieces: Sequence[Span], steppings: Sequence[_Stepping]) -> Iterator[Span]:
    """Pieces of stepping become what their steps were, one after the other; what is over is between steps."""
    whole, index = [0.0] * len(steppings), 0
    for piece in pieces:
        if piece.kind == "steps":
            index = _owner(piece, steppings, index)
            whole[index] += piece.end - piece.begin
    left = [stepping.fitted(seconds) for stepping, seconds in zip(steppings, whole, strict=True)]
    index = 0
    for piece in pieces:
        if piece.kind == "steps":
            index = _owner(piece, steppings, index)
            yield from _divided(piece, left[index])
        else:
            yield piece


def _owner(piece: Span, steppings: Sequence[_Stepping], index: int) -> int:
    """Which stretch a piece is of, from that of the piece before on."""
    while piece.begin >= steppings[index].end:
        index += 1
    return index


def _divided(piece: Span, left: deque[tuple[str, float]]) -> Iterator[Span]:
    """A piece of a stretch, by what is left of the stretch's shares; takes these."""
    at = piece.begin
    while left and at < piece.end:
        kind, seconds = left.popleft()
        until = min(at + seconds, piece.end)
        if at + seconds > piece.end:
            left.appendleft((kind, at + seconds - piece.end))
        if until > at:
            yield Span(at, until, kind)
            at = until
    if at < piece.end:
        yield Span(at, piece.end, "other")


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Without empty ones, and neighbours of one kind as one."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].kind == span.kind:
            merged[-1] = Span(merged[-1].begin, span.end, span.kind)
        elif span.end > span.begin:
            merged.append(span)
    return merged
