"""Image classification with a vision transformer (arXiv 2010.11929): modules and task.

Pre-norm blocks as the decoder's, with attention among all patches and a plain MLP; learned positions; the mean over
patches is classified, so that the sequence divides over `tensor` as the image's patches do.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Key

from jaxtrain.config import VitConfig
from jaxtrain.models.layers import Residual, RMSNorm, output_scale, with_axes
from jaxtrain.models.parameters import normal, parameter
from jaxtrain.models.remat import KEEP_ALL, Remat
from jaxtrain.models.supervised import Supervised
from jaxtrain.models.task import AbstractBatch, ArraySpec, Batch, Flops, Mean, Mergeable, Params, Sums, run_layers
from jaxtrain.ops.dropout import dropout
from jaxtrain.ops.full_attention import full_attention
from jaxtrain.ops.projection import enter, leave
from jaxtrain.sharding import constrain

ATTENTION_SITE, MLP_SITE = 0, 1
EMBED_SITE, SHIFT_SITE = 0, 1
"""The places with random numbers of their own, in a layer and in the embedding, whose keys differ."""

Images = Float[Array, "rows height width channels"]


class PatchEmbedding(nnx.Module):
    """Each patch's pixels times a matrix, plus a learned vector for its place."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        pixels, scale = config.patch**2 * config.channels, normal(config.initial_scale)
        # Of the same scale: what is where must count as much as what is seen, or learning starts with a bag of patches.
        self.projection = parameter(rngs, (pixels, config.embed), (None, "embed"), "matrix", scale)
        self.positions = parameter(rngs, (config.patches, config.embed), (None, "embed"), "embedding", scale)

    def __call__(self, images: Images, dtype: Any) -> Residual:
        patches = cut_into_patches(images, self.config.patch).astype(dtype)
        x = patches @ self.projection[...] + self.positions[...].astype(dtype)
        return constrain(x, "batch", "residual_seq", "embed")


class SelfAttention(nnx.Module):
    """Multi-head attention among all patches of an image."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        embed, heads, size = config.embed, config.heads, config.embed // config.heads
        inner, outer = normal(config.initial_scale), normal(output_scale(config))
        axes = ("embed", "heads", "head_dim")
        self.query = parameter(rngs, (embed, heads, size), axes, "matrix", inner)
        self.key = parameter(rngs, (embed, heads, size), axes, "matrix", inner)
        self.value = parameter(rngs, (embed, heads, size), axes, "matrix", inner)
        self.output = parameter(rngs, (heads, size, embed), ("heads", "head_dim", "embed"), "matrix", outer)

    def __call__(self, x: Residual) -> Residual:
        projected = enter(x, *(with_axes(weight) for weight in (self.query, self.key, self.value)))
        q, k, v = (
            checkpoint_name(constrain(each, "batch", "seq", "heads", "head_dim"), name)
            for each, name in zip(projected, ("query", "key", "value"), strict=True)
        )
        mixed = constrain(full_attention(q, k, v), "batch", "seq", "heads", "head_dim")
        mixed = checkpoint_name(mixed, "attention")
        return constrain(leave(mixed, *with_axes(self.output)), "batch", "residual_seq", "embed")


class MLP(nnx.Module):
    """down(gelu(up x))."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        embed, mlp = config.embed, config.mlp
        self.up = parameter(rngs, (embed, mlp), ("embed", "mlp"), "matrix", normal(config.initial_scale))
        self.down = parameter(rngs, (mlp, embed), ("mlp", "embed"), "matrix", normal(output_scale(config)))

    def __call__(self, x: Residual) -> Residual:
        (up,) = enter(x, with_axes(self.up))
        hidden = constrain(jax.nn.gelu(checkpoint_name(up, "up")), "batch", "seq", "mlp")
        hidden = checkpoint_name(hidden, "hidden")
        return constrain(leave(hidden, *with_axes(self.down)), "batch", "residual_seq", "embed")


class EncoderLayer(nnx.Module):
    """x + attention(norm x), then x + mlp(norm x); dropout on what is added."""

    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_norm = RMSNorm(config.embed, config.norm_epsilon, rngs=rngs)
        self.attention = SelfAttention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.embed, config.norm_epsilon, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: Residual, rows: Int[Array, " rows"], key: Key[Array, ""] | None) -> Residual:
        rate = self.config.dropout
        attended = dropout(self.attention(self.attention_norm(x)), rate, key, ATTENTION_SITE, rows)
        x = checkpoint_name(x + attended, "residual")
        return x + dropout(self.mlp(self.mlp_norm(x)), rate, key, MLP_SITE, rows)


class _Head(nnx.Module):
    def __init__(self, config: VitConfig, *, rngs: nnx.Rngs):
        shape = (config.embed, config.classes)
        self.norm = RMSNorm(config.embed, config.norm_epsilon, rngs=rngs)
        self.projection = parameter(rngs, shape, ("embed", None), "head", normal(config.initial_scale))


@dataclass(frozen=True)
class VisionTask(Supervised):
    """Which of `classes` an image shows. A `Staged` task.

    A batch holds image (f32[rows, image, image, channels]), label (i32[rows]) and weights (f32[rows]; 0: not counted).
    """

    config: VitConfig
    compute_dtype: Any = jnp.float32
    remat: Remat = KEEP_ALL
    modules: ClassVar = {"embed": PatchEmbedding, "layers": EncoderLayer, "head": _Head}

    def metrics(self, params: Params, batch: Batch) -> dict[str, Mergeable]:
        """Cross-entropy and the share of images that are classified right, per counted image."""
        carry, _ = run_layers(self, params, self.embed(params, batch, None), self.context(batch), None)
        logits, weights = self._logits(params, carry), batch["weights"]
        right = jnp.sum(weights * (logits.argmax(-1) == batch["label"]))
        return {"loss": Mean(_cross_entropy(logits, batch), weights.sum()), "accuracy": Mean(right, weights.sum())}

    def context(self, batch: Batch) -> Int[Array, " rows"]:
        return batch["row"]

    def embed(self, params: Params, batch: Batch, key: Key[Array, ""] | None) -> Residual:
        images = batch["image"]
        if key is not None:
            images = shift_images(images, self.config.shift, key, SHIFT_SITE, batch["row"])
        x = self.module("embed", params["embed"])(images, self.compute_dtype)
        return dropout(x, self.config.dropout, key, EMBED_SITE, batch["row"])

    def layer(
        self, params: Params, carry: Residual, context: Int[Array, " rows"], key: Key[Array, ""] | None
    ) -> tuple[Residual, Sums]:
        return self.module("layers", params)(carry, context, key), {}

    def head(self, params: Params, carry: Residual, batch: Batch) -> Sums:
        return {"cross_entropy": _cross_entropy(self._logits(params, carry), batch)}

    def _logits(self, params: Params, x: Residual) -> Float[Array, "rows classes"]:
        head = self.module("head", params["head"])
        pooled = constrain(head.norm(x).astype(jnp.float32).mean(1), "batch", "embed")
        return pooled @ head.projection[...]

    def example_batch(self, rows: int) -> AbstractBatch:
        side, channels = self.config.image, self.config.channels
        return {
            "image": ArraySpec((rows, side, side, channels), jnp.float32, ("batch", None, None, None)),
            "label": ArraySpec((rows,), jnp.int32, ("batch",)),
            "weights": ArraySpec((rows,), jnp.float32, ("batch",)),
        }

    def flops(self, rows: int) -> Flops:
        """2 per weight and patch in matrix products, 4 · embed per pair of patches and layer in attention, the head.

        Every patch sees every other, so attention is counted whole.
        """
        config, patches = self.config, self.config.patches
        per_patch = config.layers * (4 * config.embed**2 + 2 * config.embed * config.mlp)
        per_patch += config.patch**2 * config.channels * config.embed
        attention = 4.0 * rows * config.layers * patches**2 * config.embed
        products = 2.0 * rows * (patches * per_patch + config.embed * config.classes)
        return Flops(forward=products + attention, attention=attention)

    def shrunk(self) -> "VisionTask":
        """Two layers, narrow heads and at most 4×4 patches."""
        config = self.config
        small = {"layers": 2, "embed": 8 * config.heads, "mlp": 16 * config.heads}
        return replace(self, config=config.model_copy(update={**small, "image": min(config.image, 4 * config.patch)}))


def cut_into_patches(images: Images, size: int) -> Float[Array, "rows patches pixels"]:
    """The patches row by row, each with its pixels row by row."""
    rows, height, width, channels = images.shape
    grid = images.reshape(rows, height // size, size, width // size, size, channels)
    return grid.swapaxes(2, 3).reshape(rows, (height // size) * (width // size), size * size * channels)


def shift_images(images: Images, most: int, key: Key[Array, ""], site: int, rows: Int[Array, " rows"]) -> Images:
    """Each image moved by up to `most` pixels down and right or up and left, with 0 where nothing was.

    How far is a function of (key, site, global row), as a dropout mask is.
    """
    if most == 0:
        return images
    site_key = jax.random.fold_in(key, site)
    offsets = jax.vmap(lambda row: jax.random.randint(jax.random.fold_in(site_key, row), (2,), -most, most + 1))(rows)
    for axis in (1, 2):
        length = images.shape[axis]
        padded = jnp.pad(images, [(most, most) if dimension == axis else (0, 0) for dimension in range(4)])
        # Choosing among whole shifted batches needs no gather, which a mesh would have to communicate for.
        choices = range(-most, most + 1)
        shifted = [jax.lax.slice_in_dim(padded, most - offset, most - offset + length, axis=axis) for offset in choices]
        chosen = [(offsets[:, axis - 1] == offset)[:, None, None, None] for offset in choices]
        images = jnp.select(chosen, shifted)
    return images


def _cross_entropy(logits: Float[Array, "rows classes"], batch: Batch) -> Float[Array, ""]:
    """The weighted sum over rows, in float32."""
    is_label = jnp.arange(logits.shape[-1]) == batch["label"][:, None]
    of_label = jnp.sum(jnp.where(is_label, jax.nn.log_softmax(logits), 0), -1)
    return -jnp.sum(batch["weights"] * of_label)
