"""Which checkpoints stay. The newest always does, whatever else is asked for."""

import logging
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.checkpoint.directory import delete, list_checkpoints, step_path
from jaxtrain.checkpoint.meta import Unreadable, read_meta
from jaxtrain.config import CheckpointConfig, KeepBestConfig
from jaxtrain.errors import CheckpointError
from jaxtrain.output import size_text

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """What retention knows of a checkpoint: its step, when it was saved, how it was evaluated."""

    step: int
    saved_at: float
    metrics: dict[str, float]


def superfluous(found: Sequence[Kept], rules: CheckpointConfig) -> list[int]:
    """The steps that no rule keeps; each rule looks at all that are there, so that one never undoes another."""
    rising = sorted(found, key=lambda checkpoint: checkpoint.step)
    kept = {checkpoint.step for checkpoint in rising[-rules.keep :]}
    if rules.keep_every is not None:
        kept |= {checkpoint.step for checkpoint in rising if checkpoint.step % rules.keep_every == 0}
    if rules.keep_every_hours is not None:
        kept |= set(_spaced(rising, rules.keep_every_hours * 3600))
    if rules.keep_best is not None:
        kept |= set(_best(rising, rules.keep_best))
    return [checkpoint.step for checkpoint in rising if checkpoint.step not in kept]


def _spaced(rising: Sequence[Kept], seconds: float) -> Iterator[int]:
    """The first, and each that was saved at least so long after the last of these: what is kept once is kept for ever.

    The first stays though it is old, since without it the second could lose its place to a third.
    """
    last = -math.inf
    for checkpoint in rising:
        if checkpoint.saved_at >= last + seconds:
            last = checkpoint.saved_at
            yield checkpoint.step


def _best(rising: Sequence[Kept], rule: KeepBestConfig) -> list[int]:
    """Of equals, the earlier one is better. One that was not evaluated is never among the best."""
    sign = 1 if rule.mode == "min" else -1
    judged = [checkpoint for checkpoint in rising if rule.metric in checkpoint.metrics]
    judged.sort(key=lambda checkpoint: sign * checkpoint.metrics[rule.metric])
    return [checkpoint.step for checkpoint in judged[: rule.count]]


class Retention:
    """Deletes what the rules of a run no longer keep; used by one thread of one process at a time."""

    def __init__(self, directory: Path, rules: CheckpointConfig):
        self._directory = directory
        self._rules = rules
        self._known: dict[int, Kept] = {}

    def apply(self) -> None:
        """To be called when a save is complete. A deletion that fails is logged, and tried again the next time."""
        steps = list_checkpoints(self._directory).steps
        found = [kept for step in steps if (kept := self._describe(step)) is not None]
        for step in superfluous(found, self._rules):
            try:
                delete(step_path(self._directory, step))
            except OSError as error:
                _log.warning("%s can't be deleted: %s", step_path(self._directory, step), error)

    def warn_of_small_disk(self, size: int) -> None:
        """Logs where checkpoints of `size` bytes won't fit, before the first one is due.

        One more than `keep` are there while one is written; those kept for ever are not counted.
        """
        missing = max(0, self._rules.keep - len(list_checkpoints(self._directory).steps)) + 1
        free = shutil.disk_usage(self._directory).free
        if free < missing * size:
            _log.warning(
                "%s has %s free, and %d more checkpoints of %s each will not fit; free some space, or lower "
                "checkpoint.keep=%d", self._directory, size_text(free), missing, size_text(size), self._rules.keep,
            )  # fmt: skip

    def forget(self, step: int) -> None:
        """A checkpoint that somebody else has deleted; its step may be saved anew."""
        self._known.pop(step, None)

    def _describe(self, step: int) -> Kept | None:
        """None for one that can't be described: it counts for nothing and is not deleted."""
        if step not in self._known:
            try:
                meta = read_meta(self._directory, step)
            except (Unreadable, CheckpointError):
                return None
            self._known[step] = Kept(step, meta.saved_at, meta.metrics)
        return self._known[step]
