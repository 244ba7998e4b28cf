import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxtrain.ops.cross_entropy import CrossEntropySettings, cross_entropy
from jaxtrain.sharding import use_layout
from tests.runs import make_layout

ROWS, LENGTH, EMBED, VOCAB = 8, 12, 16, 32
SCALE = 0.37
LAYOUTS = {
    "one device": {},
    "data=8": {"data": 8},
    "fsdp=8": {"fsdp": 8},
    "tensor=4": {"tensor": 4},
    "data=2 fsdp=2 tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
}
OPTIONS = [
    CrossEntropySettings(chunk, z, smoothing, cap)
    for z, smoothing, cap, chunk in itertools.product((0.0, 0.02), (0.0, 0.1), (None, 3.0), (1000, 5))
]
"""Chunks of 1000 hold all tokens of any device, chunks of 5 divide none of 96, 48, 24 and 12 tokens."""


def operands() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (ROWS, LENGTH, EMBED))
    head = jax.random.normal(keys[1], (EMBED, VOCAB))
    targets = jax.random.randint(keys[2], (ROWS, LENGTH), 0, VOCAB)
    weights = jax.random.uniform(keys[3], (ROWS, LENGTH)).at[:, ::3].set(0).at[2].set(0)
    return x, head, targets, weights


def naive_cross_entropy(x, head, targets, weights, settings: CrossEntropySettings):
    """The documented formula on all logits."""
    logits = x @ head
    if settings.logit_softcap is not None:
        logits = settings.logit_softcap * jnp.tanh(logits / settings.logit_softcap)
    log_normaliser = jax.nn.logsumexp(logits, -1)
    nll = log_normaliser - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    uniform = log_normaliser - logits.mean(-1)
    s = settings.label_smoothing
    return (weights * ((1 - s) * nll + s * uniform + settings.z * log_normaliser**2)).sum()


def all_options(loss) -> dict[CrossEntropySettings, Any]:
    """Value and gradients (of x and head) of the scaled loss, for every combination of options, in one program."""

    def every(x, head, targets, weights):
        def scaled(x, head, settings):
            return SCALE * loss(x, head, targets, weights, settings)

        return [jax.value_and_grad(scaled, (0, 1))(x, head, settings) for settings in OPTIONS]

    return dict(zip(OPTIONS, jax.device_get(jax.jit(every)(*operands())), strict=True))


@functools.cache
def on_layout(name: str) -> dict[CrossEntropySettings, Any]:
    with use_layout(make_layout(**LAYOUTS[name])):
        return all_options(cross_entropy)


@functools.cache
def naive() -> dict[CrossEntropySettings, Any]:
    return all_options(naive_cross_entropy)


@pytest.mark.parametrize("settings", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_value_and_gradients_equal_those_of_full_logits(layout: str, settings: CrossEntropySettings) -> None:
    value, (gradient_x, gradient_head) = on_layout(layout)[settings]
    want, (want_x, want_head) = naive()[settings]
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(gradient_x, want_x, rtol=1e-5, atol=1e-5 * np.abs(want_x).max())
    np.testing.assert_allclose(gradient_head, want_head, rtol=1e-5, atol=1e-5 * np.abs(want_head).max())


def test_the_value_alone_equals_the_value_with_its_gradient() -> None:
    settings = CrossEntropySettings(chunk=5, z=0.02, label_smoothing=0.1, logit_softcap=3.0)
    with use_layout(make_layout(data=2, fsdp=2, tensor=2)):
        value = jax.jit(cross_entropy, static_argnums=4)(*operands(), settings)
    np.testing.assert_allclose(value, naive()[settings][0] / SCALE, rtol=1e-5)


def test_tokens_of_weight_zero_have_no_gradient_and_may_have_any_target() -> None:
    x, head, targets, weights = operands()
    settings = CrossEntropySettings(chunk=5)
    gradient = jax.grad(cross_entropy)(x, head, jnp.where(weights == 0, VOCAB + 7, targets), weights, settings)
    np.testing.assert_array_equal(gradient[weights == 0], 0)
    np.testing.assert_array_equal(gradient[weights > 0], jax.grad(cross_entropy)(*operands(), settings)[weights > 0])


def test_large_logits_stay_finite() -> None:
    x, head, targets, weights = operands()
    value, gradient = jax.value_and_grad(cross_entropy)(1e4 * x, head, targets, weights, CrossEntropySettings(chunk=5))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()


def test_bfloat16_activations_give_a_float32_loss_and_a_float32_head_gradient() -> None:
    x, head, targets, weights = operands()
    settings = CrossEntropySettings(chunk=5)
    value, (gradient_x, gradient_head) = jax.value_and_grad(cross_entropy, (0, 1))(
        x.astype(jnp.bfloat16), head, targets, weights, settings
    )
    want, (_, want_head) = jax.value_and_grad(naive_cross_entropy, (0, 1))(x, head, targets, weights, settings)
    assert (value.dtype, gradient_x.dtype, gradient_head.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(value, want, rtol=1e-2)
    np.testing.assert_allclose(gradient_head, want_head, atol=0.02 * np.abs(want_head).max())


def computations(hlo: str) -> dict[str, str]:
    """The text of each HLO computation by its name; the entry computation's is ENTRY."""
    blocks = re.findall(r"^(ENTRY )?%?([\w.\-]+)[^\n]*\{\n(.*?)^\}", hlo, re.MULTILINE | re.DOTALL)
    return {"ENTRY" if entry else name: body for entry, name, body in blocks}


def test_the_head_is_gathered_once_and_its_gradient_scattered_once_whatever_the_chunks() -> None:
    layout = make_layout(fsdp=8)
    x, head, targets, weights = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.eval_shape(operands))
    rows, split = (jax.NamedSharding(layout.mesh, PartitionSpec("fsdp")) for _ in range(2))
    gradient = jax.grad(cross_entropy, (0, 1))
    settings = CrossEntropySettings(chunk=4)
    with use_layout(layout):
        compiled = (
            jax.jit(
                lambda *a: gradient(*a, settings), in_shardings=(rows, split, rows, rows), out_shardings=(rows, split)
            )
            .lower(x, head, targets, weights)
            .compile()
        )
    parts = computations(compiled.as_text())
    assert any("while(" in body for body in parts.values()), "three chunks are a loop"
    for operation in ("all-gather", "reduce-scatter"):
        counts = {name: len(re.findall(rf" {operation}(?:-start)?\(", body)) for name, body in parts.items()}
        assert {name: count for name, count in counts.items() if count} == {"ENTRY": 1}, operation
    assert not re.search(r" all-to-all\(| collective-permute\(", compiled.as_text())
