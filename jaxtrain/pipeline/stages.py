"""Which stage computes which layers, and the way of weights from where they are stored to there, and of gradients back.

State is one canonical tree, whatever the schedule: layers stacked in order, each weight divided over `fsdp` and
`pipeline`. For a step, a stage collects the layers that it computes, all stages at once in one all-to-all for each
leaf; the gradients go back the same way. What travels is a stage's share of the weights, in the compute dtype;
checkpoints, optimizers and evaluation know nothing of stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxtrain.models.parameters import ParameterInfo
from jaxtrain.models.task import Params
from jaxtrain.optimizer import trainable
from jaxtrain.sharding import PIPELINE, Layout, axes_of, padded

PADDING = -1


@dataclass(frozen=True)
class Stages:
    """The layers of each stage: chunks · `slots` places, of which a short chunk leaves the last ones empty.

    Attributes:
        split: [stage][chunk] layers, contiguous in the order in which a micro-batch passes them.
        loads: the work of each virtual stage, in that order and any unit; the embedding and the head are part of it.
    """

    split: tuple[tuple[int, ...], ...]
    loads: tuple[float, ...] = ()

    @property
    def count(self) -> int:
        """Stages."""
        return len(self.split)

    @property
    def slots(self) -> int:
        """Places for layers in a chunk: as many as the longest one needs."""
        return max(size for chunks in self.split for size in chunks)

    @property
    def is_padded(self) -> bool:
        """Whether any place is empty."""
        return len({size for chunks in self.split for size in chunks}) > 1

    @cached_property
    def layers(self) -> np.ndarray:
        """i32[stage, chunk · slots]: the layer in each place, `PADDING` where there is none."""
        chunks = len(self.split[0])
        places = np.full((self.count, chunks, self.slots), PADDING, np.int32)
        first = 0
        for chunk in range(chunks):
            for stage in range(self.count):
                size = self.split[stage][chunk]
                places[stage, chunk, :size] = np.arange(first, first + size)
                first += size
        return places.reshape(self.count, -1)

    @cached_property
    def places(self) -> np.ndarray:
        """i32[layers]: where each layer is among all stages' places."""
        flat = self.layers.reshape(-1)
        (found,) = np.nonzero(flat != PADDING)
        return found[np.argsort(flat[found])].astype(np.int32)


@dataclass(frozen=True)
class StageWeights:
    """The way of a task's parameters to their stages and back.

    Attributes:
        infos: the parameters' `ParameterInfo`; `infos["layers"]` are distributed, all others go to every stage.
        scattered: whether gradients come from stages divided over `data` where ZeRO divides them. Only where they are
            scattered by hand: left to the partitioner, it would move them inside of conditionals, where not all
            devices are.
    """

    infos: Any
    layout: Layout
    stages: Stages
    scattered: bool = False

    @cached_property
    def stored(self) -> Any:
        """How parameters lie where they are stored."""
        return self._specs(self.layout)

    @cached_property
    def fetched(self) -> Any:
        """How they lie on the stages: of a layer, the first dimension is the stage's places."""

        def one(path: Any, spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(PIPELINE, *spec[1:]) if _is_layer(path) else spec

        return _map_specs(one, self._specs(self.layout.inside(PIPELINE)))

    @cached_property
    def returned(self) -> Any:
        """How the gradients of trained parameters lie on the stages: of what is no layer each stage has its own."""

        on_stages = replace(self.layout.inside(PIPELINE), zero=self._kept.zero)

        def one(path: Any, spec: PartitionSpec) -> PartitionSpec:
            return PartitionSpec(PIPELINE, *(spec[1:] if _is_layer(path) else spec))

        return trainable(_map_specs(one, self._specs(on_stages, gradients=True)), self.infos)

    @property
    def _kept(self) -> Layout:
        return self.layout if self.scattered else replace(self.layout, zero=0)

    def fetch(self, params: Params) -> Params:
        """Parameters as the stages need them: their layers, [stages · places, …], and all others."""
        return self._moved(self._fetch_one, params, self.stored, self.fetched)

    def give_back(self, gradients: Params) -> Params:
        """Gradients as parameters are stored; of what is no layer, [stages, …] are summed. Frozen parameters: None."""
        kept = trainable(self._specs(self._kept, gradients=True), self.infos)
        return self._moved(self._give_back_one, gradients, self.returned, kept)

    def _specs(self, layout: Layout, gradients: bool = False) -> Any:
        def one(info: ParameterInfo) -> PartitionSpec:
            of = layout.gradient if gradients else layout.parameter
            return padded(of(info.axes, info.shape, "parameter").spec, len(info.shape))

        return jax.tree.map(one, self.infos)

    def _moved(self, one: Any, tree: Params, given: Any, returned: Any) -> Params:
        stored = self._specs(self.layout)

        def local(tree: Params) -> Params:
            done: list[Array] = []

            def in_turn(path: Any, leaf: Array) -> Array:
                # All at once, every leaf would have its temporaries at the same time.
                if done:
                    leaf, done[-1] = jax.lax.optimization_barrier((leaf, done[-1]))
                done.append(one(path, leaf, _at(stored, path)))
                return done[-1]

            structure = jax.tree.structure(tree)
            jax.tree_util.tree_map_with_path(in_turn, tree)
            return jax.tree.unflatten(structure, done)

        moved: Params = self.layout.shard_map(local, (given,), returned)(tree)
        return moved

    def _fetch_one(self, path: Any, x: Array, spec: PartitionSpec) -> Array:
        split = _dimension_over(PIPELINE, spec)
        if not _is_layer(path):
            return x if split is None else jax.lax.all_gather(x, PIPELINE, axis=split, tiled=True)
        layers = jnp.asarray(np.maximum(self.stages.layers, 0))
        if split is None:
            return x[layers[jax.lax.axis_index(PIPELINE)]]
        ordered = x[layers]  # [stage, place, …]
        return jax.lax.all_to_all(ordered, PIPELINE, split_axis=0, concat_axis=split + 1, tiled=True)[0]

    def _give_back_one(self, path: Any, gradient: Array, spec: PartitionSpec) -> Array:
        split = _dimension_over(PIPELINE, spec)
        if not _is_layer(path):
            own = gradient[0]
            if split is None:
                return jax.lax.psum(own, PIPELINE)
            return self._in_order(jax.lax.psum_scatter(own, PIPELINE, scatter_dimension=split, tiled=True))
        if split is None:
            everywhere = jax.lax.all_gather(gradient, PIPELINE, axis=0, tiled=True)
        else:
            everywhere = jax.lax.all_to_all(gradient, PIPELINE, split_axis=split, concat_axis=0, tiled=True)
        return everywhere[self.stages.places] if split is None else self._in_order(everywhere[self.stages.places])

    def _in_order(self, gradient: Array) -> Array:
        """A part of a gradient to the device that keeps it.

        ZeRO divides further what stages store; but here the stages have divided what ZeRO had divided before.
        """
        replicas, stages = self.layout.size("data"), self.stages.count
        if "data" not in self._kept.gradient_axes:
            return gradient
        # Devices in the order of `data`, then `pipeline`, which is that of the parts that they hold.
        parts = np.arange(replicas * stages).reshape(replicas, stages)
        kept = parts.reshape(stages, replicas).T  # [data, pipeline]: the part that the device keeps
        to = {int(part): device for device, part in enumerate(kept.reshape(-1))}
        moves = [(device, to[int(part)]) for device, part in enumerate(parts.reshape(-1))]
        return jax.lax.ppermute(gradient, ("data", PIPELINE), moves)


def _map_specs(function: Any, specs: Any) -> Any:
    return jax.tree_util.tree_map_with_path(function, specs, is_leaf=lambda node: isinstance(node, PartitionSpec))


def _at(tree: Any, path: Sequence[Any]) -> Any:
    for entry in path:
        tree = tree[entry.idx if isinstance(entry, jax.tree_util.SequenceKey) else entry.key]
    return tree


def _is_layer(path: Sequence[Any]) -> bool:
    return bool(path[0].key == "layers")


def _dimension_over(axis: str, spec: PartitionSpec) -> int | None:
    """The dimension that a mesh axis divides."""
    return next((dimension for dimension, entry in enumerate(spec) if axis in axes_of(entry)), None)
