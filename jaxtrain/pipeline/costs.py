"""How the parts of a staged task compare in work, so that stages can be made equally slow."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import jaxprs_in_params

from jaxtrain.models.parameters import unbox
from jaxtrain.models.task import Staged, abstract_batch


class Costs(NamedTuple):
    """Floating-point operations of matrix products, forward and backward, on one example."""

    layer: float
    embed: float
    head: float


def costs_of(task: Staged) -> Costs:
    """The work of one layer, of the embedding and of the head.

    A backward pass takes twice the forward one; what is not kept of a layer is computed once more.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = unbox(jax.eval_shape(task.init, key))
    batch = abstract_batch(task, 1)
    carry = jax.eval_shape(task.embed, params, batch, None)
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params["layers"])

    def call_layer(layer: Any, carry: Any, batch: Any) -> Any:
        return task.layer(layer, carry, task.context(batch), None)

    passes = 3 if task.remat.policy == "none" else 4
    return Costs(
        passes * products(call_layer, layer, carry, batch),
        3 * products(lambda params, batch: task.embed(params, batch, None), params, batch),
        3 * products(task.head, params, carry, batch),
    )


def products(function: Callable[..., Any], *arguments: Any) -> float:
    """Operations of the matrix products that a function does on arrays of the arguments' shapes."""
    return _products(jax.make_jaxpr(function)(*arguments).jaxpr)


def _products(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2.0 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        inside = [_products(each) for each in jaxprs_in_params(equation.params)]
        turns = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        total += turns * (max(inside, default=0.0) if equation.primitive.name == "cond" else sum(inside))
    return total
