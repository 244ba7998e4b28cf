"""Carries word between the watchdogs of all processes, in a thread of its own: an answer may never come."""

import threading
import time
from collections.abc import Callable

from jaxtrain.resilience.channel import Channel, Unreachable
from jaxtrain.resilience.verdict import Status

_INTERVAL = 1.0


class Courier:
    """Tells once a second how this process is, and hears what the others say.

    Process 0 hears the statuses of all, the others only where `curious` is set: all asking for all would be too much of
    thousands of processes.

    Args:
        status: asked for what to tell, with a rising number.
    """

    def __init__(self, channel: Channel, rank: int, status: Callable[[int], Status]):
        self._channel = channel
        self._rank = rank
        self._status = status
        self._wake = threading.Condition()
        self._letters: dict[str, str] = {}
        self._stopped = False
        self.curious = rank == 0
        self.words: dict[str, str] = {}
        self.statuses: dict[int, Status] = {}
        self.heard_at: dict[int, float] = {}
        self.answered_at = time.monotonic()
        self.refused_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog-courier", daemon=True)

    def start(self) -> None:
        """From here on."""
        self._thread.start()

    def stop(self, patience: float = 2.0) -> None:
        """Tells how this process is once more, and rests."""
        with self._wake:
            self._stopped = True
            self._wake.notify()
        self._thread.join(patience)

    def say(self, key: str, text: str) -> None:
        """Puts a word where every process hears it; returns at once."""
        with self._wake:
            self._letters[key] = text
            self._wake.notify()

    def hurry(self) -> None:
        """Carries word now."""
        with self._wake:
            self._wake.notify()

    def silent_for(self, rank: int) -> float:
        """Seconds since anything new was heard of a process."""
        return time.monotonic() - self.heard_at.get(rank, self.answered_at)

    def unanswered_for(self) -> float:
        """Seconds since process 0 answered."""
        return time.monotonic() - self.answered_at

    def _run(self) -> None:
        beat, stopped = 0, False
        while not stopped:
            beat += 1
            with self._wake:
                stopped, letters, self._letters = self._stopped, self._letters, {}
            try:
                self._exchange(beat, letters)
                self.answered_at, self.refused_since = time.monotonic(), None
            except Unreachable:
                self.refused_since = self.refused_since or time.monotonic()
                with self._wake:
                    self._letters = letters | self._letters
            with self._wake:
                if not self._stopped and not self._letters:
                    self._wake.wait(_INTERVAL)
                elif self.refused_since:
                    self._wake.wait(_INTERVAL / 4)

    def _exchange(self, beat: int, letters: dict[str, str]) -> None:
        for key, text in letters.items():
            self._channel.put(f"word/{key}", text)
        self._channel.put(f"status/{self._rank}", self._status(beat).text())
        self.words = self._channel.get_all("word")
        if self.curious:
            statuses = self._channel.get_all("status")
        else:
            first = self._channel.get("status/0")
            statuses = {} if first is None else {"0": first}
        now = time.monotonic()
        for rank, text in statuses.items():
            status = Status.read(text)
            if status != self.statuses.get(int(rank)):
                self.heard_at[int(rank)] = now
            self.statuses[int(rank)] = status
