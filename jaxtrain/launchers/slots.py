"""The places where processes of a run can be, and which of them are lost.

A slot is what one process needs: its share of a host's devices. `RUN/excluded.json` names bad ones: a list of objects
with `host` and `rank` (or `slot`) and `reason`, as the run writes it, or a person. Where a line is taken out again, the
slot is back at the next start.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.files import read_json


@dataclass(frozen=True)
class Lost:
    """A slot that no process may be started in, and why."""

    slot: int
    reason: str


class Slots:
    """All slots of one host.

    Args:
        count: how many there are, spares included.
        excluded: the file that names bad ones.
        host: this host; what the file says of others is not ours.
    """

    def __init__(self, count: int, excluded: Path, host: str):
        self._count = count
        self._file = excluded
        self._host = host
        self._known: dict[str, Lost] = {}
        self._excluded: dict[str, Lost] = {}
        self._failures: tuple[int, int] | None = None
        self._resting: int | None = None

    def refresh(self, ranks: Sequence[int]) -> list[Lost]:
        """Reads the file again; returns what is lost since the last time.

        Args:
            ranks: the slot of each rank of the newest attempt, to which a line that is new refers.

        Raises:
            ValueError: the file can't be read.
        """
        entries = self._entries()
        before, self._excluded = set(self._excluded), {}
        for entry in entries:
            key = json.dumps(entry, sort_keys=True)
            if key not in self._known and (slot := self._slot(entry, ranks)) is not None:
                self._known[key] = Lost(slot, str(entry.get("reason", "no reason given")))
            if key in self._known:
                self._excluded[key] = self._known[key]
        return [lost for key, lost in self._excluded.items() if key not in before]

    def failed_to_start(self, slot: int) -> bool:
        """A process in this slot was the first to end, before any step; whether that was twice in a row.

        If so, the slot is left out of the next start, and tried again in the one after.
        """
        count = self._failures[1] + 1 if self._failures is not None and self._failures[0] == slot else 1
        self._failures = (slot, count)
        if count < 2:
            return False
        self._failures, self._resting = None, slot
        return True

    def started(self) -> None:
        """The processes of an attempt have finished a step."""
        self._failures = None

    def take(self, most: int, least: int) -> list[int]:
        """Up to `most` slots for the next start, the first that aren't lost.

        One that failed to start is among them only if fewer than `least` would be left.
        """
        resting, self._resting = self._resting, None
        rested = [slot for slot in self.available if slot != resting]
        return (rested if len(rested) >= least else self.available)[:most]

    @property
    def available(self) -> list[int]:
        """The slots that aren't excluded."""
        excluded = {lost.slot for lost in self._excluded.values()}
        return [slot for slot in range(self._count) if slot not in excluded]

    @property
    def excluded(self) -> list[Lost]:
        """What the file excludes."""
        return list(self._excluded.values())

    def _entries(self) -> list[dict[str, Any]]:
        try:
            entries = read_json(self._file)
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._file}: can't be read ({error})") from error
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError(f"{self._file}: is no list of objects with host, rank and reason")
        return [entry for entry in entries if entry.get("host") in (None, self._host)]

    def _slot(self, entry: dict[str, Any], ranks: Sequence[int]) -> int | None:
        slot, rank = entry.get("slot"), entry.get("rank")
        if type(slot) is int and 0 <= slot < self._count:
            return slot
        return ranks[rank] if type(rank) is int and 0 <= rank < len(ranks) else None
