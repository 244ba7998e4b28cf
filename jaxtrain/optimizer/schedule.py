"""The learning rate over the run. Every number of it, its shape too, is an input of the compiled step."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.config import Config, InverseSqrtSchedule, StableSchedule

ScheduleInputs = dict[str, Any]
"""Numbers of the schedule that are inputs of the compiled step, so that a sweep over them compiles nothing anew."""

_SHAPES = ("constant", "cosine", "linear", "sqrt", "inverse_sqrt")


def schedule_inputs(config: Config, steps: int, batch: int | None = None) -> ScheduleInputs:
    """The schedule's numbers for a run of so many steps, in those of its steps that have `batch` examples.

    Args:
        batch: examples per update; None: `global_batch`.
    """
    schedule = config.optimizer.schedule
    shape: str = schedule.kind
    start, warmup = config.warmup_steps, config.warmup_steps
    if isinstance(schedule, StableSchedule):
        shape, start = schedule.decay_shape, steps - schedule.decay_steps(steps)
    numbers = {
        "peak": config.optimizer.learning_rate * batch_factor(config, batch or config.global_batch),
        "warmup": max(warmup, 1) if isinstance(schedule, InverseSqrtSchedule) else warmup,
        "start": start,
        "end": steps,
        "final": getattr(schedule, "final", 0.0),
    }
    inputs = {name: jnp.float32(value) for name, value in numbers.items()}
    return {**inputs, "shape": jnp.int32(_SHAPES.index(shape))}


def batch_factor(config: Config, batch: int) -> float:
    """What `batch_scaling` multiplies the learning rate by where the batch has so many examples.

    With B₀ = `reference_batch`: linear B/B₀ (arXiv 1706.02677), sqrt √(B/B₀) (arXiv 2205.10287).
    """
    scaling, reference = config.optimizer.batch_scaling, config.optimizer.reference_batch
    if scaling == "none" or reference is None:
        return 1.0
    ratio: float = batch / reference
    return ratio if scaling == "linear" else ratio**0.5


def learning_rate(step: Int[Array, ""], inputs: ScheduleInputs) -> Float[Array, ""]:
    """The rate of update number `step` (the first is 1): linear warm-up to the peak, then the schedule's shape.

    The peak is reached at update `warmup`; cosine, linear and wsd end at `final` · peak with the run's last update,
    where the warm-up leaves room for it.
    """
    step = step.astype(jnp.float32)
    warmup, start, final = inputs["warmup"], inputs["start"], inputs["final"]
    rising = step / jnp.maximum(warmup, 1.0)
    progress = jnp.clip((step - start) / jnp.maximum(inputs["end"] - start, 1.0), 0.0, 1.0)
    left = {
        "constant": jnp.ones_like(step),
        "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
        "linear": 1 - progress,
        "sqrt": 1 - jnp.sqrt(progress),
        "inverse_sqrt": jnp.sqrt(warmup / jnp.maximum(step, 1.0)),
    }
    level = final + (1 - final) * jax.lax.select_n(inputs["shape"], *(left[shape] for shape in _SHAPES))
    return inputs["peak"] * jnp.where(step < warmup, rising, level)
