"""What several keys must satisfy together, in one place; limits on a single key stand in the schema.

`check` needs the configuration alone. `check_layout` repeats what depends on the mesh once its sizes are known on real
devices, and `check_steps` what depends on the length of the run once the data has set it. Every problem names the keys,
their values and the nearest values that are right.
"""

from collections.abc import Mapping

from jaxtrain.config.checks.checkpoint import check_checkpoint
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
from jaxtrain.config.checks.problems import raise_problems
from jaxtrain.config.schema import Config


def check(config: Config, *, for_training: bool = True) -> None:
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
        *check_checkpoint(config),
        *check_eval_sets(config),
        *check_distributed(config),
        *check_parts(config, sizes, batches=for_training),
    ]
    if for_training:
        problems += [*check_sets_are_evaluated(config), *check_profile_starts(config)]
    raise_problems(problems, config.origins)


def check_layout(config: Config, axis_sizes: Mapping[str, int]) -> None:
    """Raise ConfigError if the model or a batch doesn't divide over the mesh, whose sizes all are known here."""
    raise_problems(check_parts(config, axis_sizes), config.origins)


def check_steps(config: Config, steps: int) -> None:
    """Raise ConfigError if what counts steps doesn't fit a run of so many, known here also where the data sets it."""
    raise_problems([*check_length_of_parts(config, steps), *check_profile(config, steps)], config.origins)
