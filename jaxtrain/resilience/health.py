"""The health of a run's devices: probed by the loop every so many steps, told and judged by a thread beside it.

Each process runs its own probe, in which nobody else has a part, and puts its numbers on the channel; process 0 reads
all of them and judges. The loop waits for its own devices and for nobody else's numbers.
"""

import contextlib
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import jax

from jaxtrain.config import HealthConfig
from jaxtrain.resilience.channel import Channel, Unreachable
from jaxtrain.resilience.exclusion import exclude
from jaxtrain.resilience.judge import REPEATED, Finding, Judge, Probed, Report
from jaxtrain.resilience.probe import Probe
from jaxtrain.telemetry.timeline import Timeline

FOLDER = "health"
"""On the channel, one text a process."""
SLOWEST_REPORT = 60
"""Seconds that process 0 waits for the numbers of all ranks before it judges by those that are there."""
SHORTEST_POLL, LONGEST_POLL = 0.02, 1.0
_MOST_DOUBLINGS = 20

_log = logging.getLogger(__name__)


class Health:
    """Probes this process's devices; on process 0, tells what is found about those of all.

    Args:
        found: called with each finding and what is done about it (`warn` or `stop`), from another thread.
        stop: asks the run to save and to end without the bad host, from another thread.
        excluded: the list that a bad host is put on before.
    """

    def __init__(
        self,
        config: HealthConfig,
        probe: Probe,
        channel: Channel,
        timeline: Timeline,
        found: Callable[[Finding, str], None],
        stop: Callable[[], None],
        excluded: Path,
    ):
        self._config = config
        self._probe = probe
        self._channel = channel
        self._timeline = timeline
        self._found = found
        self._stop = stop
        self._excluded = excluded
        self._steps = 0
        self._probes: deque[Probed] = deque(maxlen=REPEATED)
        self._cost = 0.0
        self._changed = threading.Condition()
        self._waiting: Report | None = None
        self._closed = False
        self._judge = Judge(config, jax.process_count()) if jax.process_index() == 0 else None
        self._teller = threading.Thread(target=self._tell, name="health", daemon=True)
        self._teller.start()

    def due(self) -> bool:
        """Whether the step that was dispatched, one for each call, is one to probe after.

        Every `every` steps, or twice, four times … as rarely, until probes take `share` of the time at most. Processes
        whose clocks differ may differ in that, but the rarer probes are then among the others' too.
        """
        self._steps += 1
        every = self._config.every
        if self._steps % every:
            return False
        enough = self._cost / self._config.share
        doublings = math.ceil(math.log2(max(1.0, enough / max(every * self._timeline.step_seconds, 1e-9))))
        return self._steps % (every * 2 ** min(doublings, _MOST_DOUBLINGS)) == 0

    def probe(self, step: int) -> float:
        """Runs the probe after the last computed step; nothing may be in flight on the devices.

        Returns:
            Seconds that it took.
        """
        began = time.perf_counter()
        results = self._probe()
        self._cost = time.perf_counter() - began
        seconds = [round(result.seconds, 7) for result in results]
        wrong = [list(result.wrong) for result in results]
        shares = {name: round(share, 4) for name, share in self._timeline.shares().items()}
        self._probes.append(Probed(self._steps, step, seconds, wrong, shares["data"], shares["host"]))
        self._timeline.probed(max(seconds))
        devices = [f"{device.platform}:{device.id}" for device in self._probe.devices]
        kinds = [device.device_kind for device in self._probe.devices]
        with self._changed:
            self._waiting = Report(socket.gethostname(), devices, kinds, list(self._probes))
            self._changed.notify_all()
        return self._cost

    def close(self) -> None:
        """Judges what there is, and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._teller.join(timeout=5)

    def _tell(self) -> None:
        while (report := self._next_report()) is not None:
            try:
                self._channel.put(f"{FOLDER}/{jax.process_index()}", report.encode())
                if self._judge is not None:
                    self._act_on(self._judge, report.probes[-1].number)
            except Unreachable as error:
                _log.info("probe not told: %s", error)

    def _next_report(self) -> Report | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._closed)
            report, self._waiting = self._waiting, None
            return report

    def _act_on(self, judge: Judge, number: int) -> None:
        """Waits until all ranks have told of a probe, a newer one is there, or it has taken too long; then judges."""
        poll, waited = SHORTEST_POLL, 0.0
        while True:
            texts = self._channel.get_all(FOLDER)
            reports = {int(rank): Report.decode(text) for rank, text in texts.items()}
            late = jax.process_count() - sum(report.probes[-1].number >= number for report in reports.values())
            with self._changed:
                if not late or waited > SLOWEST_REPORT or self._waiting is not None or self._closed:
                    break
                self._changed.wait(poll)
            poll, waited = min(2 * poll, LONGEST_POLL), waited + poll
        for finding in judge.hear(reports):
            self._act(finding)

    def _act(self, finding: Finding) -> None:
        stops = finding.is_bad_host and self._config.policy == "stop"
        self._found(finding, "stop" if stops else "warn")
        if stops:
            with contextlib.suppress(OSError):  # the event names it too, and the run must not go on with it
                exclude(
                    self._excluded,
                    host=finding.host,
                    rank=finding.rank,
                    device=finding.device or "",
                    reason=finding.detail,
                    step=finding.step,
                )
            self._stop()
