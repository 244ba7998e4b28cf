"""Spikes of the loss and the gradient's norm, against a robust running scale.

What is usual says the window: the numbers of the last so many updates that were applied, without those of the latest
attempt. The loop reads a step's numbers while the next is computed already, so the limit of a step can't depend on the
one before; leaving that out always, the limit is a function of the attempts alone, and not of where the loop stood
still to save. All processes have the same numbers, and so the same limits; the window is saved and restored.

The scale of one side: the median absolute deviation, or the upper quantile where that is wider, so that a tail which
is usual (one batch in twenty) is no spike. A falling loss lies below its median and alarms nobody.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from jaxtrain.config.resilience import SpikePolicy, SpikesConfig
from jaxtrain.errors import DivergedError
from jaxtrain.resilience.divergence import Divergence

FEWEST = 64
"""Numbers without which nothing is judged; a smaller window has to be full."""
QUIET = 20
"""Steps beyond the last intervention after which the next is the first again."""

_NORMAL_MAD, _NORMAL_QUANTILE, _QUANTILE = 1.4826, 1.645, 0.95
_LOSS_FLOOR, _NORM_FLOOR = 0.01, 0.25
"""A deviation is never smaller than this share of the number, or a constant loss would alarm at its first change."""
_TINY = 1e-30
_SEVERITY: tuple[SpikePolicy, ...] = ("off", "warn", "skip", "rewind")


@dataclass(frozen=True)
class Numbers:
    """What a step gave, or what it may give at most."""

    loss: float
    grad_norm: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


UNLIMITED = Numbers(math.inf, math.inf)


@dataclass(frozen=True)
class Spike:
    """What was found at a step, and what its policy says.

    Attributes:
        over: which numbers were above their limit.
    """

    over: tuple[str, ...]
    action: Literal["warn", "skip", "rewind"]
    numbers: Numbers
    limits: Numbers

    def __str__(self) -> str:
        named = {"loss": "loss", "grad_norm": "gradient norm"}
        parts = [
            f"{named[name]} {getattr(self.numbers, name):.4g}, above {getattr(self.limits, name):.4g}"
            for name in self.over
        ]
        return " and ".join(parts)


class SpikeDetector:
    """Judges the numbers of each attempted step in turn; the same on every process.

    Args:
        saved: what `state` returned when the checkpoint was saved that the run goes on from; empty at its start.
    """

    def __init__(self, config: SpikesConfig, saved: Mapping[str, Any]):
        self._config = config
        pairs = [Numbers(*pair) for pair in saved.get("numbers", ())]
        self._numbers = deque(pairs, maxlen=config.window + 1)
        self._latest_applied = bool(saved.get("latest_applied", False))
        self._in_a_row = int(saved.get("in_a_row", 0))
        self._furthest = int(saved.get("furthest", 0))
        self._divergence = Divergence(config.diverged_after, config.threshold, saved.get("divergence", {}))

    def state(self) -> dict[str, Any]:
        """All that later judgements depend on, as plain data."""
        return {
            "numbers": [[numbers.loss, numbers.grad_norm] for numbers in self._numbers],
            "latest_applied": self._latest_applied,
            "in_a_row": self._in_a_row,
            "furthest": self._furthest,
            "divergence": self._divergence.state(),
        }

    def after_rewind(self, saved: Mapping[str, Any]) -> Self:
        """The detector of a checkpoint that the run goes back to, which remembers why it does."""
        return type(self)(self._config, {**saved, "in_a_row": self._in_a_row, "furthest": self._furthest})

    def limits(self, unread: int) -> Numbers:
        """The largest numbers that are no spike in the step that is dispatched now.

        Args:
            unread: steps that were dispatched and not taken yet, 0 or 1.
        """
        usual = list(self._numbers)
        if unread == 0 and self._latest_applied:
            usual.pop()
        usual = usual[-self._config.window :]
        if len(usual) < min(FEWEST, self._config.window):
            return UNLIMITED
        loss = norm = math.inf
        if self._config.loss != "off":
            loss = loss_limit([numbers.loss for numbers in usual], self._config.threshold)
        if self._config.grad_norm != "off":
            norm = norm_limit([numbers.grad_norm for numbers in usual], self._config.threshold)
        return Numbers(loss, norm)

    def take(self, step: int, numbers: Numbers, limits: Numbers, applied: bool) -> Spike | None:
        """Judges the numbers of an attempt at `step`, which `limits` were given.

        Raises:
            DivergedError: the loss stays far too high.
        """
        self._latest_applied = applied
        spike = self._spike(numbers, limits)
        if applied:
            self._numbers.append(numbers)
            if step >= self._furthest + QUIET:
                self._in_a_row = 0
            if spike is None or spike.action == "warn":
                self._divergence.take(step, numbers.loss)
        return spike

    def intervene(self, step: int, why: str) -> None:
        """Counts an intervention.

        Raises:
            DivergedError: it is one too many.
        """
        self._in_a_row += 1
        self._furthest = max(self._furthest, step)
        if self._in_a_row >= self._config.in_a_row:
            raise DivergedError(
                f"step {step}: {why}; {self._in_a_row} interventions without {QUIET} quiet steps between "
                f"(spikes.in_a_row), so single batches are not the cause; go on from an earlier checkpoint with a "
                f"lower optimizer.learning_rate, or look at the data from here on"
            )

    def pass_over(self) -> None:
        """An attempt that was not applied and has no numbers to judge."""
        self._latest_applied = False

    def _spike(self, numbers: Numbers, limits: Numbers) -> Spike | None:
        policies = {"loss": self._config.loss, "grad_norm": self._config.grad_norm}
        over = tuple(name for name in policies if getattr(numbers, name) > getattr(limits, name))
        if not over:
            return None
        action = max((policies[name] for name in over), key=_SEVERITY.index)
        if action == "off":  # the policy was another one when the step was dispatched
            return None
        return Spike(over, action, numbers, limits)


def loss_limit(losses: Sequence[float], threshold: float) -> float:
    """The largest loss that is no spike after these.

    Deviations are those of the loss or, where it is positive and that allows more, of its logarithm: a loss that is
    nearly learned has a tail over orders of magnitude.
    """
    linear = _limit(losses, threshold, _LOSS_FLOOR * abs(statistics.median(losses)))
    if min(losses) <= 0:
        return linear
    return max(linear, _exponential(_limit([math.log(loss) for loss in losses], threshold, _LOSS_FLOOR)))


def norm_limit(norms: Sequence[float], threshold: float) -> float:
    """The largest gradient norm that is no spike after these; deviations are those of its logarithm."""
    return _exponential(_limit([math.log(max(norm, _TINY)) for norm in norms], threshold, _NORM_FLOOR))


def upper_scale(values: Sequence[float], median: float) -> float:
    """The deviation upwards, that of a normal distribution's standard deviation where the values have one.

    At most a twentieth of the values, however large, changes it by little.
    """
    deviation = statistics.median(abs(value - median) for value in values)
    quantile = sorted(values)[min(int(_QUANTILE * len(values)), len(values) - 1)]
    return max(_NORMAL_MAD * deviation, (quantile - median) / _NORMAL_QUANTILE)


def _limit(values: Sequence[float], threshold: float, floor: float) -> float:
    median = statistics.median(values)
    return median + threshold * max(upper_scale(values, median), floor)


def _exponential(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
