"""What the keys of checkpoints must satisfy together."""

from collections.abc import Iterator

from jaxtrain.config.checkpoint import CheckpointConfig
from jaxtrain.config.checks.problems import Problem, multiples
from jaxtrain.config.schema import Config


def check_checkpoint(config: Config) -> Iterator[Problem]:
    yield from _interval(config.checkpoint)
    yield from _local(config.checkpoint)
    yield from _kept(config)


def _interval(rules: CheckpointConfig) -> Iterator[Problem]:
    rates = [name for name in ("failures_per_day", "failures_per_day_per_host") if getattr(rules, name) is not None]
    keys = tuple(f"checkpoint.{name}" for name in rates)
    if rules.interval is None:
        if rates:
            yield Problem(
                (*keys, "checkpoint.interval"),
                f"{', '.join(keys)}: nothing is chosen by it with checkpoint.interval=null; set checkpoint.interval "
                f"to auto, or leave it out",
            )
        return
    for name, off in (("every", 0), ("every_minutes", None)):
        if value := getattr(rules, name):
            yield Problem(
                ("checkpoint.interval", f"checkpoint.{name}"),
                f"checkpoint.interval={rules.interval} chooses when to save, which checkpoint.{name}={value} says too; "
                f"leave one out (checkpoint.{name}={'null' if off is None else off}, or checkpoint.interval=null)",
            )
    if len(rates) > 1:
        yield Problem(keys, f"{' and '.join(keys)} both say how often the run fails; leave one out")


def _local(rules: CheckpointConfig) -> Iterator[Problem]:
    local = rules.local
    if local is not None and not local.every and local.every_minutes is None:
        yield Problem(
            ("checkpoint.local", "checkpoint.local.every", "checkpoint.local.every_minutes"),
            "checkpoint.local is never saved to; set checkpoint.local.every_minutes, such as 5, or "
            "checkpoint.local.every, in steps",
        )


def _kept(config: Config) -> Iterator[Problem]:
    every, keep_every, best = config.checkpoint.every, config.checkpoint.keep_every, config.checkpoint.keep_best
    if keep_every is not None and (every == 0 or keep_every % every):
        nearest = multiples(keep_every, every) if every else "null"
        yield Problem(
            ("checkpoint.keep_every", "checkpoint.every"),
            f"checkpoint.keep_every={keep_every} names steps that checkpoint.every={every} doesn't save; "
            f"the nearest keep_every is {nearest}",
        )
    if best is not None and config.eval.every == 0:
        yield Problem(
            ("checkpoint.keep_best", "eval.every"),
            "checkpoint.keep_best has nothing to judge by with eval.every=0; set eval.every, or keep_best to null",
        )
    elif best is not None and (every == 0 or (config.eval.every % every and every % config.eval.every)):
        nearest = multiples(every, config.eval.every) if every else str(config.eval.every)
        yield Problem(
            ("checkpoint.keep_best", "checkpoint.every", "eval.every"),
            f"checkpoint.keep_best judges checkpoints by an evaluation at the same step, and checkpoint.every={every} "
            f"and eval.every={config.eval.every} don't fall together; the nearest checkpoint.every is {nearest}",
        )
