"""One engine for any schedule: the gradient of a staged task whose layers are spread over the mesh axis `pipeline`.

A `shard_map` over `pipeline` runs one scan over the schedule's ticks, the same program on every stage. In a tick a
stage does at most one forward and then one backward, each under a condition, and hands a carry up and a gradient down.
What a forward leaves for its backward waits in a stash, layer by layer: the residuals of `jax.vjp`, so that
rematerialisation means what it means without a pipeline, but neither weights nor what the batch tells again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Key

from jaxtrain.gradient import Gradient, gather_whole, manual_part, scatter_whole, split_rows
from jaxtrain.models.remat import checkpointed
from jaxtrain.models.task import Batch, Carry, Denominators, Params, Staged, Sums
from jaxtrain.optimizer import trainable
from jaxtrain.pipeline.buffers import NOTHING, BufferPlan, Tables
from jaxtrain.pipeline.residuals import SplitLayer
from jaxtrain.pipeline.stages import PADDING, Stages, StageWeights
from jaxtrain.sharding import PIPELINE, Layout, use_layout


@dataclass(frozen=True)
class Pipeline:
    """How a step is cut and scheduled.

    Attributes:
        task: what is cut.
        gather_once: whether weights are gathered over `fsdp` once in a step and their gradients scattered once; else
            for each micro-batch.
    """

    task: Staged
    stages: Stages
    plan: BufferPlan
    microbatches: int
    gather_once: bool

    @property
    def works(self) -> int:
        """Forwards of each stage in a step, and as many backwards."""
        return self.microbatches * len(self.stages.split[0])


def pipelined_gradient(pipeline: Pipeline, cast: Callable[[Params], Params], layout: Layout, infos: Any) -> Gradient:
    """The gradient of the whole batch, computed by stages; None for frozen parameters."""
    rows = layout.batch_axes if pipeline.gather_once else ()
    inside = layout.inside(PIPELINE, *rows)
    weights = StageWeights(infos, layout, pipeline.stages, scattered=pipeline.gather_once)

    def gradient(params: Params, batch: Batch, denominators: Denominators, key: Key[Array, ""]) -> tuple[Params, Sums]:
        def on_stage(params: Params, batch: Batch, denominators: Denominators, key: Array) -> tuple[Params, Sums]:
            with use_layout(inside):
                work = StageWork(pipeline, infos, gather_whole(params, weights.fetched, inside), batch, key)
                gradients, sums = work.run(denominators)
            return scatter_whole(gradients, weights.returned, inside), jax.lax.psum(sums, (PIPELINE, *rows))

        mapped = jax.shard_map(
            on_stage,
            mesh=layout.mesh,
            in_specs=(
                manual_part(weights.fetched, inside),
                PartitionSpec(None, rows or None),
                PartitionSpec(),
                PartitionSpec(),
            ),
            out_specs=(manual_part(weights.returned, inside), PartitionSpec()),
            axis_names=inside.manual,
            check_vma=False,
        )
        micro = {name: split_rows(array, layout, pipeline.microbatches) for name, array in batch.items()}
        gradients, sums = mapped(weights.fetch(cast(params)), micro, denominators, key)
        return weights.give_back(gradients), sums

    return gradient


State = TypeVar("State", bound=tuple[Any, ...])


class _Memory(NamedTuple):
    """What a stage holds from tick to tick. A buffer is a tree of [slots + 1, …]: the last slot is for what is nothing.

    Attributes:
        up, down: what the neighbours have sent.
        carries, cotangents, outputs: buffers of a schedule.
        stash: [slots, places of a chunk, …] of each array that a layer leaves.
        gradients: float32, as `StageWeights.give_back` takes them.
    """

    up: Carry
    down: Carry
    carries: Carry
    cotangents: Carry
    outputs: Carry
    stash: list[Array]
    gradients: Params
    sums: Sums


class StageWork:
    """One stage's part of a step.

    Args:
        params: `layers` [places, …] of this stage, and all others.
        batch: arrays of [microbatches, rows, …].
    """

    def __init__(self, pipeline: Pipeline, infos: Any, params: Params, batch: Batch, key: Array):
        self._task, self._plan, self._infos = pipeline.task, pipeline.plan, infos
        self._stages, self._batch, self._key = pipeline.stages, batch, key
        self._layers = params["layers"]
        self._ends = {name: part for name, part in params.items() if name != "layers"}
        self._stage = jax.lax.axis_index(PIPELINE)
        self._layer_of = jnp.asarray(pipeline.stages.layers)[self._stage]
        self._shares = _Shares.of(pipeline)
        self._layer = SplitLayer(checkpointed(self._call_layer, self._task.remat))

    def run(self, denominators: Denominators) -> tuple[Params, Sums]:
        """The gradients, as `StageWeights.give_back` takes them, and this stage's share of the sums."""
        self._cotangents = {name: 1 / value for name, value in denominators.items()}
        ticks = jax.tree.map(lambda table: jnp.asarray(table)[:, self._stage], self._plan.tables)
        memory, _ = jax.lax.scan(self._tick, self._empty(), ticks)
        return memory.gradients, memory.sums

    def _tick(self, memory: _Memory, now: Tables[Array]) -> tuple[_Memory, None]:
        m = memory._replace(
            carries=_put(memory.carries, now.carry_arrival_slot, memory.up),
            cotangents=_put(memory.cotangents, now.gradient_arrival_slot, memory.down),
        )
        up, stash, outputs, sums = _if(
            self._shares.forward,
            now.forward_microbatch != NOTHING,
            lambda up, *state: self._forward(now, m.carries, *state),
            (m.up, m.stash, m.outputs, m.sums),
        )
        down, gradients, sums = _if(
            self._shares.backward,
            now.backward_microbatch != NOTHING,
            lambda down, *state: self._backward(now, m.cotangents, stash, outputs, *state),
            (m.down, m.gradients, sums),
        )
        count = self._stages.count
        up = jax.lax.ppermute(up, PIPELINE, [(stage, (stage + 1) % count) for stage in range(count)])
        down = jax.lax.ppermute(down, PIPELINE, [(stage, (stage - 1) % count) for stage in range(count)])
        return _Memory(up, down, m.carries, m.cotangents, outputs, stash, gradients, sums), None

    def _forward(
        self, now: Tables[Array], carries: Carry, stash: list[Array], outputs: Carry, sums: Sums
    ) -> tuple[Carry, list[Array], Carry, Sums]:
        batch = _take(self._batch, now.forward_microbatch)
        context = self._task.context(batch)
        (carry,) = _if(
            self._shares.embed,
            now.forward_carry_slot == NOTHING,
            lambda _: (self._embed(self._ends, batch),),
            (_take(carries, now.forward_carry_slot),),
        )

        def layer(state: tuple[Carry, list[Array], Sums], slot: Array) -> tuple[tuple[Carry, list[Array], Sums], None]:
            place = now.forward_chunk * self._stages.slots + slot

            def run(carry: Carry, stash: list[Array], sums: Sums) -> tuple[Carry, list[Array], Sums]:
                weights, lookups = _take(self._layers, place), self._lookups(context, place)
                (carry, more), residuals = self._layer.forward(weights, carry, lookups)
                stash = [
                    jax.lax.dynamic_update_slice(old, new[None, None], (now.forward_stash_slot, slot, *(0,) * new.ndim))
                    for old, new in zip(stash, residuals, strict=True)
                ]
                return carry, stash, _added(sums, more)

            return self._unless_padding(place, run, *state), None

        (carry, stash, sums), _ = jax.lax.scan(layer, (carry, stash, sums), jnp.arange(self._stages.slots))
        return carry, stash, _put(outputs, now.forward_output_slot, carry), sums

    def _backward(
        self, now: Tables[Array], cotangents: Carry, stash: list[Array], outputs: Carry, gradients: Params, sums: Sums
    ) -> tuple[Carry, Params, Sums]:
        batch = _take(self._batch, now.backward_microbatch)
        context = self._task.context(batch)
        ends = {name: part for name, part in gradients.items() if name != "layers"}
        cotangent, ends, sums = _if(
            self._shares.head,
            now.backward_gradient_slot == NOTHING,
            lambda _, *state: self._head(batch, _take(outputs, now.backward_output_slot), *state),
            (_take(cotangents, now.backward_gradient_slot), ends, sums),
        )

        def layer(state: tuple[Carry, Params], slot: Array) -> tuple[tuple[Carry, Params], None]:
            place = now.backward_chunk * self._stages.slots + slot

            def run(cotangent: Carry, gradients: Params) -> tuple[Carry, Params]:
                weights, lookups = _take(self._layers, place), self._lookups(context, place)
                stored = [_take(_take(each, now.backward_stash_slot), slot) for each in stash]
                sums = {name: self._cotangents[name].astype(dtype) for name, dtype in self._auxiliary.items()}
                of_weights, cotangent = self._layer.backward(weights, lookups, stored, (cotangent, sums))
                return cotangent, _add_at(gradients, place, trainable(of_weights, self._infos["layers"]))

            return self._unless_padding(place, run, *state), None

        state, slots = (cotangent, gradients["layers"]), jnp.arange(self._stages.slots)
        (cotangent, layers), _ = jax.lax.scan(layer, state, slots, reverse=True)
        is_first = (self._stage == 0) & (now.backward_chunk == 0)
        (ends,) = _if(
            self._shares.embed_gradient, is_first, lambda ends: (self._embedded(batch, cotangent, ends),), (ends,)
        )
        return cotangent, {**ends, "layers": layers}, sums

    def _head(self, batch: Batch, carry: Carry, gradients: Params, sums: Sums) -> tuple[Carry, Params, Sums]:
        """The cotangent of the last carry, what the head adds to the gradients, and its sums."""
        new, pullback = jax.vjp(lambda ends, carry: self._task.head(ends, carry, batch), self._ends, carry)
        of_ends, cotangent = pullback({name: self._cotangents[name].astype(each.dtype) for name, each in new.items()})
        return cotangent, self._added_to_ends(gradients, of_ends), _added(sums, new)

    def _embedded(self, batch: Batch, cotangent: Carry, gradients: Params) -> Params:
        """What the embedding adds to the gradients; it is computed again, being little but a look-up."""
        _, pullback = jax.vjp(lambda ends: self._embed(ends, batch), self._ends)
        return self._added_to_ends(gradients, *pullback(cotangent))

    def _added_to_ends(self, gradients: Params, new: Params) -> Params:
        infos = {name: part for name, part in self._infos.items() if name != "layers"}
        return jax.tree.map(lambda old, new: old + new.astype(jnp.float32)[None], gradients, trainable(new, infos))

    def _embed(self, ends: Params, batch: Batch) -> Carry:
        return self._task.embed(ends, batch, jax.random.fold_in(self._key, 0))

    def _call_layer(self, weights: Params, carry: Carry, lookups: Any) -> tuple[Carry, Sums]:
        context, key, layer = lookups
        return self._task.layer(weights, carry, context, jax.random.fold_in(key, layer + 1))

    def _lookups(self, context: Any, place: Array) -> Any:
        return context, self._key, self._layer_of[place]

    def _unless_padding(self, place: Array, run: Callable[..., Any], *state: Any) -> Any:
        if not self._stages.is_padded:
            return run(*state)
        return _if(self._shares.layer, self._layer_of[place] != PADDING, run, state)

    def _empty(self) -> _Memory:
        batch, place = _take(self._batch, 0), jnp.int32(0)
        carry = jax.eval_shape(lambda: self._embed(self._ends, batch))
        weights = _take(self._layers, place)
        (_, auxiliary), residuals = jax.eval_shape(
            lambda carry: self._layer.forward(weights, carry, self._lookups(self._task.context(batch), place)), carry
        )
        head = jax.eval_shape(lambda carry: self._task.head(self._ends, carry, batch), carry)
        if twice := head.keys() & auxiliary.keys():
            raise ValueError(f"the loss terms {sorted(twice)} come from the head and from the layers: name them apart")
        self._auxiliary = {name: each.dtype for name, each in auxiliary.items()}
        plan, places = self._plan, self._stages.slots
        return _Memory(
            up=_zeros(carry),
            down=_zeros(carry),
            carries=_zeros(carry, plan.carry_slots + 1),
            cotangents=_zeros(carry, plan.gradient_slots + 1),
            outputs=_zeros(carry, plan.output_slots + 1),
            stash=[
                jax.device_put(jnp.zeros((plan.stash_slots, places, *each.shape), each.dtype), space)
                for each, space in zip(residuals, self._layer.spaces, strict=True)
            ],
            gradients=self._no_gradients(),
            sums={name: jnp.zeros((), jnp.float32) for name in (*head, *auxiliary)},
        )

    def _no_gradients(self) -> Params:
        def one(path: Any, leaf: Array) -> Array:
            shape = leaf.shape if path[0].key == "layers" else (1, *leaf.shape)
            return jnp.zeros(shape, jnp.float32)

        trained = trainable({"layers": self._layers, **self._ends}, self._infos)
        return jax.tree_util.tree_map_with_path(one, trained)


class _Shares(NamedTuple):
    """The names under which conditional work stands in the compiled program. They say how often it is done.

    `forward_8_of_14`: a stage does it in 8 of 14 turns; the first or last stage, where only they do it; the one with
    most layers.
    """

    forward: str
    backward: str
    embed: str
    embed_gradient: str
    head: str
    layer: str

    @classmethod
    def of(cls, pipeline: Pipeline) -> "_Shares":
        ticks, micro, works = len(pipeline.plan.tables.forward_chunk), pipeline.microbatches, pipeline.works
        most, places = max(sum(chunks) for chunks in pipeline.stages.split), pipeline.stages.layers.shape[1]
        return cls(
            forward=f"forward_{works}_of_{ticks}",
            backward=f"backward_{works}_of_{ticks}",
            embed=f"embed_{micro}_of_{works}",
            embed_gradient=f"embed_gradient_{micro}_of_{works}",
            head=f"head_{micro}_of_{works}",
            layer=f"layer_{most}_of_{places}",
        )


def _if(name: str, condition: Array, function: Callable[..., State], state: State) -> State:
    """`function(*state)` where the condition holds, else `state`.

    A loop of at most one turn: XLA gives both branches of a conditional buffers of their own, and would copy all
    gradients and the stash in every tick; what a loop carries is changed in place.
    """
    with jax.named_scope(name):
        return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, state: function(*state), state)


def _zeros(shapes: Any, *leading: int) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), shapes)


def _take(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _put(buffer: Any, slot: Array, value: Any) -> Any:
    """`value` in its slot, or in the last one where there is nothing to put."""

    def one(old: Array, new: Array) -> Array:
        index = jnp.where(slot == NOTHING, old.shape[0] - 1, slot)
        return jax.lax.dynamic_update_index_in_dim(old, new, index, 0)

    return jax.tree.map(one, buffer, value)


def _add_at(gradients: Any, place: Array, new: Any) -> Any:
    def one(total: Array, new: Array) -> Array:
        added = jax.lax.dynamic_index_in_dim(total, place) + new.astype(total.dtype)
        return jax.lax.dynamic_update_slice_in_dim(total, added, place, 0)

    return jax.tree.map(one, gradients, new)


def _added(sums: Sums, new: Sums) -> Sums:
    return {name: total + new[name] if name in new else total for name, total in sums.items()}
