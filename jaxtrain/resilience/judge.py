"""What the probes and timelines of all ranks say: which device is bad, and who is held up by data or by the host.

Plain data in, findings out. Devices are judged by their probes alone, in which no other rank and no input has a part.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Self

import numpy as np

from jaxtrain.config import HealthConfig
from jaxtrain.resilience.stragglers import scores, slowdown

KEPT_PROBES = 64
REPEATED = 4
"""Probes that a report holds: one that comes late, or is read late, leaves no hole."""
HELD_UP = 0.2
"""Share of the time that a rank waits for data, or spends in its host beyond what others do, from which it is named."""
NAMED_AT_ONCE = 4


@dataclass(frozen=True)
class Probed:
    """One probe of one process.

    Attributes:
        number: steps dispatched since this start, alike on all processes: 0 is the probe before the first.
        seconds: of each device.
        wrong: of each device, the parts with a wrong checksum.
        data: share of the time since the probe before in which the loop waited for data.
        host: share in which this process itself was busy.
    """

    number: int
    step: int
    seconds: list[float]
    wrong: list[list[str]]
    data: float
    host: float


@dataclass(frozen=True)
class Report:
    """What a process tells of itself: host, devices with their kinds, and its last probes."""

    host: str
    devices: list[str]
    kinds: list[str]
    probes: list[Probed]

    def encode(self) -> str:
        """As a short text."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """From `encode`."""
        fields = json.loads(text)
        return cls(**fields | {"probes": [Probed(**probe) for probe in fields["probes"]]})


@dataclass(frozen=True)
class Finding:
    """Something that a person, or a launcher, should know.

    Attributes:
        device: the bad ones, such as `cuda:3`; None where it isn't about a device.
        what: `checksum`, `slow`, `data` or `host`.
        score: how much longer (0.3: 30 %), or the share of the time; None for a checksum, which is wrong or right.
        detail: in words.
    """

    rank: int
    host: str
    device: str | None
    what: str
    score: float | None
    step: int
    detail: str

    @property
    def is_bad_host(self) -> bool:
        """Whether the host should be left out; slow data may lie elsewhere."""
        return self.what in ("checksum", "slow")


class Judge:
    """Hears the reports of all ranks, again and again, and names each fault once, until it is over.

    Args:
        ranks: how many processes there are.
    """

    def __init__(self, config: HealthConfig, ranks: int):
        self._config = config
        self._ranks = ranks
        self._reports: dict[int, Report] = {}
        self._probes: dict[int, dict[int, Probed]] = {}
        self._named: set[tuple[str, int, str | None]] = set()

    def hear(self, reports: Mapping[int, Report]) -> list[Finding]:
        """The reports by rank; what was heard before may come again."""
        self._reports |= reports
        for rank, report in reports.items():
            for probe in report.probes:
                self._probes.setdefault(probe.number, {})[rank] = probe
        numbers = sorted(self._probes)
        for number in numbers[1 : -KEPT_PROBES + 1]:  # the start's is kept
            del self._probes[number]
        return [*self._wrong(reports), *self._slow(), *self._held_up("data"), *self._held_up("host")]

    def _wrong(self, reports: Mapping[int, Report]) -> list[Finding]:
        found = []
        for rank, report in sorted(reports.items()):
            for probe in report.probes:
                for device, parts in zip(report.devices, probe.wrong, strict=True):
                    if parts and self._is_new("checksum", rank, device):
                        detail = (
                            f"{device} computes wrong numbers: the checksum of its {' and its '.join(parts)} is not "
                            f"the known one, at step {probe.step}; take it out of service"
                        )
                        found.append(self._finding(rank, device, "checksum", None, probe.step, detail))
        return found

    def _slow(self) -> list[Finding]:
        rows = [(rank, device) for rank, report in sorted(self._reports.items()) for device in report.devices]
        kinds = [kind for _, report in sorted(self._reports.items()) for kind in report.kinds]
        table = self._table(rows)
        hosts, patience = len(self._reports), self._config.patience
        by_rank: dict[int, list[int]] = {}
        for row, score in enumerate(scores(table, self._config.threshold, kinds, hosts)):
            rank, device = rows[row]
            if score == 0:
                self._named.discard(("slow", rank, device))
            elif score >= patience and self._is_new("slow", rank, device):
                by_rank.setdefault(rank, []).append(row)
        excess = slowdown(table, kinds, patience)
        found = []
        for rank, slow in by_rank.items():
            device, longer = ", ".join(rows[row][1] for row in slow), float(max(excess[slow]))
            step = max(probe.step for probe in self._reports[rank].probes)
            detail = (
                f"{device} {'is' if len(slow) == 1 else 'are'} slow: a known computation takes {longer:.0%} longer "
                f"there than on the others, for {patience} probes up to step {step}"
            )
            found.append(self._finding(rank, device, "slow", longer, step, detail))
        return found

    def _table(self, rows: list[tuple[int, str]]) -> np.ndarray:
        numbers = sorted(self._probes)
        table = np.full((len(rows), len(numbers)), np.nan)
        place = {row: index for index, row in enumerate(rows)}
        for column, number in enumerate(numbers):
            for rank, probe in self._probes[number].items():
                for device, seconds in zip(self._reports[rank].devices, probe.seconds, strict=True):
                    table[place[rank, device], column] = seconds
        return table

    def _held_up(self, what: str) -> list[Finding]:
        """Ranks that wait for data, or whose host is busy while the others' are not, in each of the last probes."""
        found = []
        for rank, shares in self._shares(what).items():
            lasts = len(shares) == self._config.patience and min(shares) >= HELD_UP
            if not lasts:
                self._named.discard((what, rank, None))
            elif self._is_new(what, rank, None):
                share = median(shares)
                step = max(probe.step for probe in self._reports[rank].probes)
                found.append(self._finding(rank, None, what, share, step, _words(what, share)))
        worst = sorted(found, key=lambda finding: -(finding.score or 0))[:NAMED_AT_ONCE]
        if len(found) <= NAMED_AT_ONCE:
            return found
        others = f"; so it is with {len(found) - 1} other ranks"
        return [Finding(**asdict(worst[0]) | {"detail": worst[0].detail + others})]

    def _shares(self, what: str) -> dict[int, list[float]]:
        """Of each rank, in the last probes that all ranks told of; of a host, what it is above the others' median."""
        numbers = [number for number, probes in self._probes.items() if number and len(probes) == self._ranks]
        shares: dict[int, list[float]] = {rank: [] for rank in self._reports}
        for number in sorted(numbers)[-self._config.patience :]:
            probes = self._probes[number]
            usual = median(probe.host for probe in probes.values()) if what == "host" else 0.0
            if what == "host" and len(probes) == 2:
                usual = min(probe.host for probe in probes.values())
            for rank, probe in probes.items():
                if what == "data" or len(probes) > 1:
                    shares[rank].append(getattr(probe, what) - usual)
        return shares

    def _is_new(self, what: str, rank: int, device: str | None) -> bool:
        new = (what, rank, device) not in self._named
        self._named.add((what, rank, device))
        return new

    def _finding(
        self, rank: int, device: str | None, what: str, score: float | None, step: int, detail: str
    ) -> Finding:
        host = self._reports[rank].host
        rounded = None if score is None else round(score, 3)
        return Finding(rank, host, device, what, rounded, step, f"rank {rank} ({host}): {detail}")


def _words(what: str, share: float) -> str:
    if what == "data":
        return f"waits for data {share:.0%} of the time; look at its disk, its network and data.workers"
    return f"its own work takes {share:.0%} more of the time than that of other ranks; look what else runs there"
