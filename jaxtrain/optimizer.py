"""The optimizer (optax, told by role what a parameter is) and the learning-rate schedule."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxtrain.config import CosineSchedule, OptimizerConfig, SgdConfig
from jaxtrain.models.parameters import ParameterInfo, Role

DECAYED_ROLES: frozenset[Role] = frozenset({"matrix", "embedding", "head", "router"})
"""Weight decay is for what multiplies activations; norms, biases and sparse tables are left alone."""

ScheduleInputs = dict[str, Any]
"""Numbers of the schedule that are inputs of the compiled step, so that a sweep over them compiles nothing anew."""


def make_optimizer(config: OptimizerConfig, infos: Any) -> optax.GradientTransformation:
    """The update direction before the learning rate; its state is a dictionary by name.

    Decay is decoupled (arXiv 1711.05101): decay · weight is added to the direction, after Adam's or the momentum's.
    Clipping and the learning rate are the step's: it needs the norm and the rate for its metrics anyway.
    """
    mask = jax.tree.map(lambda info: info.role in DECAYED_ROLES, infos, is_leaf=lambda x: isinstance(x, ParameterInfo))
    decay = ("decay", optax.add_decayed_weights(config.weight_decay, mask))
    if isinstance(config, SgdConfig):
        return optax.named_chain(("momentum", optax.trace(config.momentum)), decay)
    return optax.named_chain(("adam", optax.scale_by_adam(config.b1, config.b2, config.epsilon)), decay)


def schedule_inputs(config: OptimizerConfig, steps: int) -> ScheduleInputs:
    """The schedule's numbers for a run of so many steps."""
    schedule = config.schedule
    inputs = {"peak": config.learning_rate, "warmup": float(schedule.warmup)}
    if isinstance(schedule, CosineSchedule):
        inputs |= {"steps": float(steps), "final": schedule.final}
    return {name: jnp.float32(value) for name, value in inputs.items()}


def learning_rate(step: Int[Array, ""], inputs: ScheduleInputs) -> Float[Array, ""]:
    """The rate of update number `step` (the first is 1): linear warm-up to the peak, then constant or cosine.

    The peak is reached at update `warmup`; cosine ends at `final` · peak with the run's last update, where the warm-up
    leaves room for it.
    """
    step = step.astype(jnp.float32)
    warmup = inputs["warmup"]
    rising = step / jnp.maximum(warmup, 1.0)
    if "final" not in inputs:
        return inputs["peak"] * jnp.minimum(rising, 1.0)
    progress = jnp.clip((step - warmup) / jnp.maximum(inputs["steps"] - warmup, 1.0), 0.0, 1.0)
    falling = inputs["final"] + (1 - inputs["final"]) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return inputs["peak"] * jnp.where(step < warmup, rising, falling)
