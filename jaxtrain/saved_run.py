"""A run that another command looks at or starts from: `RUN[@STEP]`, and the checkpoint that this means."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import distributed
from jaxtrain.checkpoint import Saved, list_checkpoints, open_saved
from jaxtrain.config import Config, flat, from_saved
from jaxtrain.errors import ConfigError
from jaxtrain.run_directory import RunDirectory

_OF_THE_MACHINE = ("mesh", "sharding", "fsdp", "pipeline", "distributed", "microbatch", "compile_cache", "cpu_devices")
"""What a run's config says about where it ran; a reader elsewhere begins with the defaults."""
_OF_TRAINING = (
    *("run_dir", "steps", "max_hours", "init_from", "seed", "batch_ramp", "microbatch", "log_every", "resume"),
    *("remat", "remat_save", "remat_offload", "non_finite", "optimizer", "checkpoint", "telemetry", "profile"),
    *("fsdp", "pipeline", "sharding.zero"),
)
"""What changes nothing for a reader, whatever it is set to."""


def find_checkpoint(run: str) -> Saved:
    """The checkpoint that `RUN` (its newest complete one) or `RUN@STEP` means.

    RUN is a run directory, whose config says where the checkpoints lie if not in it, or a directory of checkpoints.

    Raises:
        ConfigError: no such run, or no such step: those that are there are named.
        CheckpointError: the checkpoint can't be read.
    """
    path, step = existing_run(run)
    return open_saved(checkpoints_of(path), step)


def find_checkpoints(run: str) -> list[Saved]:
    """As `find_checkpoint`; `RUN@all` means every complete checkpoint, rising."""
    name, _, steps = run.rpartition("@")
    if steps != "all" or Path(run).expanduser().is_dir():
        return [find_checkpoint(run)]
    newest = find_checkpoint(name)
    steps_there = list_checkpoints(newest.directory).steps
    return [open_saved(newest.directory, step) for step in sorted(steps_there)]


def existing_run(run: str) -> tuple[Path, int | None]:
    """RUN and STEP as `split_step` has them.

    Raises:
        ConfigError: RUN is no directory.
    """
    path, step = split_step(run)
    if not path.is_dir():
        raise ConfigError(f"{run}: no such directory; give a run directory, or RUN@STEP for one of its steps")
    return path, step


def split_step(run: str) -> tuple[Path, int | None]:
    """RUN and STEP, None for the newest; a directory that has an `@` in its name comes first."""
    name, at, step = run.rpartition("@")
    if at and not Path(run).expanduser().is_dir():
        if not step.isdecimal():
            raise ConfigError(f"{run}: after the @ stands the number of a step, such as {name}@1000")
        return Path(name).expanduser(), int(step)
    return Path(run).expanduser(), None


def checkpoints_of(path: Path) -> Path:
    """Where the checkpoints of a run directory lie, or `path` itself if it holds steps.

    Raises:
        ConfigError: it is neither.
    """
    run = RunDirectory(path)
    # First what lies in it: a directory that was moved or copied has its checkpoints with it.
    for directory in (path / "checkpoints", path):
        if list_checkpoints(directory).steps:
            return directory.absolute()
    if run.holds_a_run():
        elsewhere = (run.saved_config().get("checkpoint") or {}).get("dir")
        return Path(elsewhere or path / "checkpoints").absolute()
    if path.name.isdecimal() and list_checkpoints(path.parent).steps:
        raise ConfigError(f"{path}: is one checkpoint; write {path.parent}@{path.name}")
    raise ConfigError(f"{path}: neither a run directory nor a directory of checkpoints")


def config_of(saved: Saved, overrides: Sequence[str] = ()) -> Config:
    """The config of the run that saved a checkpoint, for this machine: mesh and the like at their defaults.

    The run's batches need not divide over the mesh; who builds a program for others has them judged.

    Raises:
        ConfigError: the overrides are wrong or would do nothing, or the run was by a version with other keys.
    """
    values = {name: value for name, value in saved.meta.config.items() if name not in _OF_THE_MACHINE}
    if rules := (saved.meta.config.get("sharding") or {}).get("rules"):
        values["sharding"] = {"rules": rules}  # names that the run's own task gives its dimensions
    config = from_saved(values, str(saved.path), overrides)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if {key, key.partition(".")[0]} & set(_OF_TRAINING):
            raise ConfigError(
                f"override {override}: {key} counts while a run trains and changes nothing here; leave it out"
            )
    return config


def agree_on_request(run: str, checkpoints: Sequence[Saved], config: Config, options: Mapping[str, Any]) -> None:
    """Raises a ConfigError where the processes found different checkpoints, or were asked for different things.

    Args:
        options: of the command line, beside the run and the keys of its config.
    """
    steps = [(saved.meta.step, saved.meta.checksums) for saved in checkpoints]
    flat_config = flat(config.to_dict())
    values = {name: value for name, value in flat_config.items() if not name.startswith(distributed.OF_ONE_PROCESS)}
    others = sorted((name, value) for name, value in options.items() if name not in ("run", "overrides"))
    differing = distributed.differing([steps, values, others])
    if not differing:
        return
    if 0 in differing:
        here = ", ".join(str(saved.meta.step) for saved in checkpoints)
        raise ConfigError(
            f"{run}: the processes found different checkpoints there (here: {here}); name one, as in RUN@STEP, "
            f"in a directory that all of them share"
        )
    what = " and ".join({1: "keys of the config", 2: "options"}[index] for index in differing)
    raise ConfigError(f"{run}: the processes were started with different {what}; give all the same")
