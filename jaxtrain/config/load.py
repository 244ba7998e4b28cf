"""From a file and overrides to a `Config`, and back to text."""

import io
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from jaxtrain.config.checks import check
from jaxtrain.config.explain import explain
from jaxtrain.config.schema import Config
from jaxtrain.config.source import Node, as_node, overlay, places, plain, read_chain, read_overrides
from jaxtrain.config.tree import ROOT
from jaxtrain.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration that a YAML file, the files it is based on and `key.path=value` overrides give together.

    Raises ConfigError that lists all faults, one line each: where, which key, what is wrong, the nearest right one.
    """
    problems: list[str] = []
    return _judged([*read_chain(Path(path), problems)], overrides, problems, str(path))


def from_saved(values: Mapping[str, Any], place: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration that `Config.to_dict()` gave earlier, with overrides; `place` is where it was saved.

    Raises ConfigError as `load` does, also for keys that this version no longer has, but not for batches that don't
    divide over the mesh, nor for keys that would do nothing in a training: what was saved is read to do something else.
    """
    return _judged([as_node(values, place)], overrides, [], place, for_training=False)


def _judged(
    layers: list[Node], overrides: Sequence[str], problems: list[str], place: str, *, for_training: bool = True
) -> Config:
    merged = reduce(lambda base, child: overlay(base, child, ROOT), [*layers, read_overrides(overrides, problems)])
    origins = dict(places(merged))
    config = None
    try:
        config = Config.model_validate(plain(merged)).with_origins(origins)
    except ValidationError as error:
        problems += explain(error, origins, default_place=place)
    if config is None or problems:
        raise ConfigError("\n".join(problems))
    check(config, for_training=for_training)
    return config


def dump(config: Config) -> str:
    """Every key with its value, as YAML that `load` reads back to an equal configuration."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]  # declared as None in ruamel.yaml
    text = io.StringIO()
    yaml.dump(config.to_dict(), text)
    return text.getvalue()


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors: every key, its type, limits, default and description."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["base"] = {
        "type": "string",
        "description": "Path of a configuration, relative to this file, whose values hold where this one has none.",
    }
    schema["anyOf"] = [{"required": [key]} for key in (*schema.pop("required"), "base")]
    return schema
