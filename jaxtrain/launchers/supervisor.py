"""One run from its first start to its end, over all its failures: start, watch, end together, start again."""

import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from jaxtrain import errors
from jaxtrain.config import Config
from jaxtrain.errors import ConfigError
from jaxtrain.launchers import policy, sizes
from jaxtrain.launchers.local import Group, Local
from jaxtrain.launchers.policy import Ending, Policy, Restart, Stop
from jaxtrain.launchers.sizes import Size
from jaxtrain.launchers.slots import Slots
from jaxtrain.launchers.view import View, last_lines
from jaxtrain.launchers.vitals import Progress, Vitals
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry.events import EventLog

SUPERVISOR = -1
"""Its number among processes, in events."""
PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGINT,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGHUP: signal.SIGTERM,
}
"""What reaches the processes of each signal that comes; one that the supervisor was started to ignore is ignored."""
TICK_SECONDS = 0.05
LOOK_SECONDS = 0.5
"""Between two looks at beats."""
LAST_WORDS_SECONDS = 1.0
"""For the others after one has died: to end by themselves, and to say where they were. Then they are killed."""
LEAVING_SECONDS = 10.0
"""For processes that leave, beyond the grace that they have for it."""
FINISHING_SECONDS = 600.0
"""For the others once one process has ended at the run's goal: the last checkpoint may still be written."""
SIGNALS_TO_KILL = 3


@dataclass(frozen=True)
class Limits:
    """What a supervisor is told.

    Attributes:
        processes: how many are wanted.
        least: how few will do; the same number where the run isn't elastic.
        silence: seconds without a sign of life.
        start: seconds for the first one.
        grace: seconds that processes have to save and leave.
    """

    processes: int
    least: int
    silence: float
    start: float
    grace: float


class Supervisor:
    """Runs a run. `workable` are the sizes that it can have, the full one among them."""

    def __init__(
        self,
        config: Config,
        launcher: Local,
        directory: RunDirectory,
        rules: Policy,
        slots: Slots,
        workable: Mapping[int, Size],
        limits: Limits,
        view: View,
    ):
        self._config, self._began = config, time.monotonic()
        self._launcher, self._directory, self._policy, self._slots = launcher, directory, rules, slots
        self._workable, self._limits, self._view = workable, limits, view
        self._progress = Progress(directory)
        self._events: EventLog | None = None
        self._told_disk = False
        self._signals: list[int] = []
        self._asked: list[int] = []
        self._ranks: list[int] = list(range(limits.processes))
        self._stopped_after = 0.0

    def run(self) -> Stop:
        """To the end of the run; no process is left when this returns or raises."""
        heeded = [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heeded}
        try:
            return self._with_a_reason(self._run())
        finally:
            self._launcher.close()
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._events is not None:
                self._events.close()

    def _with_a_reason(self, end: Stop) -> Stop:
        """Processes say themselves why they fail, into logs: where these can't be written, nobody has read it."""
        logs = self._directory.logs
        if end.reason or end.code in policy.ORDERLY or (why := unwritable(logs)) is None:
            return end
        return Stop(end.code, f"the run ended with exit code {end.code}, and may not have said why: {logs}: {why}")

    def _run(self) -> Stop:
        attempt, size = 1, self._next_size()
        while not isinstance(size, Stop):
            decision = self._start_and_watch(attempt, size)
            if isinstance(decision, Stop):
                return decision
            attempt, size = attempt + 1, self._next_size()
            if not isinstance(size, Stop) and (left := self._wait(attempt, size, decision)) is not None:
                return left
        return size

    def _start_and_watch(self, attempt: int, size: Size) -> policy.Decision:
        """One attempt, from its start to its end."""
        try:
            group = self._start(attempt, size)
        except OSError as error:
            words = f"can't be started: {error.strerror or error}"
            if attempt == 1:
                raise ConfigError(
                    f"--processes {size.processes}: {words}; `ulimit -a` tells what there may be"
                ) from error
            self._view.say(words)
            return self._policy.decide(Ending(0, None), saved=self._progress.saved, stepped=False)
        try:
            return self._attempt(group)
        finally:
            group.kill()
            self._view.settle()

    def _next_size(self) -> Size | Stop:
        """With how many processes to go on."""
        for lost in self._refreshed():
            self._view.say(f"slot {lost.slot} is excluded by {self._directory.excluded}: {lost.reason}")
        self._ranks = self._slots.take(self._limits.processes, self._limits.least)
        size = sizes.largest(self._workable, len(self._ranks), self._limits.least)
        if size is None:
            return Stop(errors.EXIT_BAD_HOST, self._too_few())
        self._ranks = self._ranks[: size.processes]
        return size

    def _refreshed(self) -> Sequence[Any]:
        try:
            return self._slots.refresh(self._ranks)
        except ValueError as error:
            self._view.say(f"{error}; what it said before holds")
            return ()

    def _too_few(self) -> str:
        excluded = "; ".join(f"slot {lost.slot}: {lost.reason}" for lost in self._slots.excluded)
        least, wanted = self._limits.least, self._limits.processes
        needed = f"{least} to {wanted}" if least < wanted else f"{wanted}"
        return (
            f"{len(self._slots.available)} slots are left and {needed} are needed ({excluded}); this config can train "
            f"with {sizes.in_words(self._workable)} processes: take the line out of {self._directory.excluded} once "
            f"the host is well, or start with --spares or a lower --elastic"
        )

    def _start(self, attempt: int, size: Size) -> Group:
        began = time.monotonic()
        self._progress.begin()
        group = self._launcher.start(attempt, self._ranks, (*size.overrides, *self._of_a_later_start(attempt)))
        logs, begins = [process.log for process in group.processes], [process.log_begin for process in group.processes]
        self._view.watch(logs, prefixed=size.processes > 1, begins=begins)
        warm = sum(process.warm for process in group.processes)
        pids = [process.pid for process in group.processes]
        seconds = round(time.monotonic() - began, 3)
        self._event(
            "launch", attempt=attempt, processes=size.processes, slots=self._ranks, pids=pids, warm=warm,
            seconds=seconds,
        )  # fmt: skip
        if attempt == 1:
            self._view.say(f"{size.processes} processes ({', '.join(map(str, pids))}); logs: {group.processes[0].log}")
        if size.overrides:
            self._view.say(f"with {size.processes} of {self._limits.processes} processes: {' '.join(size.overrides)}")
        return group

    def _of_a_later_start(self, attempt: int) -> list[str]:
        """What must differ in the config when it isn't the first start: that goes on, with the time that is left."""
        if attempt == 1:
            return []
        resume = [] if self._config.resume else ["resume=true"]
        return resume if self._hours_left is None else [*resume, f"max_hours={self._hours_left:.6f}"]

    @property
    def _hours_left(self) -> float | None:
        limit = self._config.max_hours
        return None if limit is None else limit - (time.monotonic() - self._began) / 3600

    def _attempt(self, group: Group) -> policy.Decision:
        """Watches a group to its end, and decides."""
        vitals = Vitals(group, self._limits.silence, self._limits.start)
        looked = last = time.monotonic()
        while True:
            self._pass_on(group)
            ended = group.ended()
            now = time.monotonic()
            if self._asked or (ended and all(code in policy.ORDERLY for code in ended.values())):
                return self._leave(group, vitals)
            if ended:
                return self._failed(
                    group, vitals, [self._ending(vitals, rank, ended[rank], now - last) for rank in ended]
                )
            if now - looked >= LOOK_SECONDS:
                looked = now
                if (silent := vitals.silent()) is not None:
                    return self._failed(group, vitals, [self._ending(vitals, silent[0], None, silent[1])])
                if self._progress.look():
                    self._slots.started()
                    self._launcher.refill()
            last = now
            time.sleep(TICK_SECONDS)

    def _ending(self, vitals: Vitals, rank: int, code: int | None, seen_after: float) -> Ending:
        beat, step, stepped = vitals.beats().get(rank), self._progress.step, self._progress.look()
        if beat is not None:
            step = beat.step if step is None or not stepped else max(step, beat.step)
        return Ending(rank, code, step, None if beat is None else beat.phase, round(seen_after, 3))

    def _failed(self, group: Group, vitals: Vitals, endings: list[Ending]) -> policy.Decision:
        """After a first failure: hears the others, ends them, and decides."""
        seen = time.monotonic()
        told = endings[0].code not in policy.FOLLOWING
        if told:
            self._tell(self._as_named(policy.first_cause(endings), len(group.processes)), group)
        if (stopped := vitals.stopped()) and not told:
            endings.append(self._ending(vitals, stopped[0], None, 0.0))
        known = {ending.rank for ending in endings}
        while time.monotonic() - seen < LAST_WORDS_SECONDS and len(group.ended()) < len(group.processes):
            self._pass_on(group)
            time.sleep(TICK_SECONDS)
        for rank, code in group.ended().items():
            if rank not in known:
                endings.append(self._ending(vitals, rank, code, time.monotonic() - seen))
        cause = self._as_named(policy.first_cause(endings), len(group.processes))
        if not told:
            self._tell(cause, group)
        group.kill()
        self._view.settle()
        if cause.code is None or cause.code not in policy.FATAL:
            self._view.say(f"{cause}, seen after {cause.seen_after:.2f} s")
        self._stopped_after = round(time.monotonic() - seen, 3)
        return self._decide(cause, group)

    def _as_named(self, cause: Ending, processes: int) -> Ending:
        """The same with the rank, step and phase that the processes blame, where they said so before they ended."""
        blamed = self._progress.blamed(cause.code)
        if blamed is None or type(blamed.get("rank")) is not int or not 0 <= blamed["rank"] < processes:
            return cause
        return replace(cause, rank=blamed["rank"], step=blamed.get("step", cause.step), phase=blamed.get("phase"))

    def _decide(self, cause: Ending, group: Group) -> policy.Decision:
        if self._asked and cause.code not in policy.FATAL:
            return self._when_asked()
        stepped = self._progress.stepped
        decision = self._policy.decide(cause, saved=self._progress.saved, stepped=stepped)
        if isinstance(decision, Restart) and not stepped:
            slot = group.slots[cause.rank]
            if self._slots.failed_to_start(slot):
                self._view.say(
                    f"slot {slot} failed to start twice in a row; where others suffice, the next start is without it"
                )
        if isinstance(decision, Stop) and decision.reason:
            end = last_lines(group.processes[cause.rank].log)
            log = group.processes[cause.rank].log
            return Stop(decision.code, f"{decision.reason}\nthe end of {log}:\n{end}" if end else decision.reason)
        return decision

    def _leave(self, group: Group, vitals: Vitals) -> policy.Decision:
        """Processes end in order, or were asked to: waits for all."""
        began = time.monotonic()
        while len(ended := group.ended()) < len(group.processes):
            self._pass_on(group)
            finishing = not self._asked and set(ended.values()) == {errors.EXIT_COMPLETE}
            patience = FINISHING_SECONDS if finishing else self._limits.grace + LEAVING_SECONDS
            if time.monotonic() - began > patience:
                break
            failed = [rank for rank, code in ended.items() if code not in policy.ORDERLY | policy.FOLLOWING]
            if failed and not self._asked:
                return self._failed(group, vitals, [self._ending(vitals, rank, ended[rank], 0.0) for rank in failed])
            time.sleep(TICK_SECONDS)
        late = [rank for rank in range(len(group.processes)) if rank not in group.ended()]
        group.kill()
        if late:
            self._view.say(f"rank {late[0]} did not leave in time, and was killed")
        return self._left(group, vitals)

    def _left(self, group: Group, vitals: Vitals) -> policy.Decision:
        """All have ended, most of them in order."""
        ended = group.ended()
        codes = set(ended.values())
        if codes == {errors.EXIT_COMPLETE}:
            return Stop(errors.EXIT_COMPLETE)
        for code in (*sorted(policy.FATAL), errors.EXIT_REQUEUE, errors.EXIT_INTERRUPTED):
            if code in codes:
                return Stop(code)
        if self._asked:
            return self._when_asked()
        if errors.EXIT_BAD_HOST in codes:
            return self._without_a_host()
        rank = next(rank for rank, code in ended.items() if code != errors.EXIT_COMPLETE)
        return self._decide(self._ending(vitals, rank, ended[rank], 0.0), group)

    def _without_a_host(self) -> policy.Decision:
        """A host is bad: goes on without it, if that is known and enough others are left."""
        lost = self._refreshed()
        for one in lost:
            self._view.say(f"slot {one.slot} is excluded: {one.reason}")
        if not lost:
            return Stop(errors.EXIT_BAD_HOST, f"a host is bad, and {self._directory.excluded} doesn't say which rank")
        return Restart(0.0)

    def _when_asked(self) -> Stop:
        interrupted = signal.SIGINT in self._asked
        return Stop(errors.EXIT_INTERRUPTED if interrupted else errors.EXIT_REQUEUE)

    def _wait(self, attempt: int, size: Size, decision: Restart) -> Stop | None:
        """The backoff; a signal ends it, and so does the end of the run's time."""
        self._event(
            "restart", attempt=attempt, processes=size.processes, wait=round(decision.wait, 3),
            stopped_after=self._stopped_after,
        )  # fmt: skip
        self._view.say(
            f"starting again (attempt {attempt}{f', in {decision.wait:.1f} s' if decision.wait else ''}); "
            f"{self._policy.left} more restarts without a new checkpoint"
        )
        until = time.monotonic() + decision.wait
        while True:
            if self._signals:
                self._asked.append(self._signals.pop(0))
                return self._when_asked()
            if self._hours_left is not None and self._hours_left <= 0:
                return Stop(errors.EXIT_REQUEUE, f"max_hours={self._config.max_hours:g} have passed")
            if (left := until - time.monotonic()) <= 0:
                return None
            time.sleep(min(left, TICK_SECONDS))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _pass_on(self, group: Group) -> None:
        """Each signal once to each process; who sends a third one wants no more patience."""
        while self._signals:
            number = self._signals.pop(0)
            self._asked.append(number)
            self._view.say(f"{policy.signal_name(number)} is passed on to all processes")
            group.send(PASSED_ON[signal.Signals(number)])
            if len(self._asked) >= SIGNALS_TO_KILL:
                group.kill()

    def _tell(self, cause: Ending, group: Group) -> None:
        self._event(
            "fault", what=cause.what, rank=cause.rank, host=self._launcher.host, step=cause.step, phase=cause.phase,
            exit_code=cause.code, seen_after=cause.seen_after, slot=group.slots[cause.rank],
        )  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> None:
        """Written down as far as the disk allows: a full one ends no run."""
        try:
            if self._events is None:
                self._events = EventLog(self._directory.events, SUPERVISOR)
            self._events.write(kind, **fields)
        except OSError as error:
            if not self._told_disk:
                self._told_disk = True
                self._view.say(f"{self._directory.events}: can't be written ({error.strerror}); events are missing")


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written there; None: it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 512)
    except OSError as error:
        return error.strerror
    return None
