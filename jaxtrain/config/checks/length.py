"""What schedule, ramp and profile must satisfy for a run of so many steps."""

from collections.abc import Iterator

from jaxtrain.config.checks.problems import Problem, valued
from jaxtrain.config.optimizer import StableSchedule
from jaxtrain.config.schema import Config


def check_length(config: Config) -> Iterator[Problem]:
    if config.steps is None and config.data.epochs is None:
        yield Problem(
            ("steps", "data.epochs"),
            "the run has no end: steps=null and data.epochs=null; set steps, or data.epochs to let the data set it",
        )


def check_reference(config: Config) -> Iterator[Problem]:
    scaling, reference = config.optimizer.batch_scaling, config.optimizer.reference_batch
    keys = ("optimizer.batch_scaling", "optimizer.reference_batch")
    if scaling != "none" and reference is None:
        yield Problem(
            keys,
            f"optimizer.batch_scaling={scaling} needs optimizer.reference_batch: the examples per update that "
            f"optimizer.learning_rate was chosen for (global_batch={config.global_batch} would change nothing)",
        )
    if scaling == "none" and reference is not None:
        yield Problem(
            keys,
            f"optimizer.reference_batch={reference} does nothing with optimizer.batch_scaling=none; "
            f"set batch_scaling to linear or sqrt, or leave reference_batch out",
        )


def check_length_of_parts(config: Config, steps: int | None) -> Iterator[Problem]:
    yield from _schedule(config, steps)
    ramp = sum(part.steps for part in config.batch_ramp)
    if steps is not None and ramp >= steps:
        yield Problem(
            ("batch_ramp", "steps"),
            f"batch_ramp takes {ramp} steps of the run, steps={steps}, so global_batch={config.global_batch} is never "
            f"reached; its parts may have at most {steps - 1} steps together",
        )


def _schedule(config: Config, steps: int | None) -> Iterator[Problem]:
    schedule, key = config.optimizer.schedule, "optimizer.schedule"
    if schedule.warmup and schedule.warmup_tokens is not None:
        keys = (f"{key}.warmup", f"{key}.warmup_tokens")
        yield Problem(keys, f"{valued(config, keys)}: the warm-up has one length; leave one of them out")
        return
    if schedule.warmup_tokens is not None and config.sequence is None:
        yield Problem(
            (f"{key}.warmup_tokens", "data.kind"),
            f"{key}.warmup_tokens={schedule.warmup_tokens} needs the length of a row, and data.kind={config.data.kind} "
            f"gives none; set {key}.warmup in steps",
        )
        return
    if steps is None or (config.optimizer.batch_scaling != "none" and config.optimizer.reference_batch is None):
        return
    name = f"{key}.warmup" if schedule.warmup_tokens is None else f"{key}.warmup_tokens"
    warmup = config.warmup_steps
    meaning, limit = valued(config, (name,)), f"be at most {steps}"
    if warmup != schedule.warmup:
        meaning, limit = f"{meaning} ({warmup} steps here)", f"take at most {steps} steps"
    if warmup > steps:
        yield Problem((name, "steps"), f"{meaning} is longer than the run, steps={steps}; it may {limit}")
    elif isinstance(schedule, StableSchedule) and warmup + schedule.decay_steps(steps) > steps:
        yield Problem(
            (name, f"{key}.decay", "steps"),
            f"{meaning} and {key}.decay={schedule.decay} ({schedule.decay_steps(steps)} steps) are together longer "
            f"than the run, steps={steps}; the decay may have at most {steps - warmup} steps",
        )


def check_profile_starts(config: Config) -> Iterator[Problem]:
    steps = config.profile.steps
    if config.profile.start is None and steps != type(config.profile).model_fields["steps"].default:
        yield Problem(
            ("profile.steps", "profile.start"),
            f"profile.steps={steps} does nothing with profile.start=null; set profile.start, or leave steps out",
        )


def check_profile(config: Config, steps: int | None) -> Iterator[Problem]:
    start, count = config.profile.start, config.profile.steps
    if start is not None and steps is not None and start + count - 1 > steps:
        fitting = f"profile.start may be at most {steps - count + 1}" if count <= steps else f"the run has {steps}"
        yield Problem(
            ("profile.start", "profile.steps", "steps"),
            f"profile.start={start} with profile.steps={count} is a window up to step {start + count - 1}, but the "
            f"run ends at step {steps}; {fitting}",
        )
