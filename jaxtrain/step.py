"""One training step and one evaluation step: the mathematics, the same on every layout."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jaxtrain.gradient import Gradient, total_loss
from jaxtrain.models.task import Batch, Mergeable, Task
from jaxtrain.optimizer import complete, learning_rate, like, updated_average

State = dict[str, Any]
"""{"params", "optimizer", "step": i32[], updates done}, and "ema" where the config wants it. All that training changes.

"optimizer" and "ema" have no part for frozen parameters.
"""

Metrics = dict[str, Array]

StepInputs = dict[str, Any]
"""{"key": the run's random key, "schedule": `optimizer.ScheduleInputs`, with an average its "ema_decay"}: not compiled
in. Fixed in a run, but for the schedule's peak where that follows the batch, and for two that aren't always there:
"flags", i32[devices, flags], where processes have something to tell each other, and "limits", f32[2], the largest loss
and gradient norm of an update that is applied."""

Measure = Callable[[Any, Any, Any], Any]
"""(gradients before clipping, parameters before the update, and after it) -> arrays that a step gives as a metric."""


def initial_state(
    params: Any, optimizer: optax.GradientTransformation, trained: Any = None, average: bool = False
) -> State:
    """The state before the first update.

    Args:
        trained: `params` with None in place of frozen ones; None: all are trained.
        average: whether a moving average of the weights is kept.
    """
    trained = params if trained is None else trained
    state = {"params": params, "optimizer": optimizer.init(trained), "step": jnp.zeros((), jnp.int32)}
    return {**state, "ema": jax.tree.map(jnp.copy, trained)} if average else state


def with_rows(batch: Batch) -> Batch:
    """The batch with `row`, each row's index in the global batch, which dropout masks are keyed by."""
    rows = next(iter(batch.values())).shape[0]
    return {**batch, "row": jnp.arange(rows, dtype=jnp.int32)}


def make_train_step(
    task: Task,
    gradient: Gradient,
    optimizer: optax.GradientTransformation,
    clip: float | None,
    measure: Measure | None = None,
) -> Callable[[State, Batch, StepInputs], tuple[State, Metrics]]:
    """(state, global batch, inputs) -> (state after one update, metrics).

    Metrics: loss, grad_norm (before clipping), learning_rate (that was applied), tokens (counted ones of this batch),
    step (updates done), skipped. Where the loss or the gradient's norm isn't finite, or above its limit among the
    inputs, the whole state, step included, stays bit-unchanged and `skipped` is true. `gradient` gives None for frozen
    parameters: they have no part in the norm, and no update. With `measure` there is one metric more, `norms`, which is
    what it gives; and with flags among the inputs `flags`, i32[flags]: those that any device has raised.
    """

    def train_step(state: State, batch: Batch, inputs: StepInputs) -> tuple[State, Metrics]:
        batch = with_rows(batch)
        key = jax.random.fold_in(inputs["key"], state["step"])
        denominators = task.denominators(batch)
        gradients, sums = gradient(state["params"], batch, denominators, key)
        loss, norm = total_loss(sums, denominators), optax.tree.norm(gradients)
        good = jnp.isfinite(loss) & jnp.isfinite(norm)
        if "limits" in inputs:
            good &= (loss <= inputs["limits"][0]) & (norm <= inputs["limits"][1])
        rate = learning_rate(state["step"] + 1, inputs["schedule"])
        updated = _update(state, clip_by_norm(gradients, norm, clip), optimizer, rate, inputs)
        metrics = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "tokens": task.counted(batch)}
        if measure is not None:
            metrics["norms"] = measure(gradients, state["params"], updated["params"])
        if "flags" in inputs:
            metrics["flags"] = inputs["flags"].max(axis=0)
        state = keep_if(good, updated, state)
        return state, {**metrics, "step": state["step"], "skipped": ~good}

    return train_step


def clip_by_norm(gradients: Any, norm: Float[Array, ""], limit: float | None) -> Any:
    """Gradients scaled down to a global norm of at most `limit`; called once, on the final gradient."""
    if limit is None:
        return gradients
    scale = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    return jax.tree.map(lambda gradient: gradient * scale, gradients)


def keep_if(condition: Bool[Array, ""], new: Any, old: Any) -> Any:
    """`new` where the condition holds, else `old`, bit for bit."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), new, old)


def _update(
    state: State, gradients: Any, optimizer: optax.GradientTransformation, rate: Float[Array, ""], inputs: StepInputs
) -> State:
    trained = like(state["params"], gradients)
    direction, optimizer_state = optimizer.update(gradients, state["optimizer"], trained)
    changed = jax.tree.map(lambda value, change: value - rate * change, trained, direction)
    step, params = state["step"] + 1, complete(changed, state["params"])
    updated = {"params": params, "optimizer": optimizer_state, "step": step}
    if "ema" in state:
        updated["ema"] = updated_average(state["ema"], params, step, inputs["ema_decay"])
    return updated


def make_eval_step(task: Task, cast: Callable[[Any], Any]) -> Callable[[Any, Batch], dict[str, Mergeable]]:
    """(params, batch) -> metrics of the batch, to be added over batches."""

    def eval_step(params: Any, batch: Batch) -> dict[str, Mergeable]:
        return task.metrics(cast(params), with_rows(batch))

    return eval_step
