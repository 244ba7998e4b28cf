"""Whether a run may start, or go on, where it is told to: nobody else's run, nobody else's checkpoints, none lost.

A run directory belongs to one config. The same config goes on with the run; another one is refused with the difference,
unless only keys differ that may change. A directory of checkpoints apart from it belongs to one run directory.
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Meta, list_checkpoints
from jaxtrain.config import Config, Difference, difference, format_differences
from jaxtrain.errors import ConfigError
from jaxtrain.files import read_json, replace_file
from jaxtrain.optimizer import learning_rate, schedule_inputs
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry.events import read_events

OWNER_FILE = "owner.json"
"""In a directory of checkpoints apart from its run: `{"run_dir": …}`."""


def refuse_foreign_run(config: Config, directory: RunDirectory, newest: Meta | None) -> None:
    """Raises unless `config` may start or go on in `directory`, whose newest checkpoint is `newest`.

    Raises:
        ConfigError: `resume: false` in a used directory; a config that differs in keys that may not change; checkpoints
            of another run; checkpoints of this run that lie elsewhere or nowhere.
    """
    if not config.resume:
        used = directory.holds_a_run() or list_checkpoints(config.checkpoint_dir).steps
        if used:
            raise ConfigError(
                f"run_dir={config.run_dir} already holds a run and resume is false; choose another run_dir, "
                f"or set resume: true to go on with it"
            )
    _refuse_changed_config(config, directory, newest)
    _refuse_other_owner(config)
    _refuse_lost_checkpoints(config, directory)


def own_checkpoints(config: Config) -> None:
    """Marks a directory of checkpoints apart from `run_dir` as this run's; to be called by one process.

    Raises:
        ConfigError: another run was faster.
    """
    directory = config.checkpoint_dir
    if _of_run(config.run_dir, None) == directory.resolve():
        return
    text = json.dumps({"run_dir": str(config.run_dir.resolve())}) + "\n"
    try:
        with (directory / OWNER_FILE).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        _refuse_other_owner(config)
        replace_file(directory / OWNER_FILE, text)


def _refuse_changed_config(config: Config, directory: RunDirectory, newest: Meta | None) -> None:
    saved = newest.config if newest is not None else directory.saved_config() if directory.holds_a_run() else None
    if saved is None:
        return
    changed = [entry for entry in difference(saved, config) if not entry.may_change]
    if [entry.key for entry in changed] == ["steps"]:
        _refuse_other_length(config, changed[0], 0 if newest is None else newest.step)
    elif changed:
        raise ConfigError(
            f"run_dir={config.run_dir} belongs to a run with another config; these keys may not change on resume:\n"
            f"{format_differences(changed)}\nset them back, or choose another run_dir"
        )


def _refuse_other_length(config: Config, change: Difference, done: int) -> None:
    """`steps` may change where the run so far is bit for bit the one that the new length would have given."""
    begin = f"run_dir={config.run_dir} holds a run of another length:\n{change}\n"
    instead = f"set steps back, or start a new run from its parameters with init_from={config.run_dir}"
    if change.saved is None or change.now is None:
        raise ConfigError(f"{begin}a length that the data set can't become one in steps, nor the reverse; {instead}")
    if change.now < done:
        raise ConfigError(f"{begin}{done} steps are done already, so steps must be at least {done}; {instead}")
    before, now = (learning_rates(config, steps, done) for steps in (change.saved, change.now))
    other = np.flatnonzero(before != now)
    if other.size:
        first = int(other[0])
        raise ConfigError(
            f"{begin}with schedule.kind={config.optimizer.schedule.kind} the {done} updates done would have had another"
            f" learning rate (update {first + 1}: {before[first]:.6g}, then {now[first]:.6g}); {instead}"
        )


def learning_rates(config: Config, steps: int, done: int) -> np.ndarray:
    """The learning rate of updates 1 to `done` in a run of so many steps; float32[done]."""
    inputs = schedule_inputs(config, steps)
    return np.asarray(jax.jit(jax.vmap(learning_rate, (0, None)))(jnp.arange(1, done + 1, dtype=jnp.int32), inputs))


def _refuse_other_owner(config: Config) -> None:
    """A run that is gone owns nothing: what it left goes on in another directory, as one that was moved does."""
    owner = _owner(config.checkpoint_dir.resolve())
    if owner is not None and owner != config.run_dir.resolve() and RunDirectory(owner).holds_a_run():
        raise ConfigError(
            f"checkpoint.dir={config.checkpoint_dir} belongs to the run in {owner}; choose another checkpoint.dir, "
            f"go on with run_dir={owner}, or start from its parameters with init_from={owner}"
        )


def _owner(directory: Path) -> Path | None:
    """The run directory that a directory of checkpoints belongs to, if that is known."""
    try:
        return Path(read_json(directory / OWNER_FILE)["run_dir"])
    except (OSError, ValueError, TypeError, KeyError):
        inside = RunDirectory(directory.parent)
        return inside.path if directory.name == "checkpoints" and inside.holds_a_run() else None


def _refuse_lost_checkpoints(config: Config, directory: RunDirectory) -> None:
    """Without this, a run whose `checkpoint.dir` was changed would begin at step 0 and lose its metrics."""
    if not directory.holds_a_run():
        return
    here = config.checkpoint_dir.resolve()
    before = _of_run(directory.path, directory.saved_info().get("checkpoint_dir"))
    found = list_checkpoints(here)
    newest = found.steps[0] if found.steps else 0
    elsewhere = list_checkpoints(before).steps if before != here else []
    if elsewhere and elsewhere[0] > newest:
        raise ConfigError(
            f"checkpoint.dir={config.checkpoint_dir} is not where this run has saved: {before} holds its steps up to "
            f"{elsewhere[0]}; set checkpoint.dir back, or move them"
        )
    if found.steps or found.incomplete or not directory.events.exists():
        return
    saves = [event.get("step") for event in read_events(directory.events) if event.get("kind") == "save"]
    if saves:
        raise ConfigError(
            f"{here} holds no checkpoint, but this run has saved some, last at step {saves[-1]}"
            f"{f' in {before}' if before != here else ''}; put them back, or choose another run_dir to begin anew"
        )


def _of_run(run_dir: Path, apart: Any) -> Path:
    """Where a run has its checkpoints: apart, or in it, wherever it may have been moved."""
    return Path(apart).resolve() if isinstance(apart, str) else run_dir.resolve() / "checkpoints"
