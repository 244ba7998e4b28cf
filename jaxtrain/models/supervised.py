"""What our families share: parameters in three parts, and a cross-entropy whose examples carry weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

from jaxtrain.config import DecoderConfig, VitConfig
from jaxtrain.models.parameters import parameters_of, stack
from jaxtrain.models.task import Batch, Denominators, Params, Staged, Sums, staged_losses

MakeModule = Callable[[nnx.Rngs], nnx.Module]


def init_parts(key: Key[Array, ""], embed: MakeModule, layer: MakeModule, layers: int, head: MakeModule) -> Any:
    """{"embed", "layers" (stacked), "head"}; each part's key is folded from its place, not drawn in order."""
    part = {name: jax.random.fold_in(key, i) for i, name in enumerate(("embed", "layers", "head"))}

    def made(make: MakeModule, key: Key[Array, ""]) -> Any:
        return parameters_of(make(nnx.Rngs(params=key)))

    return {
        "embed": made(embed, part["embed"]),
        "layers": stack(lambda key: made(layer, key), part["layers"], layers),
        "head": made(head, part["head"]),
    }


class WeightedCrossEntropy:
    """The loss of a `Staged` task whose batches have `weights`, 0 where a target isn't counted: one term, a mean."""

    config: DecoderConfig | VitConfig

    @property
    def layer_count(self) -> int:
        """Layers that a pipeline can distribute."""
        return self.config.layers

    def denominators(self, batch: Batch) -> Denominators:
        total = batch["weights"].sum()
        return {"cross_entropy": jnp.where(total == 0, 1.0, total)}

    def counted(self, batch: Batch) -> Int[Array, ""]:
        return (batch["weights"] > 0).sum()

    def losses(self: Staged, params: Params, batch: Batch, key: Key[Array, ""]) -> Sums:
        return staged_losses(self, params, batch, key)
