"""What the trainer knows of a model family: the `Task`, and the `Staged` task that a pipeline can cut.

Everything above (gradient, step, pipeline, planner) works through these methods, and a user's own class with the same
methods is as good as ours.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxtrain.models.remat import Remat, checkpointed

Params = Any
"""Nested dictionaries of float32 arrays."""

Batch = Mapping[str, jax.Array]
"""Arrays of [rows, …]. The step adds `row` (i32[rows]): each row's index in the global batch."""

Sums = dict[str, Float[Array, ""]]
"""Named sums over rows."""

Denominators = dict[str, Float[Array, ""]]

Cache = Any
"""What a model remembers of the tokens that it has read: arrays whose size doesn't grow while it decodes."""

Carry = Any
"""What flows from layer to layer, and between pipeline stages: arrays of [rows, …], there of floating-point numbers."""


class ArraySpec(NamedTuple):
    """One array of a batch: its shape with rows first, its dtype, its logical axes."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]


AbstractBatch = dict[str, ArraySpec]


class Mean(NamedTuple):
    """A weighted mean that is kept as two sums, so that adding two of them is exact."""

    total: Float[Array, ""]
    weight: Float[Array, ""]

    def result(self) -> float:
        """The mean; NaN where nothing was counted."""
        weight = float(self.weight)
        return float(self.total) / weight if weight else float("nan")


class Mergeable(Protocol):
    """An evaluation metric: a pytree whose leaves add over batches (sums, histograms), and its final value."""

    def result(self) -> float: ...


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of matrix products; a multiply-add counts two.

    Attributes:
        forward: one forward pass. Causal attention counts the half that is needed.
        attention: the part of `forward` that is attention scores and their application to the values.
    """

    forward: float
    attention: float

    @property
    def training(self) -> float:
        """Forward and backward: the backward pass takes twice the forward one. Recomputation isn't counted."""
        return 3 * self.forward


@runtime_checkable
class Task(Protocol):
    """All that the trainer knows of a model family.

    A task is immutable and holds no arrays. Its methods are pure and are traced under `jax.jit`; rows may be any subset
    of a batch, so nothing in `losses` may depend on which other rows are present: the number that a sum is divided by
    comes from `denominators`, which sees the whole global batch.
    """

    def init(self, key: Key[Array, ""]) -> Any:
        """Nested dictionaries of `nnx.Param` made by `models.parameters.parameter` (float32, logical axes, role)."""

    def denominators(self, batch: Batch) -> Denominators:
        """For each term of the loss the number that its sum is divided by, from the whole global batch alone.

        Never 0: a batch without counted targets divides by 1.
        """

    def losses(self, params: Params, batch: Batch, key: Key[Array, ""]) -> Sums:
        """Each term's sum over these rows; the loss is the sum over terms of losses / denominators.

        `params` are float32, or in the compute dtype where `gradient.cast_for_compute` casts by role. `key` is the
        step's; randomness must be a function of it and of `batch["row"]`.
        """

    def metrics(self, params: Params, batch: Batch) -> dict[str, Mergeable]:
        """Evaluation metrics of these rows, without dropout; `loss` must be among them."""

    def counted(self, batch: Batch) -> Int[Array, ""]:
        """What throughput counts: for language the tokens with weight > 0, for images the examples."""

    def example_batch(self, rows: int) -> AbstractBatch:
        """The arrays of a batch of so many rows (without `row`)."""

    def flops(self, rows: int) -> Flops:
        """Work of a batch of so many full rows."""

    def shrunk(self) -> "Task":
        """The same structure with small sizes, for checks that train on one core in seconds."""


@runtime_checkable
class Staged(Task, Protocol):
    """A task cut into embed, equal layers and head: what a pipeline needs.

    `params` is {"embed": …, "layers": stacked along a first dimension `layers`, "head": …}. Only the carry travels
    between stages; the context is derived from the batch on every stage. `losses` returns `staged_losses(self, …)`:
    head ∘ scan(layer) ∘ embed. A pipeline calls the same three parts, and refuses a task whose `losses` do otherwise.
    """

    @property
    @abstractmethod
    def layer_count(self) -> int:
        """Layers that a pipeline can distribute."""

    @property
    @abstractmethod
    def remat(self) -> Remat:
        """What of a layer the backward pass finds in memory."""

    @abstractmethod
    def context(self, batch: Batch) -> Any:
        """What each layer looks up by micro-batch: positions, segments, row indices."""

    @abstractmethod
    def embed(self, params: Params, batch: Batch, key: Key[Array, ""] | None) -> Carry:
        """The first carry from `params["embed"]`; key None: no dropout."""

    @abstractmethod
    def layer(self, params: Params, carry: Carry, context: Any, key: Key[Array, ""] | None) -> tuple[Carry, Sums]:
        """One layer from one slice of `params["layers"]`; the sums are auxiliary loss terms over these rows."""

    @abstractmethod
    def head(self, params: Params, carry: Carry, batch: Batch) -> Sums:
        """Sums over these rows from `params["head"]` (and `params["embed"]` where tied)."""


@runtime_checkable
class Generative(Task, Protocol):
    """A task that can go on with rows of tokens, one token of each row at a time.

    Rows of different lengths end in the same slot: row r holds tokens in the slots from `first[r]` on, and what lies
    before them must not matter. So a row is continued as it would be alone.
    """

    @property
    @abstractmethod
    def sequence(self) -> int:
        """The most tokens that a row had in training."""

    @property
    @abstractmethod
    def vocab(self) -> int:
        """Tokens that there are logits for."""

    @abstractmethod
    def prefill(
        self, params: Params, tokens: Int[Array, "rows prompt"], first: Int[Array, " rows"], slots: int
    ) -> tuple[Float[Array, "rows vocab"], Cache]:
        """Reads the prompts: the logits (float32) of what follows, and a cache with room for `slots` tokens a row."""

    @abstractmethod
    def decode(
        self,
        params: Params,
        tokens: Int[Array, " rows"],
        first: Int[Array, " rows"],
        slot: Int[Array, ""],
        cache: Cache,
    ) -> tuple[Float[Array, "rows vocab"], Cache]:
        """Reads one more token of each row, which stands at `slot`: the logits of what follows, and the new cache."""


def abstract_batch(task: Task, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of so many rows as the step hands it to a task: with `row`."""
    arrays = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in task.example_batch(rows).items()}
    return {**arrays, "row": jax.ShapeDtypeStruct((rows,), jnp.int32)}


def run_layers(
    task: Staged, params: Params, carry: Carry, context: Any, key: Key[Array, ""] | None
) -> tuple[Carry, Sums]:
    """The carry after all layers, and the layers' auxiliary sums added up.

    Layers are scanned, so that compile time doesn't grow with depth. Layer i gets `fold_in(key, i + 1)`.
    """

    def body(carry: Carry, xs: tuple[Params, jax.Array]) -> tuple[Carry, Sums]:
        layer_params, index = xs
        layer_key = None if key is None else jax.random.fold_in(key, index + 1)
        return task.layer(layer_params, carry, context, layer_key)

    layers = (params["layers"], jnp.arange(task.layer_count))
    carry, sums = jax.lax.scan(checkpointed(body, task.remat), carry, layers)
    return carry, jax.tree.map(lambda stacked: stacked.sum(0), sums)


def staged_losses(task: Staged, params: Params, batch: Batch, key: Key[Array, ""] | None) -> Sums:
    """head ∘ scan(layer) ∘ embed."""
    embed_key = None if key is None else jax.random.fold_in(key, 0)
    carry = task.embed(params, batch, embed_key)
    carry, auxiliary = run_layers(task, params, carry, task.context(batch), key)
    sums = task.head(params, carry, batch)
    if twice := sums.keys() & auxiliary.keys():
        raise ValueError(f"the loss terms {sorted(twice)} come from the head and from the layers: name them apart")
    return {**sums, **auxiliary}
