"""That all processes, and the checkpoint that they go on from, are of one run: the same config, data, checkpoints."""

from typing import Any

from jaxtrain import distributed
from jaxtrain.checkpoint import Checkpointer, Meta
from jaxtrain.config import Config, MixtureDataConfig, keys, value_at
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.token_data import differing_parts
from jaxtrain.training_data import TrainingData, agree_on_data


def refuse_other_configs(config: Config) -> None:
    """Raises where the processes of this run were not started with the same config."""
    values = _compared_values(config)
    if differing := distributed.differing(list(values.values())):
        names = list(values)
        here = ", ".join(f"{names[index]}={values[names[index]]}" for index in differing)
        raise ConfigError(f"the processes were started with different configs (here: {here}); give all the same")


def _compared_values(config: Config) -> dict[str, Any]:
    """What must be the same in all processes; as many entries in each, whatever its config."""
    values = {name: value_at(config, name) for name, key in keys().items() if not key.is_section}
    values |= {name: getattr(getattr(config, name), "own_keys", None) for name in ("model", "data")}
    if isinstance(config.data, MixtureDataConfig):  # its directories are of one process as `data.dir` is
        values["data.mixture"] = [(name, component.weight) for name, component in config.data.mixture.items()]
    values = {name: value for name, value in values.items() if not name.startswith(distributed.OF_ONE_PROCESS)}
    local = config.checkpoint.local  # each host may have its disk elsewhere, but all write at the same steps
    return values | {"checkpoint.local": None if local is None else (local.every, local.every_minutes)}


def refuse_other_checkpoints(checkpointer: Checkpointer, newest: Meta | None) -> None:
    """Raises where the processes don't see the same newest checkpoint."""
    if not distributed.same_everywhere(newest and newest.step):
        raise CheckpointError(
            f"{checkpointer.directory}: the processes see different checkpoints there; "
            f"checkpoint.dir must be one directory that all of them share"
        )


def refuse_other_data(data: TrainingData, newest: Meta | None) -> None:
    """Raises where the data differ from those of the checkpoint, or between the processes of this run."""
    if newest is not None and newest.data_hash != data.hash:
        changed = differing_parts(newest.data_hash, data.hash)
        where = f"{data.where} ({', '.join(changed)})" if changed else data.where
        raise ConfigError(
            f"{where}: the data are others than the run was started on (content {data.hash[:12]}, "
            f"the checkpoint has {newest.data_hash[:12]}); give it the old ones, or choose another run_dir"
        )
    agree_on_data(data)
