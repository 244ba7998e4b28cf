"""What is done when processes of a run have ended: start all again, or end. No process, file or clock is needed."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain import errors

FATAL = frozenset(
    {
        errors.EXIT_BAD_INPUT,
        errors.EXIT_NON_FINITE,
        errors.EXIT_BAD_CHECKPOINT,
        errors.EXIT_BAD_DATA,
        errors.EXIT_DIVERGED,
    }
)
"""Exit codes after which the same command would end the same way."""
ORDERLY = frozenset({errors.EXIT_COMPLETE, errors.EXIT_REQUEUE, errors.EXIT_INTERRUPTED, errors.EXIT_BAD_HOST})
"""Those of processes that all end together, by themselves, having saved."""
FOLLOWING = frozenset({errors.EXIT_MISSING_WORKER, errors.EXIT_LOST_PROCESS, -signal.SIGABRT, 128 + signal.SIGABRT})
"""Those of processes that end because another one did; JAX aborts them."""
FROM_OUTSIDE = frozenset({None, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP, -signal.SIGINT})
"""What somebody, or the kernel short of memory, does to a process; None: stopped, or silent for another reason."""

MOST_REPEATS = 3
"""So often a crash comes at the same step, one time after the other, until it counts as the run's own."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0


@dataclass(frozen=True)
class Ending:
    """How a process came to its end.

    Attributes:
        code: its exit code, or minus the signal that it died of; None: it is alive, and gives no sign of life.
        step: the last one that the run finished; None: unknown.
        phase: what the process did then, as its beat calls it; None: unknown.
        seen_after: seconds until this was seen, at most; for a silent process those of its silence.
    """

    rank: int
    code: int | None
    step: int | None = None
    phase: str | None = None
    seen_after: float = 0.0

    @property
    def what(self) -> str:
        """The word for events."""
        return "silent" if self.code is None else "died"

    def __str__(self) -> str:
        where = "" if self.step is None else f" after step {self.step}"
        doing = f" ({self.phase})" if self.phase else ""
        return f"rank {self.rank} {manner(self.code)}{where}{doing}"


@dataclass(frozen=True)
class Restart:
    """Start all again, after so many seconds."""

    wait: float


@dataclass(frozen=True)
class Stop:
    """End with this exit code; `reason` is empty where the processes have said it themselves."""

    code: int
    reason: str = ""


Decision = Restart | Stop


def manner(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "gave no sign of life"
    return f"died of {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def signal_name(number: int) -> str:
    """Such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first_cause(endings: Sequence[Ending]) -> Ending:
    """The one of the endings, in the order in which they were seen, that the others followed from."""
    causes = [ending for ending in endings if ending.code not in FOLLOWING]
    return (causes or list(endings))[0]


class Policy:
    """Remembers a run's failures, and decides after each.

    A restart is free to come as long as the run makes progress that lasts: each new checkpoint gives the whole budget
    back, and the first failure after one is followed by a restart at once. Without one, each wait is about twice as
    long as the one before, and the budget gets smaller.

    Args:
        restarts: the budget.
        seed: of the waits, which vary by half, so that runs which failed together don't start together.
    """

    def __init__(self, restarts: int, seed: int = 0):
        self._budget = self._left = restarts
        self._saved = 0
        self._random = random.Random(seed)
        self._last: Ending | None = None
        self._repeats = 0

    @property
    def left(self) -> int:
        """Restarts until the run must have made progress."""
        return self._left

    def decide(self, cause: Ending, *, saved: int, stepped: bool) -> Decision:
        """What to do after an attempt that ended with `cause`.

        Args:
            saved: the step of the newest checkpoint that is known.
            stepped: whether the attempt finished any step.
        """
        if cause.code in FATAL or cause.code in ORDERLY:
            assert cause.code is not None
            return Stop(cause.code)
        self._count(cause, stepped)
        if saved > self._saved:
            self._saved, self._left = saved, self._budget
        if self._repeats >= MOST_REPEATS:
            return Stop(
                errors.EXIT_REPEATED_CRASH,
                f"the same crash came {self._repeats} times at the same step: {cause}; another start would change "
                f"nothing",
            )
        if self._left == 0:
            return Stop(
                errors.EXIT_TOO_MANY_RESTARTS,
                f"{self._budget} restarts brought no new checkpoint: {cause}; --restarts allows more, and a shorter "
                f"checkpoint.every loses less",
            )
        used = self._budget - self._left
        self._left -= 1
        return Restart(self._wait(used))

    def _count(self, cause: Ending, stepped: bool) -> None:
        repeated = self._last is not None and _same(self._last, cause, stepped)
        self._repeats = self._repeats + 1 if repeated else 1
        self._last = cause

    def _wait(self, used: int) -> float:
        if used == 0:
            return 0.0
        return min(LONGEST_WAIT, FIRST_WAIT * 2.0 ** min(used - 1, 30)) * self._random.uniform(0.5, 1.0)


def _same(last: Ending, this: Ending, stepped: bool) -> bool:
    """Whether two crashes are one and the same.

    A step is known to one, since numbers are read one step late. Who kills from outside may do so at any moment of any
    start: only if the run came just as far, having finished steps, it is the run itself, such as its memory.
    """
    if last.code != this.code or last.step is None or this.step is None:
        return last.code == this.code and last.step == this.step and this.code not in FROM_OUTSIDE
    if this.code in FROM_OUTSIDE:
        return stepped and last.step == this.step
    return abs(last.step - this.step) <= 1
