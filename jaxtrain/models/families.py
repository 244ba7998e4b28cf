"""From a config to the task that it describes: the one place that knows all families."""

from typing import Any

import jax.numpy as jnp

from jaxtrain.config import Config, DecoderConfig, OwnModelConfig, VitConfig
from jaxtrain.errors import ConfigError
from jaxtrain.models.contract import refuse_what_is_no_task
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.remat import Remat
from jaxtrain.models.task import Task
from jaxtrain.models.vision import VisionTask
from jaxtrain.target import call_target, takes


def make_task(config: Config) -> Task:
    """The task that the config's `model` and `data` describe.

    A task of somebody's own is given the keys of `model`, and the run's `compute_dtype` and `remat` if it takes them.

    Raises:
        ConfigError: somebody's own task can't be made of its keys, or is none.
    """
    model, dtype, remat = config.model, jnp.dtype(config.precision), remat_of(config)
    if isinstance(model, OwnModelConfig):
        return _own_task(model, {"compute_dtype": dtype, "remat": remat}, config)
    if isinstance(model, VitConfig):
        return VisionTask(model, dtype, remat)
    assert isinstance(model, DecoderConfig)
    assert config.sequence is not None, "checked by config: the data of a decoder have a sequence length"
    return LanguageTask(model, config.sequence, dtype, remat)


def remat_of(config: Config) -> Remat:
    """What the config keeps of each layer for the backward pass."""
    return Remat(config.remat, config.remat_save, config.remat_offload)


def _own_task(model: OwnModelConfig, offered: dict[str, Any], config: Config) -> Task:
    place = config.origins.get("model.target")
    what = f"{f'{place}: ' if place else ''}model.target={model.target}"
    task = call_target("model", model.target, model.own_keys, offered, config.origins)
    if config.remat != "none" and not takes(model.target, "remat"):
        raise ConfigError(f"remat={config.remat}, but {model.target} takes no remat; set remat=none")
    refuse_what_is_no_task(task, what, offered["compute_dtype"])
    return task
