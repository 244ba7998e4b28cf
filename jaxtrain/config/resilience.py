"""What a run does about faults: one section a kind of fault."""

from typing import Literal

from jaxtrain.config.base import Count, Seconds, Section, setting

SpikePolicy = Literal["off", "warn", "skip", "rewind"]


class SpikesConfig(Section):
    """What happens where the loss or the gradient's norm is far above what it was in the steps before."""

    loss: SpikePolicy = setting(
        "warn",
        "A spike of the loss is ignored; told; its update not applied; or the run goes back to a checkpoint from "
        "before it and passes over the data.",
        may_change=True,
    )
    grad_norm: SpikePolicy = setting("warn", "The same for the norm of the gradient.", may_change=True)
    window: Count = setting(100, "Steps whose numbers say what is usual.", may_change=True, ge=8, le=10_000)
    threshold: float = setting(
        10.0, "Robust deviations above the running median that make a spike.", may_change=True, gt=0
    )
    in_a_row: Count = setting(
        10, "Updates skipped for spikes, and rewinds, without 20 quiet steps between that end the run.",
        may_change=True, gt=0,
    )  # fmt: skip
    rewind_back: Count = setting(
        100, "A rewind goes to the newest checkpoint that is so many steps before the spike.", may_change=True, ge=1
    )
    rewind_over: Count = setting(100, "Batches behind the spike that a rewind passes over too.", may_change=True, ge=0)
    diverged_after: Count = setting(
        200, "Steps in a row without half of what the run had learned that end it; 0: never.", may_change=True, ge=0
    )


class WatchdogConfig(Section):
    """How long each part of a run may make no progress before it is stuck, in seconds; null: for ever."""

    prepare: Seconds | None = setting(
        3600, "To open the data set, which may have to be prepared first.", may_change=True, gt=0
    )
    compile: Seconds | None = setting(3600, "To compile one program.", may_change=True, gt=0)
    restore: Seconds | None = setting(1800, "To read a checkpoint and verify it.", may_change=True, gt=0)
    step: Seconds | None = setting(300, "For a step, at least; the first one too.", may_change=True, gt=0)
    step_times: float = setting(20.0, "For a step, so many times the median of the last ones.", may_change=True, ge=1)
    data: Seconds | None = setting(600, "To wait for a batch.", may_change=True, gt=0)
    eval: Seconds | None = setting(600, "For a batch of an evaluation.", may_change=True, gt=0)
    save: Seconds | None = setting(1800, "To write a checkpoint.", may_change=True, gt=0)


class HealthConfig(Section):
    """A short known computation on each device, timed, and its result checked."""

    policy: Literal["off", "warn", "stop"] = setting(
        "warn",
        "Of a device that computes wrong numbers or stays slow: name it, or also save, exclude its host and end with "
        "exit code 14; off: no probes.",
        may_change=True,
    )
    every: Count = setting(5, "Steps between probes, at least.", may_change=True, gt=0)
    share: float = setting(
        0.01,
        "Most of the time that probes may take; where steps are short, they come twice, four times … as rarely.",
        may_change=True, gt=0, le=1,
    )  # fmt: skip
    threshold: float = setting(
        0.2, "A device is slow that takes so much longer than the others: 0.2 is a fifth.", may_change=True, gt=0
    )
    patience: Count = setting(4, "Probes for which it must stay so.", may_change=True, gt=0, le=32)
