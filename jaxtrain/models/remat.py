"""Rematerialisation: which of a layer's tensors the backward pass finds in memory, and which it computes again.

A layer names tensors with `jax.ad_checkpoint.checkpoint_name`; a policy says by name what becomes of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.ad_checkpoint import checkpoint_policies
from jax.extend.core import subjaxprs

from jaxtrain.errors import ConfigError
from jaxtrain.ops.projection import PROJECTION


@dataclass(frozen=True)
class Remat:
    """What is kept of a layer for the backward pass.

    Attributes:
        policy: `none`: all that it needs; `full`: only the layer's input; `dots`: the results of matrix products with
            weights too; `named`: the layer's input, what `save` names, and what `offload` names in the host's memory.
    """

    policy: Literal["none", "full", "dots", "named"] = "none"
    save: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()


KEEP_ALL = Remat()


def checkpointed(layer: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """`layer`, so that its gradient keeps what `remat` says."""
    if remat.policy == "none":
        return layer
    # The layer runs in a scan, where nothing can be merged across passes that the barrier would have to prevent.
    return jax.checkpoint(layer, prevent_cse=False, policy=_policy(remat))


def _policy(remat: Remat) -> Any:
    if remat.policy == "dots":
        return checkpoint_policies.save_from_both_policies(
            checkpoint_policies.dots_with_no_batch_dims_saveable, checkpoint_policies.save_only_these_names(PROJECTION)
        )
    if remat.policy == "full":
        return None
    return checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(remat.save),
        names_which_can_be_offloaded=list(remat.offload),
        offload_src="device",
        offload_dst="pinned_host",
    )


def refuse_unknown_names(remat: Remat, function: Callable[..., Any], *arguments: Any) -> None:
    """Raises where `remat` names a tensor that `function` doesn't have: nothing would be kept, without a word.

    Raises:
        ConfigError: with the names that there are.
    """
    known = _names_in(jax.make_jaxpr(function)(*arguments).jaxpr)
    for key, names in (("remat_save", remat.save), ("remat_offload", remat.offload)):
        if unknown := sorted(set(names) - known):
            there = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{key}: the model has no tensor named {', '.join(unknown)}; it has {there}")


def _names_in(jaxpr: Any) -> set[str]:
    names = {equation.params["name"] for equation in jaxpr.eqns if equation.primitive.name == "name"}
    return names.union(*(_names_in(inner) for inner in subjaxprs(jaxpr)))
