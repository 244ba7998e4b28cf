"""A parameter as the matrices that it is: optimizers that look at whole matrices look at one layer at a time.

A leaf is stored with its layers (and experts) stacked, and with the heads of attention apart. To Muon and Adafactor
each layer's slice is one matrix [inputs, outputs]: `x @ W`, as the model multiplies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.models.parameters import ParameterInfo

STACKED = ("layers", "experts")
"""Logical axes along which a leaf is a stack of independent parameters."""

_HEADS = ("heads", "kv_heads")


@dataclass(frozen=True)
class MatrixView:
    """How a parameter's dimensions divide into a stack, and the inputs and outputs of each matrix in it.

    Attributes:
        shape, axes: of the whole leaf.
        stacked: leading dimensions that are a stack.
        inputs: dimensions after those that are the matrix's inputs; the rest are its outputs. 0: no matrix.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    stacked: int
    inputs: int

    @property
    def is_matrix(self) -> bool:
        """Whether each layer's slice has inputs and outputs; a vector has none."""
        return self.inputs > 0

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        split = self.stacked + self.inputs
        return math.prod(self.shape[self.stacked : split]), math.prod(self.shape[split:])

    def input_dims(self) -> list[int]:
        """The leaf's dimensions that are stacked or inputs: those of a number per row."""
        return list(range(self.stacked + self.inputs))

    def output_dims(self) -> list[int]:
        """The leaf's dimensions that are stacked or outputs: those of a number per column."""
        return [*range(self.stacked), *range(self.stacked + self.inputs, len(self.shape))]


def matrix_view(info: ParameterInfo) -> MatrixView:
    """How a parameter is seen.

    Leading `layers` and `experts` are the stack. A head and the width of a head are one dimension, heads × head_dim. Of
    what is then left the last dimension is the outputs, all others together the inputs: [embed, heads, head_dim] is
    embed × (heads·head_dim), [heads, head_dim, embed] is (heads·head_dim) × embed, a convolution's
    [height, width, in, out] is (height·width·in) × out, and a single dimension is a vector.
    """
    stacked = 0
    while stacked < len(info.axes) and info.axes[stacked] in STACKED:
        stacked += 1
    one_matrix = info.axes[stacked:]
    outputs = 2 if one_matrix[-1:] == ("head_dim",) and one_matrix[-2:-1] and one_matrix[-2] in _HEADS else 1
    return MatrixView(info.shape, info.axes, stacked, max(len(one_matrix) - outputs, 0))


def each_layer(function: Callable[..., Any], view: MatrixView) -> Callable[..., Any]:
    """`function` of one layer's arrays as a function of the stacked ones."""
    for _ in range(view.stacked):
        function = jax.vmap(function)
    return function
