"""The layout that a model is traced for, and the one helper that applies it.

Models name the dimensions of their activations; only here do the names meet a mesh. Without a layout in force (a model
called by hand, in a notebook) nothing is constrained.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.sharding.rules import Rules, partition_spec, with_own_rules


@dataclass(frozen=True, eq=False)
class Layout:
    """A mesh and the two rule maps.

    Attributes:
        choices: what operations that can be computed in several ways chose when they were traced, and why, by name.
    """

    mesh: Mesh
    parameter_rules: Rules
    activation_rules: Rules
    choices: dict[str, str] = field(default_factory=dict)

    @classmethod
    def on(cls, mesh: Mesh, own_rules: Mapping[str, Sequence[str]] | None = None) -> "Layout":
        """The standard rules on `mesh`, and perhaps those of somebody's own logical axes.

        Raises:
            ShardingError: an own axis has the name of a standard one.
        """
        parameter_rules, activation_rules = with_own_rules(own_rules or {})
        return cls(mesh, parameter_rules, activation_rules)

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: what the devices of the mesh are, present or not."""
        platform: str = self.mesh.devices.flat[0].platform
        return "gpu" if platform == "cuda" else platform

    def for_decoding(self) -> "Layout":
        """The same for programs that decode token by token: a sequence of one can't be split."""
        return Layout(self.mesh, self.parameter_rules, {**self.activation_rules, "seq": (), "residual_seq": ()})

    def size(self, *mesh_axes: str) -> int:
        """How many devices the given mesh axes span."""
        product = 1
        for axis in mesh_axes:
            product *= self.mesh.shape[axis]
        return product

    def split_axes(self, *mesh_axes: str) -> tuple[str, ...]:
        """Those of `mesh_axes` that really split something."""
        return tuple(axis for axis in mesh_axes if self.mesh.shape[axis] > 1)

    def parameter(self, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
        """The sharding of a parameter, its gradient and its optimizer moments."""
        return NamedSharding(self.mesh, partition_spec(self.parameter_rules, axes, shape, self.mesh.shape, what))

    def activation(self, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
        """The sharding of an activation or of a batch array."""
        return NamedSharding(self.mesh, partition_spec(self.activation_rules, axes, shape, self.mesh.shape, what))

    def replicated(self) -> NamedSharding:
        """The sharding of scalars."""
        return NamedSharding(self.mesh, PartitionSpec())


_current: ContextVar[Layout | None] = ContextVar("jaxtrain_layout", default=None)


@contextlib.contextmanager
def use_layout(layout: Layout) -> Iterator[None]:
    """Puts `layout` in force for everything traced inside."""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


def current_layout() -> Layout | None:
    """The layout in force, or None outside of a program."""
    return _current.get()


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x`, sharded as its logical `axes` say; unchanged where no layout is in force.

    Raises:
        ShardingError: a dimension doesn't divide (JAX alone would replicate it without a word).
    """
    layout = current_layout()
    if layout is None or layout.mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, layout.activation(axes, x.shape, f"activation {axes}"))
