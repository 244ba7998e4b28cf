"""Attention on GPUs by a flash kernel that honours segments (arXiv 2205.14135): no scores are ever stored.

The kernel is JAX's own, written in Pallas. It sits in a `shard_map` over every mesh axis that splits its operands:
outside of one, the partitioner would gather the whole global batch to every device.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxtrain.sharding import BATCH_AXES, Layout

QUERY_BLOCK = 128
_BLOCKS = BlockSizes(
    block_q=QUERY_BLOCK, block_k=QUERY_BLOCK, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
)


def why_not(dtype: jnp.dtype, length: int, window: int | None) -> str | None:
    """Why the kernel can't compute such an attention, or None where it can."""
    if dtype != jnp.bfloat16:
        return f"the flash kernel multiplies {dtype} in TF32"
    if window is not None:
        return "the flash kernel knows no window"
    if length % QUERY_BLOCK:
        return f"the flash kernel takes sequences in blocks of {QUERY_BLOCK}, and {length} is not a multiple"
    return None


def flash_attention(
    q: Float[Array, "rows seq heads head_dim"],
    k: Float[Array, "rows seq kv_heads head_dim"],
    v: Float[Array, "rows seq kv_heads head_dim"],
    segments: Int[Array, "rows seq"],
    layout: Layout,
    interpret: bool = False,
) -> Float[Array, "rows seq heads head_dim"]:
    """What `attention.causal_attention` computes, where `why_not` has no objection.

    `interpret` runs the kernel without a GPU, for tests.
    """
    batch, tensor = layout.split_axes(*BATCH_AXES), layout.split_axes("tensor")
    heads = PartitionSpec(batch or None, None, tensor or None)
    return jax.shard_map(
        partial(_on_one_device, interpret=interpret),
        mesh=layout.mesh,
        in_specs=(heads, heads, heads, PartitionSpec(batch or None)),
        out_specs=heads,
        check_vma=False,
    )(q, k, v, segments)


def _on_one_device(q: Array, k: Array, v: Array, segments: Array, interpret: bool) -> Array:
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scale = 1 / math.sqrt(q.shape[-1])
    return mha(q, k, v, segments, sm_scale=scale, causal=True, block_sizes=_BLOCKS, interpret=interpret)
