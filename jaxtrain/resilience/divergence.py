"""Whether a run has lost its way for good: a loss that stays far above what it had been."""

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from jaxtrain.errors import DivergedError

_FIRST, _SMOOTHED = 8, 32
"""Losses whose median is the level that the run began at, and the one that it has now."""
_NORMAL_MAD = 1.4826


class Divergence:
    """Watches the losses of applied updates.

    The bound is the best level so far plus half of what was learned until then, or plus the spikes' threshold times the
    noise or a tenth where that is more; one and a half times the first level is always too much. A run whose every loss
    of `after` steps lies above it has diverged. A spike that comes down again, a harder part of the data and a noisy
    loss that learns little don't do that.

    Args:
        after: steps in a row; 0: never.
        threshold: robust deviations.
        saved: what `state` returned.
    """

    def __init__(self, after: int, threshold: float, saved: Mapping[str, Any]):
        self._after = after
        self._threshold = threshold
        self._recent = deque((float(loss) for loss in saved.get("recent", ())), maxlen=_SMOOTHED)
        self._first: float | None = saved.get("first")
        self._best: float | None = saved.get("best")
        self._noise = float(saved.get("noise", 0.0))
        self._above = int(saved.get("above", 0))

    def state(self) -> dict[str, Any]:
        """All that later judgements depend on, as plain data."""
        return {
            "recent": list(self._recent),
            "first": self._first,
            "best": self._best,
            "noise": self._noise,
            "above": self._above,
        }

    def take(self, step: int, loss: float) -> None:
        """The loss of an update that was applied.

        Raises:
            DivergedError: the run has diverged.
        """
        self._recent.append(loss)
        if self._first is None and len(self._recent) >= _FIRST:
            self._first = statistics.median(self._recent)
        if self._first is None or len(self._recent) < _SMOOTHED:
            return
        level = statistics.median(self._recent)
        noise = _NORMAL_MAD * statistics.median(abs(value - level) for value in self._recent)
        if self._best is None:
            self._best, self._noise = self._first, noise
        if level < self._best:
            self._best, self._noise = level, noise
        bound = self._bound(self._first, self._best, noise)
        self._above = self._above + 1 if loss > bound else 0
        if self._after and self._above >= self._after:
            raise DivergedError(
                f"step {step}: loss {loss:.4g}; it has been above {bound:.4g} for {self._above} steps "
                f"(spikes.diverged_after), began at {self._first:.4g} and had been down at {self._best:.4g}: the run "
                f"has diverged; go on from an earlier checkpoint with a lower optimizer.learning_rate"
            )

    def _bound(self, first: float, best: float, noise: float) -> float:
        lost = max((first - best) / 2, self._threshold * min(noise, self._noise), abs(best) / 10)
        return min(best + lost, first + abs(first) / 2)
