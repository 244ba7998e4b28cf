"""The engine's gradient is the plain one, parameter by parameter, whatever is cut, scheduled and split."""

import functools
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.gradient import plain_gradient
from jaxtrain.models.parameters import describe, named_leaves, unbox
from jaxtrain.models.remat import KEEP_ALL, Remat
from jaxtrain.optimizer import freeze
from jaxtrain.pipeline.buffers import plan_buffers
from jaxtrain.pipeline.engine import Pipeline, pipelined_gradient
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.pipeline.stages import Stages
from jaxtrain.step import with_rows
from tests.pipeline.staged import Balanced, make_batch
from tests.runs import make_layout

KEY = jax.random.key(7)
ROWS = 8


@dataclass(frozen=True)
class Cut:
    """How a step is cut, over which mesh, and what is trained."""

    kind: str
    split: tuple[tuple[int, ...], ...]
    microbatches: int
    axes: tuple[tuple[str, int], ...] = ()
    gather_once: bool = False
    zero: Any = 0
    tied: bool = False
    noise: float = 0.0
    remat: Remat = KEEP_ALL
    frozen: tuple[str, ...] = ()

    @property
    def task(self) -> Balanced:
        layers, size = sum(map(sum, self.split)), 24 if len(self.split) == 3 else 8
        return Balanced(layers, size, self.tied, self.noise, self.remat)


EVEN, THREE, CHUNKS, UNEVEN = ((2,), (2,)), ((2,), (3,), (2,)), ((2, 1), (3, 1)), ((2,), (1,))
CUTS: dict[str, Cut] = {
    "gpipe, tied": Cut("gpipe", EVEN, 4, tied=True),
    "1f1b": Cut("1f1b", EVEN, 4),
    "1f1b on four stages": Cut("1f1b", ((1,),) * 4, 8),
    "three chunks": Cut("interleaved_1f1b", ((1, 1, 1), (1, 1, 1)), 8),
    "7 layers on 3 stages, noise by row": Cut("1f1b", THREE, 8, noise=0.5),
    "7 layers on 2 stages of two chunks, tied": Cut("interleaved_1f1b", CHUNKS, 4, tied=True),
    "fewer micro-batches than stages": Cut("1f1b", ((1,), (2,), (1,), (1,)), 2),
    "fewer micro-batches than stages of two chunks": Cut("interleaved_1f1b", ((1, 1),) * 4, 2),
    "one micro-batch": Cut("1f1b", EVEN, 1),
    "one micro-batch in two chunks": Cut("interleaved_1f1b", CHUNKS, 1),
    "one micro-batch, gpipe": Cut("gpipe", THREE, 1),
    "full remat, noise by row": Cut("1f1b", EVEN, 4, noise=0.5, remat=Remat("full")),
    "dots, two chunks": Cut("interleaved_1f1b", CHUNKS, 4, remat=Remat("dots")),
    "by name in the host's memory": Cut("1f1b", EVEN, 4, remat=Remat("named", offload=("hidden",))),
    "frozen layers": Cut("1f1b", THREE, 4, frozen=("layers.up", "layers.scale")),
    "frozen embedding, tied": Cut("gpipe", EVEN, 4, tied=True, frozen=("embed.table",)),
    "only the head is trained": Cut("1f1b", EVEN, 4, frozen=("embed.*", "layers.*")),
    "fsdp": Cut("1f1b", EVEN, 4, (("fsdp", 2),)),
    "data, gathered once, noise by row": Cut("1f1b", EVEN, 4, (("data", 2),), gather_once=True, noise=0.5, tied=True),
    "uneven, data and fsdp, gathered once": Cut(
        "interleaved_1f1b", CHUNKS, 2, (("data", 2), ("fsdp", 2)), gather_once=True, remat=Remat("full"),
    ),
    "data and tensor": Cut("1f1b", EVEN, 4, (("data", 2), ("tensor", 2))),
    "ZeRO 2, data and tensor, uneven, tied, frozen scales": Cut(
        "1f1b", UNEVEN, 2, (("data", 2), ("tensor", 2)), zero=2, tied=True, frozen=("layers.scale",)
    ),
    "ZeRO 2, gathered once, noise by row": Cut(
        "1f1b", EVEN, 2, (("data", 2), ("fsdp", 2)), gather_once=True, zero=2, noise=0.5
    ),
    "ZeRO 2, fsdp and data": Cut("1f1b", EVEN, 2, (("data", 2), ("fsdp", 2)), zero=2),
}  # fmt: skip


Named = dict[str, np.ndarray]


def identity(params: Any) -> Any:
    return params


def in_bfloat16(params: Any) -> Any:
    layers = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["layers"])
    return {**params, "layers": layers}


def on_host(gradients: Any, sums: Any) -> tuple[Named, dict[str, float]]:
    gradients = {name: np.asarray(leaf) for name, leaf in named_leaves(gradients).items()}
    return gradients, {name: float(value) for name, value in sums.items()}


@functools.cache
def plain(task: Balanced, cast: Any = identity) -> tuple[Named, dict[str, float]]:
    """All gradients and sums on one device."""
    batch = with_rows({name: jnp.asarray(array) for name, array in make_batch(ROWS).items()})
    params = unbox(task.init(jax.random.key(0)))
    return on_host(*jax.jit(plain_gradient(task, cast))(params, batch, task.denominators(batch), KEY))


def pipelined(cut: Cut, cast: Any = identity) -> tuple[Named, dict[str, float]]:
    task, boxed = cut.task, cut.task.init(jax.random.key(0))
    layout = replace(make_layout(pipeline=len(cut.split), **dict(cut.axes)), zero=cut.zero)
    infos = freeze(describe(boxed), cut.frozen)
    schedule = make_schedule(cut.kind, len(cut.split), cut.microbatches, len(cut.split[0]))
    pipeline = Pipeline(task, Stages(cut.split), plan_buffers(schedule), cut.microbatches, cut.gather_once)
    params = jax.tree.map(
        lambda info, leaf: jax.device_put(leaf, layout.parameter(info.axes, info.shape, "")), infos, unbox(boxed)
    )
    batch = {
        name: jax.device_put(array, layout.activation(("batch", None)[: array.ndim], array.shape, name))
        for name, array in with_rows(make_batch(ROWS)).items()
    }
    gradient = pipelined_gradient(pipeline, cast, layout, infos)
    return on_host(*jax.jit(gradient)(params, batch, task.denominators(batch), KEY))


def assert_equal(got: Named, want: Named, tolerance: float = 1e-5) -> None:
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        error = np.linalg.norm(got[name] - gradient) / np.linalg.norm(gradient)
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_gradients_and_sums_are_those_of_one_device(cut: Cut) -> None:
    gradients, sums = plain(replace(cut.task, remat=KEEP_ALL))
    got, got_sums = pipelined(cut)
    trained = {name: leaf for name, leaf in gradients.items() if not any(fnmatch(name, it) for it in cut.frozen)}
    assert_equal(got, trained)
    assert got_sums == pytest.approx(sums, rel=1e-6)


def test_layers_in_bfloat16_have_gradients_that_are_added_in_float32() -> None:
    cut = Cut("1f1b", EVEN, 8)
    got, _ = pipelined(cut, in_bfloat16)
    assert {leaf.dtype for leaf in got.values()} == {np.dtype(np.float32)}
    assert (got["layers.up"].astype(jnp.bfloat16).astype(np.float32) != got["layers.up"]).any()
    # Weights enter rounded, but what is computed with them stays float32 in this task.
    assert_equal(got, plain(cut.task, in_bfloat16)[0], 1e-2)


def test_a_term_of_the_head_and_one_of_the_layers_must_not_share_a_name() -> None:
    class Twice(Balanced):
        def head(self, params: Any, carry: Any, batch: Any) -> Any:
            return {"balance": super().head(params, carry, batch)["error"]}

    class TwiceCut(Cut):
        task = Twice(4)  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"\['balance'\] come from the head and from the layers"):
        pipelined(TwiceCut("1f1b", EVEN, 2))
