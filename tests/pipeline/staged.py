"""A small staged task whose parts all matter: what a pipeline could get wrong shows in its gradient."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.models.parameters import normal, parameter, stack
from jaxtrain.models.remat import KEEP_ALL, Remat
from jaxtrain.models.task import ArraySpec, Flops, Mean, run_layers, staged_losses

INPUTS, MLP = 6, 16


@dataclass(frozen=True)
class Balanced:
    """Rows of numbers to rows of numbers, with a second loss term that each layer adds to.

    Noise follows the global row; where `tied`, the head uses the embedding's matrix.
    """

    layers: int
    embed_size: int = 8
    tied: bool = False
    noise: float = 0.0
    remat: Remat = KEEP_ALL

    @property
    def layer_count(self) -> int:
        return self.layers

    def init(self, key: Any) -> Any:
        embed, layers, head = (nnx.Rngs(params=jax.random.fold_in(key, i)) for i in range(3))
        size = self.embed_size
        params = {
            "embed": {"table": parameter(embed, (INPUTS, size), (None, "embed"), "embedding", normal(0.5))},
            "layers": stack(self._init_layer, layers.params(), self.layers),
            "head": {"scale": parameter(head, (size,), ("norm",), "norm", normal(1.0))},
        }
        if not self.tied:
            params["head"]["projection"] = parameter(head, (size, INPUTS), ("embed", None), "head", normal(0.5))
        return params

    def _init_layer(self, key: Any) -> Any:
        rngs, size = nnx.Rngs(params=key), self.embed_size
        return {
            "up": parameter(rngs, (size, MLP), ("embed", "mlp"), "matrix", normal(0.4)),
            "down": parameter(rngs, (MLP, size), ("mlp", "embed"), "matrix", normal(0.4)),
            "scale": parameter(rngs, (size,), ("norm",), "norm", normal(1.0)),
        }

    def denominators(self, batch: Any) -> Any:
        total, rows = batch["weights"].sum(), batch["weights"].shape[0]
        return {"error": jnp.where(total == 0, 1.0, total), "balance": jnp.float32(10 * rows)}

    def losses(self, params: Any, batch: Any, key: Any) -> Any:
        return staged_losses(self, params, batch, key)

    def context(self, batch: Any) -> Any:
        return {"row": batch["row"], "bias": jnp.sin(batch["x"].sum(-1))}

    def embed(self, params: Any, batch: Any, key: Any) -> Any:
        return {"x": self._noisy(batch["x"] @ params["embed"]["table"], batch["row"], key)}

    def layer(self, params: Any, carry: Any, context: Any, key: Any) -> Any:
        hidden = checkpoint_name(jnp.tanh(carry["x"] @ params["up"] + context["bias"][:, None]), "hidden")
        x = carry["x"] + self._noisy(params["scale"] * (hidden @ params["down"]), context["row"], key)
        return {"x": x}, {"balance": (hidden**2).mean(-1).sum()}

    def head(self, params: Any, carry: Any, batch: Any) -> Any:
        projection = params["embed"]["table"].T if self.tied else params["head"]["projection"]
        error = (params["head"]["scale"] * carry["x"]) @ projection - batch["y"]
        return {"error": (batch["weights"] * (error**2).sum(-1)).sum()}

    def _noisy(self, x: Any, rows: Any, key: Any) -> Any:
        if key is None or not self.noise:
            return x
        return x * jax.vmap(lambda row: 1 + self.noise * jax.random.normal(jax.random.fold_in(key, row), x.shape[1:]))(
            rows
        )

    def metrics(self, params: Any, batch: Any) -> Any:
        carry, _ = run_layers(self, params, self.embed(params, batch, None), self.context(batch), None)
        return {"loss": Mean(self.head(params, carry, batch)["error"], batch["weights"].sum())}

    def counted(self, batch: Any) -> Any:
        return (batch["weights"] > 0).sum()

    def example_batch(self, rows: int) -> Any:
        row, one = ArraySpec((rows, INPUTS), jnp.float32, ("batch", None)), ArraySpec((rows,), jnp.float32, ("batch",))
        return {"x": row, "y": row, "weights": one}

    def flops(self, rows: int) -> Flops:
        return Flops(forward=2.0 * rows * self.embed_size * (2 * INPUTS + 2 * self.layers * MLP), attention=0.0)

    def shrunk(self) -> "Balanced":
        return replace(self, layers=2)


def make_batch(rows: int = 8) -> dict[str, np.ndarray]:
    """Rows of unlike weights; those of the last quarter are filler."""
    random = np.random.default_rng(0)
    weights = random.integers(0, 3, rows).astype(np.float32)
    weights[-(rows // 4) :] = 0
    batch = {name: random.standard_normal((rows, INPUTS)).astype(np.float32) for name in ("x", "y")}
    return {**batch, "weights": weights}
