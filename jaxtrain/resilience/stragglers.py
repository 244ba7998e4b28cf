"""Who is slow? A robust score of each device, from a table of probe times; plain arrays, no processes.

A device's time is held against the median of the *others* of its kind in the same probe, so that what slows all of them
alike, such as a warm room, counts for nothing, and one that is far off moves nobody else's score. Then the evidence of
successive probes is summed as in a CUSUM chart (Page, Biometrika 41, 1954): each probe counts from -1 to +1, whatever
its size, and the sum never falls below 0. So a single hiccup, however long, weighs one and is soon forgotten; what
lasts adds up.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

Table = Float64[np.ndarray, "devices probes"]
Scores = Float64[np.ndarray, " devices"]

FEW = 2
"""So few hosts can't tell who of them is usual: there, a slow one must also have grown slower itself."""
_WINDOW = 3
_NOISE = 1.8


def scores(times: Table, threshold: float, groups: Sequence[object], hosts: int) -> Scores:
    """How many probes' worth of evidence says that a device is slow: at `patience` of them, it is named.

    A probe counts +1 where the device took longer by `threshold` or more, 0 at half of that, -1 at the median of the
    others or below, and in between by the logarithm. Where probes scatter widely by themselves, as on a machine that
    others use too, `_NOISE` standard deviations stand for that half, and a probe counts so much less: what is lost in
    the noise is not named.

    Args:
        times: seconds; NaN where a probe wasn't heard of, which counts 0. The first column is the start's.
        threshold: such as 0.2 for a fifth longer.
        groups: what each device is compared within: its kind.
        hosts: how many there are; with `FEW`, a device's time must also have grown against its own best.
    """
    excess = _log_ratio(times, groups)
    if hosts <= FEW:
        excess = np.minimum(excess, _log_growth(times))
    wanted = np.log1p(threshold) / 2
    half = max(wanted, _NOISE * _scatter(excess))
    evidence = np.clip(excess / half - 1, -1.0, 1.0) * wanted / half
    evidence[np.isnan(evidence)] = 0.0
    score = np.zeros(len(times))
    for probe in evidence.T:
        score = np.maximum(0.0, score + probe)
    return score


def slowdown(times: Table, groups: Sequence[object], probes: int) -> Scores:
    """How much longer a device took than the others of its kind, over the last so many probes: 0.3 for 30 %."""
    with np.errstate(invalid="ignore"):
        return np.expm1(_median(_log_ratio(times, groups)[:, -probes:]))


def _log_ratio(times: Table, groups: Sequence[object]) -> Table:
    """Each time over the median of the others of its group in that probe; NaN where there are none."""
    logs = np.log(times)
    ratio = np.full(times.shape, np.nan)
    names = np.array([str(group) for group in groups])
    for name in set(names.tolist()):
        rows = np.flatnonzero(names == name)
        if len(rows) > 1:
            ratio[rows] = logs[rows] - _median_of_others(logs[rows])
    return ratio


def _median_of_others(values: Table) -> Table:
    """For each row, the median of the other rows' finite values in that column."""
    order = np.argsort(values, axis=0)  # NaN last
    ordered = np.take_along_axis(values, order, axis=0)
    place = np.argsort(order, axis=0)
    others = np.isfinite(values).sum(axis=0) - 1
    low, high = np.maximum((others - 1) // 2, 0), np.maximum(others // 2, 0)
    last = len(values) - 1

    def without_own(index: np.ndarray) -> Table:
        return np.take_along_axis(ordered, np.minimum(index + (place <= index), last), axis=0)

    return np.where(others > 0, (without_own(low) + without_own(high)) / 2, np.nan)


def _log_growth(times: Table) -> Table:
    """Each time over the device's own best until then: the lowest median of a few successive probes."""
    logs = np.log(times)
    before = np.pad(logs, ((0, 0), (_WINDOW - 1, 0)), constant_values=np.nan)
    medians = _median(np.lib.stride_tricks.sliding_window_view(before, _WINDOW, axis=1))
    return logs - np.fmin.accumulate(medians, axis=1)


def _scatter(excess: Table) -> float:
    """Standard deviation of a single probe, from the steps between successive ones, which what lasts doesn't widen."""
    steps = np.abs(np.diff(excess, axis=1))
    steps = steps[np.isfinite(steps)]
    return float(np.median(steps)) * 1.4826 / np.sqrt(2) if len(steps) else 0.0


def _median(values: np.ndarray) -> np.ndarray:
    """Of the finite values along the last axis; NaN where there are none."""
    ordered = np.sort(values, axis=-1)  # NaN last
    count = np.isfinite(values).sum(axis=-1, keepdims=True)
    low, high = np.maximum((count - 1) // 2, 0), np.minimum(count // 2, values.shape[-1] - 1)
    middle = (np.take_along_axis(ordered, low, axis=-1) + np.take_along_axis(ordered, high, axis=-1)) / 2
    return middle[..., 0]
