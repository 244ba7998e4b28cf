"""Events of runs that never were, written by hand."""

from pathlib import Path
from typing import Any

from jaxtrain.telemetry.jsonl import encode


class Timeline:
    """Events at seconds of a clock that begins at a million."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def at(self, time: float, kind: str, process: int = 0, **fields: Any) -> "Timeline":
        """Adds an event."""
        self.events.append({"time": 1e6 + time, "kind": kind, "process": process, **fields})
        return self

    def start(self, time: float, step: int, seconds: float = 5.0) -> "Timeline":
        """A start that takes five seconds, a compile of ten, and a restore of two where there is something to restore:
        its first step begins at `time` + 17 (15 where it restores nothing)."""
        self.at(time + seconds, "start", step=step, steps=100, seconds=seconds)
        self.at(time + seconds + 10, "compile", what="train_step", seconds=10.0)
        if step:
            self.at(time + seconds + 12, "restore", step=step, position=8 * step, seconds=2.0)
        return self

    def progress(self, time: float, step: int, steps: int, seconds: float, wait: float = 0.0) -> "Timeline":
        """`steps` steps up to `step`, read at `time`."""
        return self.at(time, "progress", step=step, steps=steps, seconds=seconds, data_wait=wait)

    def save(self, time: float, step: int, seconds: float, stall: float) -> "Timeline":
        """A save that was complete at `time`."""
        return self.at(time, "save", step=step, seconds=seconds, stall=stall)

    def written(self, path: Path) -> Path:
        """The events as a file, with a last line that a crash tore."""
        path.write_text("".join(encode(event) for event in self.events) + '{"time": 17, "ki')
        return path


def killed_twice() -> Timeline:
    """Three starts. The first dies without a word, the second by a fault that a supervisor sees, the third completes.

    Steps take a second. Step 20 is saved by the first, 30 by the second: steps 21 to 25 and 31 to 34 are done again.
    """
    run = Timeline().start(0, 0)
    run.progress(16, 1, 1, 1.0, 0.5).progress(25, 10, 9, 9.0).progress(35, 20, 10, 10.0, 1.0)
    run.save(40, 20, 4.9, 0.4).progress(40.4, 25, 5, 5.0)
    run.at(50, "launch", -1, attempt=2, processes=2, seconds=0.5).start(50, 20)
    run.progress(68, 21, 1, 1.0).progress(77, 30, 9, 9.0).at(80, "eval", step=30, loss=3.0, seconds=3.0)
    run.save(81.2, 30, 1.2, 0.2).progress(84.2, 34, 4, 4.0)
    run.at(86, "fault", -1, what="died", rank=1, step=35, seen_after=0.3, exit_code=-9)
    run.at(87, "restart", -1, attempt=3, processes=2, wait=2.0)
    run.at(89.5, "launch", -1, attempt=3, processes=2, seconds=0.5).start(90, 30)
    run.progress(108, 31, 1, 1.0).progress(117, 40, 9, 9.0).save(119, 40, 2.0, 0.5)
    return run.at(119.1, "stop", step=40, reason="complete", exit_code=0)
