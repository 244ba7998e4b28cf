"""Ends a run that makes no progress, or has lost a process, with a name, stacks and an exit code of its own.

Each process has a watchdog, two threads that the main one can't hold up. It knows where its process is (`whereabouts`),
tells the others once a second, and sees to the limits of the section `watchdog`. Where one has passed, process 0 judges
by what all say of themselves (`verdict`), and every process that it reaches ends with that verdict; a process that
hears nothing judges by itself.
"""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from jaxtrain.config import Config
from jaxtrain.errors import EXIT_REQUEUE, first_line
from jaxtrain.resilience.beat import Beat, folder_of_beats, write_beat
from jaxtrain.resilience.channel import Channel
from jaxtrain.resilience.courier import Courier
from jaxtrain.resilience.ending import LOOK_AGAIN, MOMENT, SILENT, Ending
from jaxtrain.resilience.preemption import AbandonedTogether, Signals
from jaxtrain.resilience.signs import is_alive, is_of_others, this_machine, waits_for_others
from jaxtrain.resilience.verdict import Status, Verdict, judge, lost
from jaxtrain.resilience.whereabouts import Phase, here

_log = logging.getLogger(__name__)


class Watchdog:
    """Of one run in one process; stands from `with` on.

    Args:
        crash: the folder that gets stacks.
        events: the file that gets events.
        signals: what tells this process to leave.
    """

    def __init__(self, config: Config, crash: Path, events: Path, signals: Signals | None = None):
        self._limits = config.watchdog
        self._start_limit = config.distributed.start_timeout
        self._silence = config.distributed.heartbeat_timeout
        self._grace = config.grace_seconds
        self._signals = signals or Signals()
        self._rank = jax.process_index()
        self._count = jax.process_count()
        self._host = socket.gethostname()
        self._machine = this_machine()
        self._channel = Channel()
        self._courier = Courier(self._channel, self._rank, self._status)
        self._ending = Ending(crash, events, self._courier, self._rank, self._count)
        self._beats = folder_of_beats()
        self._beat_at = 0.0
        self._saved: int | None = None
        self._request: Callable[[], None] | None = None
        self._told: tuple[str, int, float] | None = None
        self._over_since: float | None = None
        self._failed: tuple[str, bool, float] | None = None
        self._failures: dict[int, float] = {}
        self._cleared = threading.Event()
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        here.reset()
        here.watched = True
        self._courier.start()
        self._thread.start()
        self._signals.heed = self._wake.set
        if self._signals.told:
            self._wake.set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._wake.set()
        self._thread.join()
        self._write_beat(leaving=True)
        here.watched = False
        self._signals.heed = lambda: None
        if error is None:
            self._courier.stop()
        # Otherwise it goes on until the process ends, so that the others hear what became of it.

    def recording(self) -> None:
        """The run directory is this run's: faults go into it from now on."""
        self._ending.recording = True

    def restored(self, step: int) -> None:
        """The run goes on behind `step`; 0: it begins."""
        here.step, self._saved = step, step or None

    def at_end(self, write: Callable[[], None]) -> None:
        """`write` is called, from another thread, before the watchdog ends this process."""
        self._ending.last_words.append(write)

    def saved(self, step: int) -> None:
        """The newest complete checkpoint is that of `step`."""
        self._saved = step

    @contextlib.contextmanager
    def looping(self, request: Callable[[], None]) -> Iterator[None]:
        """Inside, the loop runs; `request` asks it to save and leave, and is called when any process was told to."""
        self._request = request
        if self._told is not None:
            request()
        yield
        # Stays: what comes now, comes after the last step.

    def told(self) -> str:
        """Who was told to leave by what, for a message. Waits a moment for the word of that process."""
        until = time.monotonic() + MOMENT
        while self._told is None and time.monotonic() < until:
            self._courier.hurry()
            time.sleep(LOOK_AGAIN)
        return "a signal to another process" if self._told is None else f"{self._told[0]} to process {self._told[1]}"

    def abandon_together(self) -> AbandonedTogether:
        """Lets evaluations end where all processes are told to leave."""
        return AbandonedTogether(self._channel, self._rank, lambda: self._told is not None)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """An error of the block that is another process's loss ends this one with the name of that process; others are
        raised as they are, and the other processes hear of them."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except Exception as error:
            if getattr(error, "exit_code", None) != EXIT_REQUEUE:
                self._explain(error)
            raise

    def _explain(self, error: Exception) -> None:
        if self._failed is not None:
            return
        theirs = is_of_others(error)
        self._failed = (f"{type(error).__name__}: {first_line(error)}"[:300], theirs, time.monotonic())
        self._courier.curious = True
        self._courier.hurry()
        if self._count > 1 and theirs:
            _log.info("the work ended with an error; is another process the cause?", exc_info=error)
            self._wake.set()
            self._cleared.wait(4 * MOMENT)

    # What this process says of itself.

    def _limit(self, phase: Phase) -> tuple[float | None, str]:
        """Seconds that a phase may take, and the key with its value."""
        if phase.limit == "start":
            return self._start_limit, f"distributed.start_timeout={self._start_limit}"
        seconds = getattr(self._limits, phase.limit)
        median = here.median() if phase.limit == "step" else None
        if seconds is not None and median is not None and median * self._limits.step_times > seconds:
            return median * self._limits.step_times, f"watchdog.step_times={self._limits.step_times:g}"
        return seconds, f"watchdog.{phase.limit}={seconds}"

    def _status(self, beat: int) -> Status:
        now = time.monotonic()
        phase, *behind = here.phases
        limit, key = self._limit(phase)
        slow, waits = "", False
        for other in behind:
            allowed, its_key = self._limit(other)
            if allowed is not None and now - other.since > allowed:
                slow = (
                    f"a {other.name} in the background after step {here.step} for {now - other.since:.0f} s ({its_key})"
                )
                waits = waits_for_others()
        failed, theirs, _ = self._failed or ("", False, 0.0)
        return Status(
            rank=self._rank,
            host=self._host,
            beat=beat,
            step=here.step,
            phase=(here.failed_in if failed else "") or phase.name,
            seconds=round(now - phase.since, 1),
            waiting=here.waiting,
            limit=key if limit is not None else "",
            over=limit is not None and now - phase.since > limit,
            behind=slow,
            behind_waits=waits,
            failed=failed,
            theirs=theirs,
            ended=self._ended.is_set() and self._failed is None,
            machine=self._machine,
            pid=os.getpid(),
        )

    def _write_beat(self, leaving: bool = False) -> None:
        """Once a second, and the last one now."""
        if self._beats is None or (not leaving and time.monotonic() < self._beat_at + 1):
            return
        self._beat_at = time.monotonic()
        phase, now = here.phases[0], time.time()
        name, since = here.failed_in if leaving else phase.name, now - (time.monotonic() - phase.since)
        beat = Beat(self._rank, os.getpid(), self._host, here.step, name or phase.name, round(since, 3), now, leaving)
        with contextlib.suppress(OSError):
            write_beat(self._beats, beat)

    # What it makes of what it sees.

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._write_beat()
                self._look()
            except Exception:
                _log.exception("the watchdog stumbled, and goes on")
            self._wake.wait(LOOK_AGAIN)
            self._wake.clear()

    def _look(self) -> None:
        words = self._courier.words
        if "verdict" in words:
            self._ending.end(Verdict.read(words["verdict"]))
        self._heed_signals(words)
        mine = self._status(0)
        if self._failed is not None:
            self._look_for_the_cause(mine)
        elif self._count > 1:
            self._look_at_others()
        over = mine.over or bool(mine.behind)
        if not over:
            self._over_since = None
        elif self._over_since is None:
            self._over_since = time.monotonic()
            self._courier.curious = True
            self._courier.hurry()
        if self._rank == 0 or (over and time.monotonic() - (self._over_since or 0.0) > MOMENT):
            self._judge(mine)

    def _judge(self, mine: Status) -> None:
        if self._rank != 0 and self._courier.unanswered_for() > MOMENT:
            self._ending.end(lost(self._first_process(), "silent", "does not answer, and others wait for it"))
        statuses = {**self._courier.statuses, self._rank: mine}
        silent = [rank for rank in statuses if rank != self._rank and self._courier.silent_for(rank) > SILENT]
        verdict = judge(statuses, silent)
        if verdict is not None:
            self._ending.end(verdict)

    def _look_at_others(self) -> None:
        """Has another process been silent for too long, or failed where this one has not?"""
        if self._rank != 0:
            refused = self._courier.refused_since
            if self._courier.unanswered_for() > self._silence or (
                refused is not None and time.monotonic() - refused > 1.0
            ):
                what = "silent" if refused is None else "died"
                self._ending.end(lost(self._first_process(), what, "is gone: it answers nobody"))
            return
        for rank, status in self._courier.statuses.items():
            if status.ended or rank == self._rank:
                continue
            if self._is_dead(status):
                self._ending.end(lost(status, "died", "is gone"))
            if (quiet := self._courier.silent_for(rank)) > self._silence:
                evidence = f"has said nothing for {quiet:.0f} s (distributed.heartbeat_timeout={self._silence})"
                self._ending.end(lost(status, "silent", evidence))
            if status.failed and not status.theirs:
                since = self._failures.setdefault(rank, time.monotonic())
                if time.monotonic() - since > MOMENT:
                    self._ending.end(lost(status, "failed", f"failed ({status.failed}); its own output says more"))

    def _look_for_the_cause(self, mine: Status) -> None:
        """This process failed as it does where another one is lost: which one?"""
        assert self._failed is not None
        _, theirs, since = self._failed
        if self._count == 1 or not theirs:
            self._cleared.set()
            return
        waited = time.monotonic() - since
        if self._rank != 0 and (self._courier.refused_since or self._courier.unanswered_for() > MOMENT):
            self._ending.end(lost(self._first_process(), "died", "is gone: it answers nobody"))
        others = {rank: status for rank, status in self._courier.statuses.items() if rank != self._rank}
        for rank, status in sorted(others.items()):
            if status.failed and not status.theirs:
                self._ending.end(lost(status, "failed", f"failed ({status.failed}); its own output says more"))
            if not status.ended and (self._is_dead(status) or self._courier.silent_for(rank) > MOMENT):
                self._ending.end(lost(status, "died", "is gone: it says nothing any more"))
        if waited > 2 * MOMENT:
            self._cleared.set()

    def _is_dead(self, status: Status) -> bool:
        """Whether a process of this very machine is no more; of another one, only its silence tells."""
        return bool(status.machine) and status.machine == self._machine and not is_alive(status.pid)

    def _first_process(self) -> Status:
        return self._courier.statuses.get(0, Status(0, "its host", step=here.step, phase=here.phases[0].name))

    def _heed_signals(self, words: dict[str, str]) -> None:
        if self._told is None and self._signals.told:
            self._told = (self._signals.told, self._rank, self._signals.at)
            self._courier.say(f"preempt-{self._rank}", self._signals.told)
            self._tell_the_loop()
        if self._told is None and (known := sorted(key for key in words if key.startswith("preempt-"))):
            rank = int(known[0].removeprefix("preempt-"))
            self._told = (words[known[0]], rank, time.monotonic())
            self._tell_the_loop()
        if self._told is None or self._failed is not None:
            return
        waited = time.monotonic() - self._told[2]
        if self._request is None and (self._rank == 0 or waited > MOMENT):
            self._ending.end(self._leaving("before the first step, so there is nothing to save"))
        if waited > self._grace:
            newest = (
                "no checkpoint is complete"
                if self._saved is None
                else f"the newest checkpoint is of step {self._saved}"
            )
            self._ending.end(
                self._leaving(f"before a save was complete: grace_seconds={self._grace} have passed; {newest}")
            )

    def _tell_the_loop(self) -> None:
        assert self._told is not None
        name, rank, _ = self._told
        if self._rank == 0:
            self._ending.record("preempt", step=here.step, signal=name, rank=rank)
        if self._request is not None:
            self._request()

    def _leaving(self, words: str) -> Verdict:
        assert self._told is not None
        name, rank, _ = self._told
        text = f"told to leave by {name} to process {rank}; left {words}; the same command goes on"
        return Verdict(EXIT_REQUEUE, "preempted", text, rank, self._host, here.step, here.phases[0].name)
