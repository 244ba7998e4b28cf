"""Programs that are built once in a test process: a run after the first of the same config traces nothing again."""

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import pytest

from jaxtrain import inference, loop
from jaxtrain.config import Config, OwnModelConfig
from jaxtrain.program import Program, build

OF_THE_RUN = ("run_dir", "compile_cache", "steps", "log_every", "checkpoint", "profile", "non_finite", "max_hours")
"""Keys that say what a run writes and how long it takes, which its program never sees."""

OF_THE_DATA = ("dir", "log_rows", "workers")


@functools.lru_cache(maxsize=48)
def _built(key: str, devices: tuple[jax.Device, ...], known: "_Known") -> Program:
    return build(known.config, devices)


@dataclasses.dataclass(frozen=True)
class _Known:
    """A config that is equal to every other one: the key beside it says which it is."""

    config: Config = dataclasses.field(compare=False)


def built_once(config: Config, devices: Sequence[jax.Device]) -> Program:
    """As `build`; a model of somebody's own is built each time, since its name doesn't say which code it is."""
    if isinstance(config.model, OwnModelConfig):
        return build(config, devices)
    values = {name: value for name, value in config.to_dict().items() if name not in OF_THE_RUN}
    values["data"] = {name: value for name, value in values["data"].items() if name not in OF_THE_DATA}
    program = _built(json.dumps(values, sort_keys=True), tuple(devices), _Known(config))
    return dataclasses.replace(program, config=config)


def forget() -> None:
    """Lets go of all programs."""
    _built.cache_clear()


@contextmanager
def programs_built_once() -> Iterator[None]:
    """Inside, the verbs build programs so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "build", built_once)
        patch.setattr(inference, "build", built_once)
        yield
