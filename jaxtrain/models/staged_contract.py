"""Whether a task can be trained in stages: it has the parts, and its loss is what they give together.

`contract` judges the parts; here is what only stages ask of them. Everything is evaluated abstractly.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import ConfigError
from jaxtrain.models.contract import computed_with
from jaxtrain.models.parameters import path_name
from jaxtrain.models.task import Staged, Task, abstract_batch, staged_losses

PARTS = tuple(name for name in vars(Staged) if not name.startswith("_") and not hasattr(Task, name))
_ROWS = 2
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def refuse_what_has_no_stages(task: Task, stages: int, dtype: Any = jnp.float32) -> None:
    """Raises where `task` can't be trained in so many stages.

    Args:
        dtype: of the computation.

    Raises:
        ConfigError: it lacks a part, hands on what has no gradient, or computes its loss otherwise than by its parts.
    """
    name = f"mesh.pipeline={stages}, but a {type(task).__name__}"
    if missing := [part for part in PARTS if not hasattr(task, part)]:
        raise ConfigError(
            f"{name} isn't cut into layers; it lacks {', '.join(missing)}: "
            f"jaxtrain/models/task.py says what a Staged task has, or set mesh.pipeline=1"
        )
    assert isinstance(task, Staged)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = computed_with(jax.eval_shape(task.init, key), dtype)
    batch = abstract_batch(task, _ROWS)
    carry = jax.eval_shape(task.embed, params, batch, key)
    for path, leaf in jax.tree_util.tree_leaves_with_path(carry):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ConfigError(
                f"{name}'s embed(params, batch, key) gives {path_name(path)} as {leaf.dtype}; what travels between "
                f"stages has a gradient, so look up other arrays in context(batch), or set mesh.pipeline=1"
            )
    ends = {name: part for name, part in params.items() if name != "layers"}
    for part, function, arguments in (("embed", task.embed, (batch, key)), ("head", task.head, (carry, batch))):
        try:
            jax.eval_shape(function, ends, *arguments)
        except KeyError as error:
            if error.args != ("layers",):
                raise
            raise ConfigError(
                f"{name}'s {part} reads params['layers'], of which a stage has only its own; let layer give what "
                f"{part} needs, or set mesh.pipeline=1"
            ) from None
    if not _equal(task.losses, lambda *arguments: staged_losses(task, *arguments), params, batch, key):
        raise ConfigError(
            f"{name}'s losses(params, batch, key) is computed otherwise than its embed, layers and head together, "
            f"which are what stages compute; let it return staged_losses(self, params, batch, key) of "
            f"jaxtrain.models.task, or set mesh.pipeline=1"
        )


def _equal(one: Any, other: Any, *arguments: Any) -> bool:
    """Whether two functions are the same operations on arguments like these."""
    traced = [jax.make_jaxpr(function)(*arguments) for function in (one, other)]
    texts = [_ADDRESS.sub("", str(each.jaxpr)) for each in traced]
    names = [list(jax.eval_shape(function, *arguments)) for function in (one, other)]
    constants = [[np.asarray(array).tobytes() for array in each.consts] for each in traced]
    return texts[0] == texts[1] and names[0] == names[1] and constants[0] == constants[1]
