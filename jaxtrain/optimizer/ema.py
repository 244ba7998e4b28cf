"""The moving average of the weights: float32, beside the weights, of the trained ones only."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.errors import ConfigError
from jaxtrain.optimizer.frozen import complete, like

Weights = Literal["params", "ema"]
"""The two sets of weights that a state can hold."""


def updated_average(average: Any, params: Any, step: Int[Array, ""], decay: Float[Array, ""]) -> Any:
    """The average after update number `step` (the first is 1), which made `params`.

    average ← d · average + (1 - d) · params with d = min(decay, 1 - 1/step). While the average is younger than its
    window of 1 / (1 - decay) steps it is the plain mean of the weights after each step so far, so that the initial
    values, which nothing was learnt in, have no part in it; from then on it forgets exponentially.
    """
    keep = jnp.minimum(decay, 1 - 1 / step.astype(jnp.float32))
    return jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, average, like(params, average))


def weights(state: Any, which: Weights) -> Any:
    """The parameters to evaluate or generate with: `params` themselves, or their average.

    `state` needs `params`, and for the average `ema`, which has None where a parameter is frozen.

    Raises:
        ConfigError: the run keeps no average.
    """
    if which == "params":
        return state["params"]
    if "ema" not in state:
        raise ConfigError("this run keeps no average of the weights (ema: null); take its params")
    return complete(state["ema"], state["params"])
