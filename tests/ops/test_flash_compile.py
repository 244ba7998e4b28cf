"""The flash kernels as programs for GPUs that aren't there."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.config import resolve_mesh
from jaxtrain.config.cluster import load_cluster
from jaxtrain.config.schema import MeshConfig
from jaxtrain.executables import without_compile_cache
from jaxtrain.ops.attention import causal_attention
from jaxtrain.planner import compile_only_devices, cuda_compiler_missing
from jaxtrain.sharding import Layout, make_mesh, use_layout

pytestmark = pytest.mark.skipif(bool(cuda_compiler_missing()), reason=cuda_compiler_missing())

KERNELS = ("flash_forward", "flash_query_gradient", "flash_key_gradients")


def compiled(
    name: str, rows: int, length: int, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> tuple[Any, Layout]:
    """Attention forward and backward in bfloat16 on one GPU."""
    layout = Layout.on(make_mesh(resolve_mesh(MeshConfig(), 1), compile_only_devices(load_cluster(name), 1)))

    def run(q: Any, k: Any, v: Any, segments: Any, gradient: Any) -> Any:
        with use_layout(layout):
            out, vjp = jax.vjp(lambda q, k, v: causal_attention(q, k, v, segments, window), q, k, v)
            return out, vjp(gradient)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.replicated())

    q, k = array(rows, length, heads, head_dim), array(rows, length, kv_heads, head_dim)
    traced = jax.jit(run).trace(q, k, k, array(rows, length, dtype=jnp.int32), q)
    with without_compile_cache():
        return traced.lower(lowering_platforms=("cuda",)).compile(), layout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window"), [("h100", None), ("h100", 4096), ("a100", None)])
def test_attention_of_8192_tokens_takes_memory_linear_in_them(name: str, window: int | None) -> None:
    rows, length, heads = 2, 8192, 32
    program, layout = compiled(name, rows, length, heads, 8, 128, window)
    assert layout.choices["attention"] == "flash kernels in Pallas"
    text = program.as_text()
    assert all(kernel in text for kernel in KERNELS)
    assert f"{length},{length}" not in text
    of_a_float_per_query_and_head = rows * heads * length * 4
    assert program.memory_analysis().temp_size_in_bytes < 2.1 * of_a_float_per_query_and_head


@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads"),
    [
        pytest.param(64, 9, 3, id="head_dim 64, groups of 3"),
        pytest.param(32, 2, 2, id="head_dim 32"),
        pytest.param(256, 2, 1, marks=pytest.mark.slow, id="head_dim 256"),
    ],
)
def test_other_heads_compile_for_the_smaller_gpu(head_dim: int, heads: int, kv_heads: int) -> None:
    program, _ = compiled("a100", 1, 256, heads, kv_heads, head_dim, None)
    assert all(kernel in program.as_text() for kernel in KERNELS)
