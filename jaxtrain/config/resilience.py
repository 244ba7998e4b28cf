"""What a run does about faults: a class for each part."""

from jaxtrain.config.base import Seconds, Section, setting


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
