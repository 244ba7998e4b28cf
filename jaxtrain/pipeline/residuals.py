"""What a layer's forward leaves for its backward, when the two run at different times."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array

from jaxtrain.models.task import Carry, Params, Sums


class SplitLayer:
    """A layer's forward and backward as two functions, with arrays between them that can be stored.

    What is stored are the residuals of `jax.vjp`, as the layer's rematerialisation leaves them, without those that the
    backward is given anyway: the layer's weights, and what it can look up again.

    Attributes:
        spaces: the memory that each stored array lies in: that of the device, or of the host where it is offloaded.

    Args:
        layer: (weights, carry, lookups) -> (carry, auxiliary sums).
    """

    def __init__(self, layer: Callable[[Params, Carry, Any], tuple[Carry, Sums]]):
        self._layer = layer
        self._structure: Any = None
        self._given: list[int | None] = []
        self.spaces: list[Any] = []

    def forward(self, weights: Params, carry: Carry, lookups: Any) -> tuple[tuple[Carry, Sums], list[Array]]:
        """The layer's outputs, and the arrays to store. Traced before `backward`, which is told their structure."""
        outputs, pullback = jax.vjp(lambda weights, carry: self._layer(weights, carry, lookups), weights, carry)
        residuals, self._structure = jax.tree.flatten(pullback)
        number = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((weights, lookups)))}
        self._given = [number.get(id(residual)) for residual in residuals]
        stored = [each for each, given in zip(residuals, self._given, strict=True) if given is None]
        self.spaces = [jax.typeof(each).memory_space for each in stored]
        return outputs, stored

    def backward(
        self, weights: Params, lookups: Any, stored: Sequence[Array], cotangents: tuple[Carry, Sums]
    ) -> tuple[Params, Carry]:
        """The gradients by weights and carry, from the arrays that were stored and those of the outputs."""
        leaves, kept = jax.tree.leaves((weights, lookups)), iter(stored)
        residuals = [next(kept) if given is None else leaves[given] for given in self._given]
        gradients: tuple[Params, Carry] = jax.tree.unflatten(self._structure, residuals)(cotangents)
        return gradients
