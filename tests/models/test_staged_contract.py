"""What somebody's own task cut into layers must be, and what only stages ask of it, before anything is compiled."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.models.contract import refuse_what_is_no_task
from jaxtrain.models.parameters import ParameterInfo
from jaxtrain.models.staged_contract import refuse_what_has_no_stages
from jaxtrain.models.task import staged_losses
from jaxtrain.pipeline.stages import Stages, StageWeights
from tests.pipeline.staged import Balanced
from tests.runs import make_layout

BFLOAT16 = jnp.dtype("bfloat16")


@dataclass(frozen=True)
class Changed(Balanced):
    """The small staged task with one method that does something with what the whole one gives."""

    name: str = ""
    change: Any = None

    def __getattribute__(self, attribute: str) -> Any:
        read = object.__getattribute__
        given = read(self, attribute)
        if attribute != read(self, "name"):
            return given
        change: Callable[..., Any] = read(self, "change")
        return (lambda *arguments: change(given(*arguments))) if callable(given) else change(given)


@dataclass(frozen=True)
class Half(Balanced):
    """Computes in the type that its matrices are given in."""

    def embed(self, params: Any, batch: Any, key: Any) -> Any:
        return {"x": (batch["x"] @ params["embed"]["table"]).astype(BFLOAT16)}

    def layer(self, params: Any, carry: Any, context: Any, key: Any) -> Any:
        hidden = carry["x"] @ params["up"]
        return {"x": carry["x"] + hidden @ params["down"]}, {"balance": hidden.mean(-1).sum()}


def refusal(function: Callable[[], None]) -> str:
    with pytest.raises(ConfigError) as caught:
        function()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_layer(**changes: Any) -> Callable[[Any], Any]:
    return lambda result: (result[0] | changes, result[1])


PARTS: dict[str, tuple[str, Any, str]] = {
    "layers of another name": (
        "init", lambda params: {"embed": params["embed"], "blocks": params["layers"]}, "init(key) has no layers, which",
    ),
    "another count": ("layer_count", lambda count: count + 1, "layer_count is 3, but layers.down has shape (2, 16, 8)"),
    "no rows": ("embed", lambda carry: carry | {"count": jnp.float32(0)}, "embed(params, batch, key): count is an"),
    "another type": (
        "layer", lambda result: ({"x": result[0]["x"].astype(BFLOAT16)}, result[1]),
        "makes of x float32[8, 8] x bfloat16[8, 8]; a layer's carry is of one structure and type",
    ),
    "one more array": ("layer", with_layer(more=jnp.zeros(8)), "makes of x float32[8, 8] more float32[8] and x"),
    "a term twice": (
        "layer", lambda result: (result[0], result[1] | {"error": jnp.float32(0)}), "head and layer both give error;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_do_not_fit_together_are_named_with_what_they_gave(case: str) -> None:
    name, change, words = PARTS[case]
    assert words in refusal(lambda: refuse_what_is_no_task(Changed(2, name=name, change=change), "model.target=m:T"))


def test_a_task_is_judged_by_what_it_gives_in_the_type_of_the_computation() -> None:
    refuse_what_is_no_task(Half(2), "model.target=m:T", BFLOAT16)
    refuse_what_has_no_stages(Half(2), 2, BFLOAT16)
    assert "makes of x bfloat16[8, 8] x float32[8, 8]" in refusal(lambda: refuse_what_is_no_task(Half(2), "m:T"))


def test_a_task_without_all_parts_is_told_which_it_lacks() -> None:
    task = SimpleNamespace(**{name: getattr(Balanced(2), name) for name in ("embed", "head", "context", "layer_count")})
    assert "isn't cut into layers; it lacks remat, layer: " in refusal(lambda: refuse_what_has_no_stages(task, 2))


@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_what_has_no_gradient_does_not_travel_between_stages(dtype: str) -> None:
    task = Changed(2, name="embed", change=lambda carry: carry | {"mask": jnp.zeros(carry["x"].shape[0], dtype)})
    refused = refusal(lambda: refuse_what_has_no_stages(task, 2))
    assert f"mesh.pipeline=2, but a Changed's embed(params, batch, key) gives mask as {dtype};" in refused


def test_ends_that_read_the_layers_are_refused() -> None:
    class Reading(Balanced):
        def head(self, params: Any, carry: Any, batch: Any) -> Any:
            return super().head(params, {"x": carry["x"] * params["layers"]["scale"][0]}, batch)

    assert "a Reading's head reads params['layers']" in refusal(lambda: refuse_what_has_no_stages(Reading(2), 2))


def test_parameters_in_lists_travel_to_stages_too() -> None:
    infos = {
        "layers": [ParameterInfo((2, 4), ("layers", "embed"), "norm")],
        "head": (ParameterInfo((4,), (None,), "norm"),),
    }
    layout, params = make_layout(pipeline=2), {"layers": [np.ones((2, 4))], "head": (np.ones(4),)}
    fetched = StageWeights(infos, layout, Stages(((1,), (1,)))).fetch(params)
    jax.tree.map(np.testing.assert_array_equal, fetched, params)


OTHERWISE: dict[str, Any] = {
    "twice as much": lambda sums: sums | {"error": 2 * sums["error"]},
    "one term less": lambda sums: {"error": sums["error"] + sums["balance"]},
    "terms changed over": lambda sums: {"error": sums["balance"], "balance": sums["error"]},
}


@pytest.mark.parametrize("case", OTHERWISE)
def test_a_loss_that_is_not_that_of_the_parts_is_refused(case: str) -> None:
    task = Changed(2, name="losses", change=OTHERWISE[case])
    assert "computed otherwise than its embed, layers and head" in refusal(lambda: refuse_what_has_no_stages(task, 2))


def test_constants_count_among_what_is_computed() -> None:
    @dataclass(frozen=True)
    class Weighted(Balanced):
        error: Any = None

        def head(self, params: Any, carry: Any, batch: Any) -> Any:
            return {name: (value * self.error).sum() for name, value in super().head(params, carry, batch).items()}

        def losses(self, params: Any, batch: Any, key: Any) -> Any:
            return staged_losses(replace(self, error=np.array([1.0, 3.0], np.float32)), params, batch, key)

    refuse_what_has_no_stages(Weighted(2, error=np.array([1.0, 3.0], np.float32)), 2)
    other = Weighted(2, error=np.array([1.0, 2.0], np.float32))
    assert "computed otherwise" in refusal(lambda: refuse_what_has_no_stages(other, 2))


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_loss_of_the_parts_is_taken(noise: float) -> None:
    refuse_what_is_no_task(Balanced(2, noise=noise), "model.target=m:T")
    refuse_what_has_no_stages(Balanced(2, noise=noise), 2)
