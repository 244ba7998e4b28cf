"""What several keys must satisfy together, in one place; limits on a single key stand in the schema.

`check` needs the configuration alone. `check_layout` repeats what depends on the mesh once its sizes are known on real
devices, and `check_steps` what depends on the length of the run once the data has set it. Every problem names the keys,
their values and the nearest values that are right.
"""

from collections.abc import Iterator, Mapping

from jaxtrain.config.checks.data import check_data, check_eval_sets, check_sets_are_evaluated
from jaxtrain.config.checks.layout import BATCH_AXES, check_distributed, check_mesh, check_parts, resolve_mesh
from jaxtrain.config.checks.length import (
    check_length,
    check_length_of_parts,
    check_profile,
    check_profile_starts,
    check_reference,
)
from jaxtrain.config.checks.model import check_model, check_pair, check_remat
from jaxtrain.config.checks.problems import Problem, multiples, raise_problems
from jaxtrain.config.schema import Config

__all__ = ["BATCH_AXES", "check", "check_layout", "check_steps", "resolve_mesh"]


def check(config: Config, origins: Mapping[str, str] | None = None, *, for_training: bool = True) -> None:
    """Raise ConfigError if the keys contradict each other on any number of devices.

    Args:
        for_training: also if batches don't divide over the mesh, or keys would do nothing; another command has other
            batches, and may use those keys.
    """
    sizes = {axis: size for axis, size in config.mesh if size >= 1}
    problems = [
        *check_model(config),
        *check_pair(config),
        *check_length(config),
        *check_remat(config),
        *check_reference(config),
        *check_length_of_parts(config, config.steps),
        *check_profile(config, config.steps),
        *check_mesh(config.mesh),
        *check_data(config),
        *_checkpoint(config),
        *check_eval_sets(config),
        *check_distributed(config),
        *check_parts(config, sizes, batches=for_training),
    ]
    if for_training:
        problems += [*check_sets_are_evaluated(config), *check_profile_starts(config)]
    raise_problems(problems, config.origins if origins is None else origins)


def check_layout(config: Config, axis_sizes: Mapping[str, int], origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if the model or a batch doesn't divide over the mesh, whose sizes all are known here."""
    raise_problems(check_parts(config, axis_sizes), config.origins if origins is None else origins)


def check_steps(config: Config, steps: int, origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if what counts steps doesn't fit a run of so many, known here also where the data sets it."""
    raise_problems(
        [*check_length_of_parts(config, steps), *check_profile(config, steps)],
        config.origins if origins is None else origins,
    )


def _checkpoint(config: Config) -> Iterator[Problem]:
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
