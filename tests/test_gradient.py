import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.gradient import accumulated_gradient, cast_for_compute, plain_gradient, split_rows, total_loss
from jaxtrain.models.parameters import ParameterInfo, Role
from jaxtrain.sharding import Layout
from tests.runs import make_layout

KEY = jax.random.key(0)


class TwoTerms:
    """A main term over counted rows, an auxiliary one over all rows, and noise that follows the row."""

    def losses(self, params: Any, batch: Any, key: jax.Array) -> dict[str, jax.Array]:
        noise = jax.vmap(lambda row: jax.random.normal(jax.random.fold_in(key, row)))(batch["row"])
        y = jnp.tanh(batch["x"] @ params["w"] + noise[:, None])
        return {"main": (batch["weights"] * y.sum(-1) ** 2).sum(), "auxiliary": jnp.exp(y).sum()}


def make_batch(layout: Layout) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    batch = {
        "x": random.standard_normal((16, 5)).astype(np.float32),
        "weights": (random.random(16) < 0.5).astype(np.float32),
        "row": np.arange(16, dtype=np.int32),
    }
    return {
        name: jax.device_put(a, layout.activation(("batch", None)[: a.ndim], a.shape, name))
        for name, a in batch.items()
    }


@pytest.mark.parametrize("passes", [2, 4])
@pytest.mark.parametrize("axes", [{}, {"data": 2, "fsdp": 2}], ids=str)
def test_micro_batches_only_add(axes: dict[str, int], passes: int) -> None:
    layout = make_layout(**axes)
    batch = make_batch(layout)
    params = {"w": jnp.linspace(-1, 1, 15).reshape(5, 3)}
    denominators = {"main": batch["weights"].sum(), "auxiliary": jnp.float32(16)}
    whole = plain_gradient(TwoTerms(), lambda params: params)  # type: ignore[arg-type]
    split = accumulated_gradient(TwoTerms(), lambda params: params, layout, passes)  # type: ignore[arg-type]
    want, got = (jax.jit(gradient)(params, batch, denominators, KEY) for gradient in (whole, split))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("axes", "device"), [({}, 0), ({"data": 2, "fsdp": 2}, 1), ({"data": 2, "tensor": 4}, 5)], ids=str
)
def test_each_micro_batch_is_made_of_the_rows_that_a_device_already_holds(axes: dict[str, int], device: int) -> None:
    layout = make_layout(**axes)
    rows = make_batch(layout)["row"]
    compiled = jax.jit(functools.partial(split_rows, layout=layout, passes=2)).lower(rows).compile()
    split = compiled(rows)
    assert sorted(np.asarray(split).ravel().tolist()) == list(range(16))
    before, after = ({s.device: np.asarray(s.data).ravel() for s in a.addressable_shards} for a in (rows, split))
    assert after[jax.devices()[device]].tolist() == before[jax.devices()[device]].tolist()
    assert not any(
        word in compiled.as_text() for word in ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    )


def test_the_gradient_and_sums_of_bfloat16_passes_are_added_in_float32() -> None:
    # Each pass contributes 1; bfloat16 stops counting at 256.
    class Linear:
        def losses(self, params: Any, batch: Any, key: jax.Array) -> dict[str, jax.Array]:
            return {"main": (params["w"] * batch["x"].astype(jnp.bfloat16)).sum(dtype=jnp.float32)}

    layout = make_layout()
    infos = {"w": ParameterInfo((1,), (None,), "matrix")}
    cast = functools.partial(cast_for_compute, infos=infos, dtype=jnp.dtype(jnp.bfloat16), layout=layout)
    gradient = accumulated_gradient(Linear(), cast, layout, passes=1024)  # type: ignore[arg-type]
    batch, params = {"x": jnp.ones((1024, 1))}, {"w": jnp.ones(1)}
    total, sums = jax.jit(gradient)(params, batch, {"main": jnp.float32(1)}, KEY)
    assert (total["w"].dtype, total["w"].item(), sums["main"].item()) == (jnp.float32, 1024, 1024)


def test_only_matrices_and_biases_are_cast_and_stay_where_they_are_stored() -> None:
    roles: tuple[Role, ...] = ("matrix", "embedding", "head", "norm", "bias", "router", "table")
    infos = {role: ParameterInfo((8, 8), ("embed", "mlp"), role) for role in roles}
    layout = make_layout(fsdp=2, tensor=2)
    sharding = layout.parameter(("embed", "mlp"), (8, 8), "parameter")
    params = {role: jax.device_put(jnp.ones((8, 8)), sharding) for role in roles}
    cast = jax.jit(functools.partial(cast_for_compute, infos=infos, dtype=jnp.dtype(jnp.bfloat16), layout=layout))(
        params
    )
    assert {role for role in roles if cast[role].dtype == jnp.bfloat16} == {"matrix", "bias"}
    assert all(cast[role].sharding.is_equivalent_to(sharding, 2) for role in roles)
    assert cast_for_compute(params, infos, jnp.dtype(jnp.float32), layout) is params


def test_the_loss_adds_each_term_over_its_own_denominator() -> None:
    sums = {"main": jnp.float32(6), "auxiliary": jnp.float32(1)}
    assert total_loss(sums, {"main": jnp.float32(3), "auxiliary": jnp.float32(4)}).item() == 2.25


@pytest.mark.parametrize("denominators", [{"main": 1.0}, {"main": 1.0, "auxiliary": 1.0, "router": 1.0}], ids=str)
def test_a_term_without_its_denominator_and_the_reverse_are_refused(denominators: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"losses \['auxiliary', 'main'\] and denominators .* differ in name"):
        total_loss({"main": jnp.float32(6), "auxiliary": jnp.float32(1)}, denominators)  # type: ignore[arg-type]
