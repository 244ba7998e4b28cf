"""The two trainings of a certificate: of the small config on its mesh, and of the same mathematics on one device."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.config import Config, OwnModelConfig
from jaxtrain.data import Batch
from jaxtrain.errors import ConfigError
from jaxtrain.models.contract import refuse_what_is_no_task
from jaxtrain.models.families import make_task
from jaxtrain.models.parameters import named_leaves
from jaxtrain.models.task import Staged, Task
from jaxtrain.pipeline.build import make_stages
from jaxtrain.placement import Placement
from jaxtrain.program import Program, build
from jaxtrain.training_data import open_data, refuse_other_fields
from jaxtrain.verification.certificate import (
    AVERAGE,
    TOLERANCE,
    TOLERANCE_OF_PIPELINE,
    Certificate,
    HandedOver,
    Trained,
    compare,
)
from jaxtrain.verification.rows import random_rows, reads_own_data, rows_of
from jaxtrain.verification.shrink import STEPS, changes, device_count, on_one_device, shrunk


def verify(config: Config, devices: Sequence[jax.Device], progress: Callable[[str], None]) -> Certificate:
    """Trains the config's structure on its kind of mesh and on one device, and compares.

    Args:
        devices: as many as `device_count` says, or more.
        progress: is told what begins.

    Raises:
        ConfigError: the config or its small likeness can't be trained on the mesh.
    """
    small = shrunk(config)
    alone = on_one_device(small)
    count = device_count(config)
    cast = _cast(config, small, alone)
    with _explained(config):
        there = _build(small, cast.on_mesh, devices[:count])
    here = _build(alone, cast.alone, devices[:1])
    reference, training = _Training("one device", here, progress), _Training("the mesh", there, progress)
    one_device, mesh = reference.train(cast.batches), training.train(cast.batches)
    handed_over = training.last_step_from(reference.before_last, cast.batches[-1])
    stacked = {name for name, info in named_leaves(there.infos).items() if info.is_stacked}
    tolerance = TOLERANCE if there.stages is None else TOLERANCE_OF_PIPELINE
    return Certificate(
        mesh={axis: size for axis, size in there.mesh.shape.items() if size > 1},
        devices=count,
        steps=len(cast.batches),
        rows=cast.rows,
        made_small=changes(config, small),
        choices=dict(there.layout.choices),
        checks=compare(one_device, mesh, handed_over, stacked, tolerance),
        config=small.to_dict(),
    )


@dataclass(frozen=True)
class _Cast:
    """What takes part: the task for each of the two, and what both train on, with what that is in words."""

    on_mesh: Task
    alone: Task
    batches: Sequence[Batch]
    rows: str


def _cast(config: Config, small: Config, alone: Config) -> _Cast:
    rows = small.global_batch
    tasks = make_task(small), make_task(alone)
    if not isinstance(config.model, OwnModelConfig):
        return _Cast(*tasks, random_rows(small, tasks[0], rows, STEPS), "random rows, some not counted")
    if config.mesh.pipeline != 1:
        make_stages(config, tasks[0], max(config.mesh.pipeline, 2))  # refuses in the config's own numbers
    of_small = tasks[0].shrunk(), tasks[1].shrunk()
    what = f"model.target={config.model.target}: shrunk()"
    refuse_what_is_no_task(of_small[0], what)
    _refuse_too_few_layers(of_small[0], small, what)
    if not reads_own_data(small):
        return _Cast(*of_small, random_rows(small, of_small[0], rows, STEPS), "random tokens, some not counted")
    data = open_data(small, held_out_needed=False)
    said = f"rows of {data.where}, some not counted"
    try:
        refuse_other_fields(data, of_small[0].example_batch(rows))
        tasks = of_small
    except ConfigError:
        refuse_other_fields(data, tasks[0].example_batch(rows))
        said += "; the model isn't made small, since what shrunk() gives doesn't read them"
    return _Cast(*tasks, rows_of(data, rows, STEPS), said)


def _refuse_too_few_layers(task: Task, small: Config, what: str) -> None:
    parts = small.mesh.pipeline * small.pipeline.chunks
    if small.mesh.pipeline > 1 and isinstance(task, Staged) and task.layer_count < parts:
        raise ConfigError(
            f"{what} gives a task of {task.layer_count} layers, too few for {small.mesh.pipeline} stages of "
            f"pipeline.chunks={small.pipeline.chunks}; let it keep at least {parts}"
        )


@contextlib.contextmanager
def _explained(config: Config) -> Iterator[None]:
    """Says of an error that the sizes in it are not the config's own."""
    try:
        yield
    except ConfigError as error:
        by = f"{config.model.target}'s shrunk()" if isinstance(config.model, OwnModelConfig) else "this command"
        raise ConfigError(f"{error} (in sizes that were made small, by {by})") from error


def _build(config: Config, task: Task, devices: Sequence[jax.Device]) -> Program:
    return build(config, devices, task=task, measure=lambda gradients, before, after: gradients)


class _Training:
    """One of the two.

    Attributes:
        before_last: the state before the last step, on the host.
    """

    before_last: Any

    def __init__(self, name: str, program: Program, progress: Callable[[str], None]):
        self._tell = lambda what: progress(f"{name}: {what}")
        self._program, self._place, self._inputs = program, Placement(program.batch), program.inputs(STEPS)
        self._tell("compiling the step")
        self._step = program.train_step.lower(program.state, program.batch, program.abstract_inputs()).compile()

    def train(self, batches: Sequence[Batch]) -> Trained:
        """Trains from the first step on."""
        self._tell("initial parameters")
        state, metrics = self._program.init(self._program.initial_key()), []
        initial = _arrays(state["params"])
        for number, batch in enumerate(batches, 1):
            self._tell(f"step {number} of {len(batches)}")
            if number == len(batches):
                self.before_last = jax.device_get(state)
            state, values = self._step(state, self._place(batch), self._inputs)
            metrics.append(jax.device_get(values))
        return Trained(
            initial=initial,
            gradients=tuple(_arrays(values["norms"]) for values in metrics),
            final=_weights(state),
            losses=tuple(float(values["loss"]) for values in metrics),
            norms=tuple(float(values["grad_norm"]) for values in metrics),
        )

    def last_step_from(self, state: Any, batch: Batch) -> HandedOver:
        """The last step, beginning with a state of another layout."""
        self._tell(f"step {STEPS} from the state of the other")
        placed = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, self._program.state))
        after, values = self._step(placed, self._place(batch), self._inputs)
        return HandedOver(_weights(state), _arrays(values["norms"]), _weights(after))


def _weights(state: Any) -> dict[str, np.ndarray]:
    """The parameters of a state, and their average where there is one."""
    averages = _arrays(state.get("ema", {}))
    return _arrays(state["params"]) | {AVERAGE + name: array for name, array in averages.items()}


def _arrays(tree: Any) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in named_leaves(jax.device_get(tree)).items()}
