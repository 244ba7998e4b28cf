"""The section `checkpoint`: what is saved, where and how often, and what is deleted again."""

from collections.abc import Mapping
from typing import Literal

from pydantic import model_validator

from jaxtrain.config.base import Count, LocalPath, Seconds, Section, setting


class KeepBestConfig(Section):
    """Checkpoints that are kept because they were evaluated best."""

    count: Count = setting(1, "How many.", may_change=True, gt=0)
    metric: str = setting("eval_loss", "Judged by this one of the evaluation's metrics.", may_change=True)
    mode: Literal["min", "max"] = setting("min", "Whether the smallest or the largest is best.", may_change=True)


class LocalCheckpointConfig(Section):
    """Checkpoints on each host's own disk, beside the others: each process's part, with a copy on another host."""

    dir: LocalPath = setting(..., "Directory on a disk of the host itself; may differ between hosts.", may_change=True)
    every: Count = setting(0, "Steps between these saves; 0: none by steps.", may_change=True, ge=0)
    every_minutes: float | None = setting(
        None, "Also when this time has passed since the last save of any kind; null: not.", may_change=True, gt=0
    )


class CheckpointConfig(Section):
    """What is saved, where and how often, and what is deleted again."""

    every: Count = setting(
        100,
        "Steps between saves; 0, as where interval is given: only the final step, saved always.",
        may_change=True,
        ge=0,
    )
    every_minutes: float | None = setting(
        None, "Also saved when this time has passed since the last save began; null: not.", may_change=True, gt=0
    )
    interval: Literal["auto"] | None = setting(
        None,
        "In place of every and every_minutes: as often as loses least time, from what a save costs and how often the "
        "run fails; null: not.",
        may_change=True,
    )
    failures_per_day: float | None = setting(
        None, "How often the run is expected to fail, for interval; null: as observed.", may_change=True, gt=0
    )
    failures_per_day_per_host: float | None = setting(
        None, "The same, of one host, times the run's hosts; null: as observed.", may_change=True, gt=0
    )
    patience: Seconds = setting(
        10,
        "Seconds that the loop waits for a save that still runs when the next one is due, which else is left out.",
        may_change=True,
        ge=0,
    )
    local: LocalCheckpointConfig | None = setting(
        None, "Also saved to each host's own disk, with copies on other hosts; null: not.", may_change=True
    )
    dir: LocalPath | None = setting(None, "Directory of the checkpoints; null: run_dir/checkpoints.", may_change=True)
    keep: Count = setting(3, "Newest checkpoints that are kept.", may_change=True, gt=0)
    keep_every: Count | None = setting(
        None, "Also kept, for ever: those of each so many steps; null: none.", may_change=True, gt=0
    )
    keep_every_hours: float | None = setting(
        None,
        "Also kept, for ever: the first, and each saved so long after the one kept before; null: none.",
        may_change=True,
        gt=0,
    )
    keep_best: KeepBestConfig | None = setting(
        None, "Also kept: the best by an evaluation at the step of the save; null: none.", may_change=True
    )

    @model_validator(mode="before")
    @classmethod
    def _interval_alone(cls, values: object) -> object:
        """Where `interval` is given, `every` is 0 unless it is given too, which is refused."""
        if isinstance(values, Mapping) and values.get("interval") is not None:
            return {"every": 0, **values}
        return values
