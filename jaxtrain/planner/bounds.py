"""How little a training step must move: lower bounds that a compiled program is held against.

All are bytes that one device sends or receives in one step, counted as the compiled program's are: the larger of
operand and result of each collective. A program can fall below where it does something cleverer, such as looking up an
embedding without gathering its table, or using one gather of the head for both passes.
"""

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxtrain.models.parameters import count_parameters
from jaxtrain.program import Program
from jaxtrain.step import with_rows


@dataclass(frozen=True)
class Bounds:
    """Bytes per device and step that each kind of parallelism costs at least."""

    weights: int
    gradients: int
    residual: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.residual


def fsdp_bound(parameters: int, tensor: int = 1, bytes_each: int = 2, frozen: int = 0) -> int:
    """Weights split over `fsdp`: two gathers and one reduce-scatter of all that a device computes with.

    The forward pass needs every weight whole once; the backward pass needs it again for the gradient of its input,
    since keeping all gathered weights would undo the split; and each gradient is summed over the devices once and
    left split. Each moves the whole weights of a device's tensor shard, parameters / tensor, in the compute dtype:
    3 · bytes · parameters / tensor (ZeRO, arXiv 1910.02054, section 7.2.2, counts the same). It doesn't grow with the
    batch; where weights are gathered for each micro-batch, each costs as much. Frozen parameters, a part of
    `parameters`, are gathered and have no gradient.
    """
    return bytes_each * (3 * parameters - frozen) // tensor


def gathered_once_bound(parameters: int, tensor: int = 1, bytes_each: int = 2, frozen: int = 0) -> int:
    """Weights that are gathered once for all micro-batches and kept: one gather, and one reduce-scatter in float32.

    Gradients of many micro-batches are added up on each device before they are summed, and the sum is float32.
    """
    return (bytes_each * parameters + 4 * (parameters - frozen)) // tensor


def data_bound(parameters: int, split: int, bytes_each: int = 2) -> int:
    """Weights copied over `data`: one all-reduce of the gradient's shard, parameters / (fsdp · tensor)."""
    return bytes_each * parameters // split


def tensor_bound(layers: int, residual: int, recompute: bool = True) -> int:
    """Matrices split over `tensor`, with the residual stream's sequence split over it between them.

    A layer enters two tensor regions (attention, MLP) by gathering the residual and leaves each by reduce-scattering it
    (Korthikanti et al., arXiv 2205.05198, section 4.2.2):

    - forward: 2 gathers, 2 reduce-scatters;
    - backward: the transposes, 2 gathers (of the outputs' gradients) and 2 reduce-scatters (of the inputs');
    - recomputation with only the layer's input kept: 2 gathers, whose results the weights' gradients use too, and 1
      reduce-scatter, since what the MLP adds isn't needed again.

    Together 6 gathers and 5 reduce-scatters with recomputation; 4 and 4 where all activations are kept, gathered ones
    included.

    Args:
        residual: bytes of the whole residual of a device's rows, [rows, sequence, embed], in the compute dtype.
        recompute: whether the backward pass computes the layers again.
    """
    return layers * residual * (11 if recompute else 8)


def bounds_of(program: Program) -> Bounds:
    """The bounds of a program on its mesh, for its largest batch and the stage with most layers.

    The residual's only for a task that is cut into layers.
    """
    layout, task, config = program.layout, cast(Any, program.task), program.config
    width = jnp.dtype(config.precision).itemsize
    passes, once = program.passes(max(config.batches.sizes)), config.fsdp.gather == "step"
    parameters, frozen = _of_a_stage(program)
    fsdp, tensor, data = (layout.size(axis) for axis in ("fsdp", "tensor", "data"))
    weights = gradients = residual = 0
    if fsdp > 1 and passes > 1 and once:
        weights = gathered_once_bound(parameters, tensor, width, frozen)
    elif fsdp > 1:
        weights = passes * fsdp_bound(parameters, tensor, width, frozen)
    if data > 1:
        width_summed = 4 if passes > 1 and once else width
        gradients = (1 if once else passes) * data_bound(parameters - frozen, fsdp * tensor, width_summed)
    if tensor > 1 and hasattr(task, "layer_count"):
        rows = layout.size(*layout.batch_axes)
        carry = jax.eval_shape(lambda params, batch: task.embed(params, with_rows(batch), None), *_abstract(program))
        local = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(carry)) // rows
        stages = program.stages
        layers = task.layer_count if stages is None else max(sum(chunks) for chunks in stages.split)
        residual = tensor_bound(layers, local, recompute=config.remat == "full")
    return Bounds(weights, gradients, residual)


def _of_a_stage(program: Program) -> tuple[int, int]:
    """The parameters that the stage with most layers computes with, all without stages, and the frozen among them."""
    stages = program.stages

    def count(infos: Any) -> int:
        whole = count_parameters(infos)
        if stages is None:
            return whole
        layers = count_parameters([info for info in infos if info.is_stacked])
        most, all_layers = max(sum(chunks) for chunks in stages.split), int((stages.layers >= 0).sum())
        return whole - layers + layers * most // all_layers

    infos = jax.tree.leaves(program.infos)
    return count(infos), count([info for info in infos if info.frozen])


def _abstract(program: Program) -> Any:
    """(parameters, the largest batch) without shardings."""
    tree = (program.state["params"], program.batch_of(max(program.config.batches.sizes)))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
