"""Config and devices → everything that can be compiled. Nothing is allocated here.

`train`, and every other verb that wants to know what a config means on a mesh, calls `build`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Wrapped
from jaxtyping import Array, Key

from jaxtrain.config import Config, PipelineConfig, check_layout, resolve_mesh
from jaxtrain.gradient import Gradient, accumulated_gradient, cast_for_compute, gathered_gradient, plain_gradient
from jaxtrain.models.families import make_task, remat_of
from jaxtrain.models.parameters import ParameterInfo, describe, named_leaves, path_name, unbox
from jaxtrain.models.remat import refuse_unknown_names
from jaxtrain.models.task import Batch, Denominators, Params, Staged, Sums, Task
from jaxtrain.norms import measure_norms
from jaxtrain.optimizer import complete, freeze, make_optimizer, schedule_inputs, state_axes, trainable
from jaxtrain.pipeline.build import describe_pipeline, make_pipeline, make_stages
from jaxtrain.pipeline.engine import pipelined_gradient
from jaxtrain.pipeline.stages import Stages
from jaxtrain.sharding import PIPELINE, Layout, make_mesh, use_layout
from jaxtrain.sharding.table import TableRow, parameter_rows, refuse_silent_replication
from jaxtrain.step import Measure, State, StepInputs, initial_state, make_eval_step, make_train_step


@dataclass(frozen=True)
class Program:
    """A training program on a mesh: abstract state and batches with shardings, and the functions over them.

    Attributes:
        state, batch, eval_batch: trees of `jax.ShapeDtypeStruct` with shardings; `batch` is one of `global_batch` rows,
            `eval_batch` one of `eval_rows`. Where the layers are cut into stages, evaluation isn't pipelined: the
            stages divide its rows, and gather each other's weights as fsdp does, so none is ever idle.
        stages: which layers each stage of a pipeline has; None without one.
        infos: the parameters' `ParameterInfo`, a tree like `state["params"]`.
        init: key -> state, straight into its shards.
        adopt: params -> the state of a new run that begins with them; donates them.
        train_step: (state, batch, inputs) -> (state, metrics); donates the state. Compiled for each batch size.
        eval_step: (params, batch) -> metrics to add.
        averaged: a state's (params, ema) -> the average as parameters lie, with what is frozen.
    """

    config: Config
    task: Task
    layout: Layout
    stages: Stages | None
    infos: Any
    state: Any
    batch: dict[str, jax.ShapeDtypeStruct]
    eval_batch: dict[str, jax.ShapeDtypeStruct]
    init: Wrapped
    adopt: Wrapped
    train_step: Wrapped
    eval_step: Wrapped
    averaged: Wrapped

    @property
    def mesh(self) -> Mesh:
        """The mesh of all devices."""
        return self.layout.mesh

    @property
    def eval_rows(self) -> int:
        """Rows that are evaluated at a time."""
        rows: int = next(iter(self.eval_batch.values())).shape[0]
        return rows

    def passes(self, rows: int) -> int:
        """Micro-batches of a step with so many rows."""
        return _passes(self.config, self.layout, rows)

    def jit(self, function: Callable[..., Any], layout: Layout | None = None, **options: Any) -> Wrapped:
        """Another function jitted as these are: with the layout, or one like it, and the matrix products' precision."""
        return _on(layout or self.layout, MATMUL_PRECISION[self.config.precision], function, **options)

    def batch_of(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """A batch of another size than `global_batch`, as a part of the ramp has it."""
        return _abstract_batch(self.task, rows, self.layout)

    def inputs(self, steps: int, rows: int | None = None) -> StepInputs:
        """The inputs of a run of so many steps, on every device, for its steps of `rows` (None: `global_batch`)."""
        return jax.jit(lambda: self._inputs(steps, rows), out_shardings=self.layout.replicated())()

    def initial_key(self) -> Key[Array, ""]:
        """The key that `init` takes, on every device."""
        return jax.jit(lambda: self._key(_INITIALISATION), out_shardings=self.layout.replicated())()

    def _key(self, purpose: int) -> Key[Array, ""]:
        return jax.random.fold_in(jax.random.key(self.config.seed), purpose)

    def _inputs(self, steps: int, rows: int | None = None) -> StepInputs:
        inputs = {"key": self._key(_TRAINING), "schedule": schedule_inputs(self.config, steps, rows)}
        average = self.config.ema
        return inputs if average is None else {**inputs, "ema_decay": jnp.float32(average.decay)}

    def abstract_inputs(self) -> Any:
        """The step's inputs as shapes with shardings."""
        return _with_sharding(jax.eval_shape(lambda: self._inputs(steps=1)), self.layout.replicated())

    def parameter_table(self) -> list[TableRow]:
        """Each parameter's shape, sharding and bytes per device, and whether it is frozen."""
        leaves = named_leaves(self.state["params"])
        return parameter_rows(
            {name: leaf.shape for name, leaf in leaves.items()},
            {name: leaf.sharding for name, leaf in leaves.items()},
            {name for name, info in named_leaves(self.infos).items() if info.frozen},
        )


_INITIALISATION, _TRAINING = 0, 1
"""What the seed's key is folded with: initial values and dropout never share a key."""


MATMUL_PRECISION = {"float32": "highest", "bfloat16": "default"}
"""Left to itself, JAX multiplies float32 matrices in TF32 on GPUs, with ten bits of mantissa."""


def build(
    config: Config, devices: Sequence[jax.Device], *, task: Task | None = None, measure: Measure | None = None
) -> Program:
    """The program of `config` on `devices` (real, virtual or compile-only).

    Args:
        task: trained in place of the one that the config describes.
        measure: what the metrics of a step have as `norms`; None: norms, where the config asks for them.

    Raises:
        ConfigError: sizes that the mesh doesn't divide, parameters that would silently be replicated, or names to
            freeze that don't exist.
    """
    axis_sizes = resolve_mesh(config.mesh, len(devices), config.origins)
    check_layout(config, axis_sizes)
    task = make_task(config) if task is None else task
    layout = Layout.on(make_mesh(axis_sizes, devices), config.sharding.rules, config.sharding.zero)
    abstract_params = jax.eval_shape(task.init, jax.random.key(0))
    infos = freeze(describe(abstract_params), config.optimizer.frozen, config.origins.get("optimizer.frozen", ""))
    optimizer = make_optimizer(config.optimizer, infos)

    def start(params: Params) -> State:
        return initial_state(params, optimizer, trainable(params, infos), average=config.ema is not None)

    state = _abstract_state(jax.eval_shape(start, unbox(abstract_params)), infos, layout)
    cast = functools.partial(cast_for_compute, infos=infos, dtype=jnp.dtype(config.precision), layout=layout)
    batch = _abstract_batch(task, config.global_batch, layout)
    inference = layout.for_inference()
    eval_batch = _abstract_batch(task, _eval_rows(config, inference), inference)
    if measure is None and config.telemetry.norms_every:
        measure = functools.partial(measure_norms, infos)
    stages = make_stages(config, task, axis_sizes[PIPELINE]) if axis_sizes[PIPELINE] > 1 else None
    layout.choices.update(_without_effect(config, layout))
    gradient = _gradient(config, task, cast, layout, infos, stages)
    train_step = make_train_step(task, gradient, optimizer, config.optimizer.clip, measure)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    precision = MATMUL_PRECISION[config.precision]
    on = functools.partial(_on, layout, precision)
    program = Program(
        config=config,
        task=task,
        layout=layout,
        stages=stages,
        infos=infos,
        state=state,
        batch=batch,
        eval_batch=eval_batch,
        init=on(lambda key: start(unbox(task.init(key))), out_shardings=shardings),
        adopt=on(start, out_shardings=shardings, donate_argnums=0),
        train_step=on(train_step, out_shardings=(shardings, layout.replicated()), donate_argnums=0),
        eval_step=_on(inference, precision, make_eval_step(task, cast), out_shardings=layout.replicated()),
        averaged=on(lambda params, ema: complete(ema, params), out_shardings=shardings["params"]),
    )
    if config.remat == "named":
        refuse_unknown_names(remat_of(config), on(train_step), state, batch, program.abstract_inputs())
    refuse_silent_replication(program.parameter_table(), axis_sizes, config.sharding.allow_replicated)
    return program


def _on(layout: Layout, matmul_precision: str, function: Callable[..., Any], **options: Any) -> Wrapped:
    """`function` jitted, traced with `layout` and the precision of matrix products in force."""

    @functools.wraps(function)
    def traced(*arguments: Any) -> Any:
        with use_layout(layout), jax.default_matmul_precision(matmul_precision):
            return function(*arguments)

    return jax.jit(traced, **options)


def _gradient(
    config: Config, task: Task, cast: Callable[[Any], Any], layout: Layout, infos: Any, stages: Stages | None
) -> Gradient:
    """The gradient in as many passes as the rows of a batch need, with None in place of frozen parameters.

    What nobody takes is never computed: JAX leaves it out before it compiles, also out of the loop over passes.
    """

    def gradient(params: Params, batch: Batch, denominators: Denominators, key: Key[Array, ""]) -> tuple[Params, Sums]:
        gathered_once = config.fsdp.gather == "step"
        passes = _passes(config, layout, batch["row"].shape[0])
        if stages is not None:
            assert isinstance(task, Staged), "seen when the stages were made"
            pipeline = make_pipeline(config, task, stages, passes)
            rows = f" of {batch['row'].shape[0]} rows" if config.batch_ramp else ""
            layout.choices[f"pipeline{rows}"] = describe_pipeline(config, pipeline)
            whole = pipelined_gradient(pipeline, cast, layout, infos)
        elif passes == 1:
            whole = plain_gradient(task, cast)
        elif gathered_once and layout.batch_axes:
            whole = gathered_gradient(task, cast, layout, infos, passes)
        else:
            whole = accumulated_gradient(task, cast, layout, passes)
        if passes > 1 and layout.inside(PIPELINE).weight_axes:
            layout.choices["weights"] = f"gathered {'once a step' if gathered_once else 'for each micro-batch'}"
        gradients, sums = whole(params, batch, denominators, key)
        return _as_kept(trainable(gradients, infos), infos, layout), sums

    return gradient


def _without_effect(config: Config, layout: Layout) -> dict[str, str]:
    """The keys that say how to divide what this mesh or batch doesn't divide, with the reason."""
    found, pipeline = {}, config.pipeline
    if config.sharding.zero and not layout.split_axes("data"):
        found["sharding.zero"] = f"{config.sharding.zero} divides nothing, since mesh.data is 1"
    elif config.sharding.zero == 2 and layout.split_axes(PIPELINE) and config.fsdp.gather == "microbatch":
        found["sharding.zero"] = (
            "1 in effect: stages sum gradients over mesh.data for each micro-batch; fsdp.gather=step divides them"
        )
    if not layout.split_axes(PIPELINE) and pipeline != PipelineConfig():
        found["pipeline"] = f"none, whatever pipeline.schedule={pipeline.schedule} says, since mesh.pipeline is 1"
    if config.fsdp.gather == "step":
        if not layout.batch_axes:
            found["fsdp.gather"] = "step changes nothing, since no axis divides the batch"
        elif all(_passes(config, layout, size) == 1 for size in config.batches.sizes):
            found["fsdp.gather"] = "step changes nothing, since a step is one micro-batch; set microbatch"
    return found


def _passes(config: Config, layout: Layout, rows: int) -> int:
    device_rows = rows // layout.size(*layout.batch_axes)
    return device_rows // (config.microbatch or device_rows)


def _as_kept(gradients: Params, infos: Any, layout: Layout) -> Params:
    """The gradients divided as the layout says, whatever made them."""

    def one(info: ParameterInfo, leaf: Any) -> Any:
        return None if leaf is None else layout.constrain(leaf, layout.gradient(info.axes, info.shape, "gradient"))

    return jax.tree.map(one, infos, gradients)


def _eval_rows(config: Config, layout: Layout) -> int:
    """`eval.batch`; where that is null, `global_batch` made up to what the mesh divides: more rows of weight 0."""
    shards = layout.size(*layout.batch_axes)
    return config.eval_batch if config.eval.batch is not None else -(-config.eval_batch // shards) * shards


def _abstract_state(shapes: Any, infos: Any, layout: Layout) -> Any:
    """The state's shapes with shardings; each moment and average lies where its parameter lies."""
    axes = {"params": jax.tree.map(lambda info: info.axes, infos), "step": ()}
    axes |= {part: state_axes(shapes[part], infos) for part in ("optimizer", "ema") if part in shapes}

    def shard(path: Any, leaf: Any, names: Any) -> Any:
        part, *name = path
        if part.key == "params":
            return _with_sharding(leaf, layout.parameter(names, leaf.shape, f"parameter {path_name(tuple(name))}"))
        return _with_sharding(leaf, layout.moment(names, leaf.shape, path_name(path)))

    return jax.tree_util.tree_map_with_path(shard, shapes, axes)


def _abstract_batch(task: Task, rows: int, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=layout.activation(spec.axes, spec.shape, name))
        for name, spec in task.example_batch(rows).items()
    }


def _with_sharding(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
