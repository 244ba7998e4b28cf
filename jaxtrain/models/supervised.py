"""What our families share: parameters in three parts, and a cross-entropy whose examples carry weights."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

from jaxtrain.config import DecoderConfig, VitConfig
from jaxtrain.models.parameters import graph_of, parameters_of, stack
from jaxtrain.models.task import Batch, Denominators, Params, Staged, Sums, staged_losses

PARTS = ("embed", "layers", "head")


class Supervised:
    """A `Staged` task of ours, whose batches have `weights`, 0 where a target isn't counted: one term, a mean.

    Attributes:
        modules: what makes each of `PARTS` of the config; of `layers`, one layer.
    """

    config: DecoderConfig | VitConfig
    modules: ClassVar[Mapping[str, Callable[..., nnx.Module]]]

    @property
    def layer_count(self) -> int:
        """Layers that a pipeline can distribute."""
        return self.config.layers

    def init(self, key: Key[Array, ""]) -> Any:
        """Each part's key is folded from its place, not drawn in order."""
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(PARTS)}

        def made(name: str, key: Key[Array, ""]) -> Any:
            return parameters_of(self.modules[name](self.config, rngs=nnx.Rngs(params=key)))

        layers = stack(lambda key: made("layers", key), keys["layers"], self.config.layers)
        return {"embed": made("embed", keys["embed"]), "layers": layers, "head": made("head", keys["head"])}

    def module(self, name: str, params: Params) -> Any:
        """A part, or one layer, with these parameters."""
        return nnx.merge(self._graphs[name], nnx.State(params))

    @cached_property
    def _graphs(self) -> dict[str, nnx.GraphDef]:
        return {name: graph_of(make, self.config) for name, make in self.modules.items()}

    def denominators(self, batch: Batch) -> Denominators:
        total = batch["weights"].sum()
        return {"cross_entropy": jnp.where(total == 0, 1.0, total)}

    def counted(self, batch: Batch) -> Int[Array, ""]:
        return (batch["weights"] > 0).sum()

    def losses(self: Staged, params: Params, batch: Batch, key: Key[Array, ""]) -> Sums:
        return staged_losses(self, params, batch, key)
