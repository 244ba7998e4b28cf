"""A run directory, read: what `report` and its pictures are made from."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from jaxtrain.errors import EXIT_COMPLETE, ConfigError, refusing_os_errors
from jaxtrain.files import read_json
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry.events import read_events
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.telemetry.norms import read_norms
from jaxtrain.telemetry.timeline import read_timeline

Record = dict[str, Any]
Curve = Float64[np.ndarray, " points"]

EVALUATION = "eval_"
"""How the names of an evaluation's metrics begin."""

_NORM_FIELDS = {"step", "gradient_norm", "parameter_norm", "update_norm"}


@dataclass(frozen=True)
class Run:
    """What a run directory tells: `steps`, `evaluations` and `norms` hold one line for each step.

    `timeline` gives for each rank its host and what its last steps were spent on.
    """

    path: Path
    config: Record
    info: Record
    events: list[Record]
    steps: list[Record]
    evaluations: list[Record]
    norms: list[Record]
    timeline: dict[int, tuple[str, list[Record]]]

    @property
    def planned(self) -> int | None:
        """Steps that the run was to have: those of the config, or what its data gave where that leaves it open."""
        told = [event["steps"] for event in self.of_kind("start") if event.get("steps") is not None]
        configured = self.config.get("steps")
        return configured if type(configured) is int and configured > 0 else (told[-1] if told else None)

    @property
    def restarts(self) -> list[int]:
        """The step after which each later start went on; a start that found the run complete is none."""
        events = [event for event in self.events if event.get("process", 0) == 0]
        starts = [
            event
            for event, following in pairwise([*events, {}])
            if event.get("kind") == "start" and not _is_stop_without_a_step(event, following)
        ]
        return [int(start.get("step", 0)) for start in starts[1:]]

    @property
    def evaluated(self) -> list[str]:
        """The names of all evaluation metrics, `eval_loss` first."""
        names = {name for line in self.evaluations for name in line if name.startswith(EVALUATION)}
        return sorted(names, key=lambda name: (name != "eval_loss", name))

    def of_kind(self, kind: str) -> list[Record]:
        return [event for event in self.events if event.get("kind") == kind]

    def curve(self, key: str) -> tuple[Curve, Curve]:
        """Steps and values of a metric, where it was measured; NaN where it was not a number."""
        lines = self.evaluations if key.startswith(EVALUATION) else self.steps
        measured = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        steps, values = zip(*measured, strict=True) if measured else ((), ())
        return np.array(steps, float), np.array(values, float)


def read_run(path: Path) -> Run:
    """Reads a run directory.

    Raises:
        ConfigError: `path` is no run directory, can't be read, or the run has not finished a step yet.
    """
    with refusing_os_errors(f"{path}", "name the run_dir of a run whose files you may read"):
        return _read_run(path)


def _read_run(path: Path) -> Run:
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; name the run_dir of a run")
    files = RunDirectory(path)
    if not files.metrics.exists():
        raise ConfigError(f"{path}: no run here (metrics.jsonl is missing); name the run_dir of a run")
    lines = [line for line in read_metrics(files.metrics) if "step" in line]
    steps = {line["step"]: line for line in lines if "loss" in line}
    if not steps:
        raise ConfigError(f"{path}: the run has not finished a step yet (metrics.jsonl holds no loss)")
    evaluations: dict[int, Record] = {}
    for line in lines:  # the last value wins where an evaluation was repeated after a restart
        if any(name.startswith(EVALUATION) for name in line):
            evaluations[line["step"]] = evaluations.get(line["step"], {}) | line
    return Run(
        path=path,
        config=_read_config(files.config),
        info=_read_info(files.info),
        events=read_events(files.events) if files.events.exists() else [],
        steps=list(steps.values()),
        evaluations=list(evaluations.values()),
        norms=[line for line in read_norms(files.norms) if line.keys() >= _NORM_FIELDS] if files.norms.exists() else [],
        timeline=read_timeline(files.timeline),
    )


def _is_stop_without_a_step(start: Record, following: Record) -> bool:
    return (
        following.get("kind") == "stop"
        and following.get("exit_code") == EXIT_COMPLETE
        and following.get("step") == start.get("step")
    )


def _read_config(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        config = YAML(typ="safe").load(path)
    except YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    return config if isinstance(config, dict) else {}


def _read_info(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        info = read_json(path)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    return info if isinstance(info, dict) else {}
