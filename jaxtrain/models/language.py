"""Language modelling with the decoder family: the task that the trainer sees."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from jaxtrain.config import DecoderConfig
from jaxtrain.models.decoder import EMBED_SITE, DecoderContext, DecoderLayer, KeysValues, LayerCache, rotary_angles
from jaxtrain.models.layers import RMSNorm
from jaxtrain.models.parameters import normal, parameter
from jaxtrain.models.remat import KEEP_ALL, Remat
from jaxtrain.models.supervised import Supervised
from jaxtrain.models.task import AbstractBatch, ArraySpec, Batch, Flops, Mean, Mergeable, Params, Sums, run_layers
from jaxtrain.ops.cross_entropy import CrossEntropySettings, cross_entropy
from jaxtrain.ops.dropout import dropout
from jaxtrain.ops.embedding import embed
from jaxtrain.sharding import constrain


class _Embedding(nnx.Module):
    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        shape, axes = (config.vocab, config.embed), ("vocab", "embed")
        self.table = parameter(rngs, shape, axes, "embedding", normal(config.initial_scale))


class _Head(nnx.Module):
    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.norm = RMSNorm(config.embed, config.norm_epsilon, rngs=rngs)
        if not config.tied_embeddings:
            shape, axes = (config.embed, config.vocab), ("embed", "vocab")
            self.projection = parameter(rngs, shape, axes, "head", normal(config.initial_scale))


jax.tree_util.register_dataclass(DecoderContext, ["cosine", "sine", "segments", "rows"], [])


@dataclass(frozen=True)
class LanguageTask(Supervised):
    """Next-token prediction on packed rows of `sequence` tokens. A `Staged` task, and a `Generative` one.

    A batch holds tokens, targets, segments, positions (i32[rows, seq]; segment 0 is padding) and weights
    (f32[rows, seq]; 0: the target isn't counted).
    """

    config: DecoderConfig
    sequence: int
    compute_dtype: Any = jnp.float32
    remat: Remat = KEEP_ALL
    modules: ClassVar = {"embed": _Embedding, "layers": DecoderLayer, "head": _Head}

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.config.vocab

    def metrics(self, params: Params, batch: Batch) -> dict[str, Mergeable]:
        """Plain cross-entropy per counted token, without smoothing, z-loss or dropout."""
        carry, _ = run_layers(self, params, self.embed(params, batch, None), self.context(batch), None)
        total = self._cross_entropy(params, carry, batch, replace(self._settings, z=0.0, label_smoothing=0.0))
        return {"loss": Mean(total, batch["weights"].sum())}

    def context(self, batch: Batch) -> DecoderContext:
        cosine, sine = rotary_angles(self.config, batch["positions"])
        return DecoderContext(cosine, sine, batch["segments"], batch["row"])

    def embed(self, params: Params, batch: Batch, key: Key[Array, ""] | None) -> Float[Array, "rows seq embed"]:
        x = embed(params["embed"]["table"], batch["tokens"], self.compute_dtype)
        return dropout(x, self.config.dropout, key, EMBED_SITE, batch["row"])

    def layer(
        self, params: Params, carry: Float[Array, "rows seq embed"], context: DecoderContext, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, "rows seq embed"], Sums]:
        return self.module("layers", params)(carry, context, key)[0], {}

    def head(self, params: Params, carry: Float[Array, "rows seq embed"], batch: Batch) -> Sums:
        return {"cross_entropy": self._cross_entropy(params, carry, batch, self._settings)}

    def prefill(
        self, params: Params, tokens: Int[Array, "rows prompt"], first: Int[Array, " rows"], slots: int
    ) -> tuple[Float[Array, "rows vocab"], KeysValues]:
        place = jnp.arange(tokens.shape[1])
        inside = place >= first[:, None]
        batch = {"tokens": tokens, "positions": jnp.where(inside, place - first[:, None], 0), "row": first}
        context = self.context({**batch, "segments": inside.astype(jnp.int32)})

        def layer(x: Array, params: Params) -> tuple[Array, KeysValues]:
            return self.module("layers", params)(x, context, None)

        x, remembered = jax.lax.scan(layer, self.embed(params, batch, None), params["layers"])
        free = slots - tokens.shape[1]
        cache = jax.tree.map(lambda kept: jnp.pad(kept, [(0, 0), (0, 0), (0, free), (0, 0), (0, 0)]), remembered)
        return self._logits(params, x[:, -1]), _constrain_cache(cache)

    def decode(
        self,
        params: Params,
        tokens: Int[Array, " rows"],
        first: Int[Array, " rows"],
        slot: Int[Array, ""],
        cache: KeysValues,
    ) -> tuple[Float[Array, "rows vocab"], KeysValues]:
        batch = {"tokens": tokens[:, None], "positions": (slot - first)[:, None], "row": first}
        context = self.context({**batch, "segments": jnp.ones_like(batch["tokens"])})

        def layer(x: Array, of_layer: tuple[Params, KeysValues]) -> tuple[Array, KeysValues]:
            params, remembered = of_layer
            return self.module("layers", params)(x, context, None, LayerCache(remembered, first, slot))

        x, new = jax.lax.scan(layer, self.embed(params, batch, None), (params["layers"], cache))
        cache = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=2), cache, new)
        return self._logits(params, x[:, 0]), _constrain_cache(cache)

    def _logits(self, params: Params, x: Float[Array, "rows embed"]) -> Float[Array, "rows vocab"]:
        x, projection = self._before_logits(params, x)
        logits = jnp.matmul(x, projection.astype(x.dtype), preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return constrain(logits if cap is None else cap * jnp.tanh(logits / cap), "batch", "vocab")

    def _cross_entropy(
        self, params: Params, x: Float[Array, "rows seq embed"], batch: Batch, settings: CrossEntropySettings
    ) -> Float[Array, ""]:
        x, projection = self._before_logits(params, x)
        return cross_entropy(x, projection, batch["targets"], batch["weights"], settings)

    def _before_logits(
        self, params: Params, x: Float[Array, "... embed"]
    ) -> tuple[Float[Array, "... embed"], Float[Array, "embed vocab"]]:
        """The two factors of the logits."""
        head = self.module("head", params["head"])
        projection = params["embed"]["table"].T if self.config.tied_embeddings else head.projection[...]
        return head.norm(x), projection

    @cached_property
    def _settings(self) -> CrossEntropySettings:
        loss = self.config.loss
        return CrossEntropySettings(loss.chunk, loss.z, loss.label_smoothing, self.config.logit_softcap)

    def example_batch(self, rows: int) -> AbstractBatch:
        shape, axes = (rows, self.sequence), ("batch", "seq")
        integers = {name: ArraySpec(shape, jnp.int32, axes) for name in ("tokens", "targets", "segments", "positions")}
        return {**integers, "weights": ArraySpec(shape, jnp.float32, axes)}

    def flops(self, rows: int) -> Flops:
        """2 per weight and token in matrix products (the embedding lookup has none), plus causal attention.

        Attention: 4 · heads · head_dim per visible (query, key) pair, of which a row of T tokens in one document has
        T(T+1)/2, or less with a window. Packed rows need less; the count is for whole rows.
        """
        config, length = self.config, self.sequence
        size, heads, kv_heads = config.resolved_head_dim, config.heads, config.resolved_kv_heads
        layer = config.embed * size * (2 * heads + 2 * kv_heads) + 3 * config.embed * config.mlp
        weights = config.layers * layer + config.embed * config.vocab
        reach = min(config.window or length, length)
        pairs = reach * (reach + 1) / 2 + (length - reach) * reach
        attention = 4.0 * rows * config.layers * heads * size * pairs
        return Flops(forward=2.0 * weights * rows * length + attention, attention=attention)

    def shrunk(self) -> "LanguageTask":
        """Two layers, narrow heads and a short row, with the ratio of heads to key heads kept."""
        config = self.config
        group = config.heads // config.resolved_kv_heads
        heads = max(4, 2 * group)
        small = config.model_copy(
            update={
                "vocab": 512,
                "layers": 2,
                "embed": heads * 8,
                "heads": heads,
                "kv_heads": heads // group,
                "head_dim": 8,
                "mlp": heads * 16,
                "window": None if config.window is None else 16,
            }
        )
        return replace(self, config=small, sequence=64)


def _constrain_cache(cache: KeysValues) -> KeysValues:
    return KeysValues(*(constrain(kept, "layers", "batch", "seq", "kv_heads", "head_dim") for kept in cache))
