"""The layout that a model is traced for, and the one helper that applies it.

Models name the dimensions of their activations; only here do the names meet a mesh. Without a layout in force (a model
called by hand, in a notebook) nothing is constrained.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.sharding.mesh import PIPELINE
from jaxtrain.sharding.rules import Rules, partition_spec, split_over_data, with_own_rules

Zero = Literal[0, 1, 2]
"""What `data` splits, beside rows: nothing; the optimizer's state; gradients too (ZeRO, arXiv 1910.02054)."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A mesh and the two rule maps.

    Attributes:
        zero: what of the state the mesh axis `data` splits, where parameters are split over `fsdp`.
        manual: mesh axes of which the code that is traced sees one shard: it runs in a `shard_map` over them. To the
            rules they split nothing.
        choices: what operations that can be computed in several ways chose when they were traced, and why, by name.
    """

    mesh: Mesh
    parameter_rules: Rules
    activation_rules: Rules
    zero: Zero = 0
    manual: frozenset[str] = frozenset()
    choices: dict[str, str] = field(default_factory=dict)

    @classmethod
    def on(cls, mesh: Mesh, own_rules: Mapping[str, Sequence[str]] | None = None, zero: Zero = 0) -> "Layout":
        """The standard rules on `mesh`, and perhaps those of somebody's own logical axes.

        Raises:
            ShardingError: an own axis has the name of a standard one.
        """
        parameter_rules, activation_rules = with_own_rules(own_rules or {})
        return cls(mesh, parameter_rules, activation_rules, zero)

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`: what the devices of the mesh are, present or not."""
        platform: str = self.mesh.devices.flat[0].platform
        return "gpu" if platform == "cuda" else platform

    def for_inference(self) -> "Layout":
        """The same where nothing is pipelined: stages share the rows, and gather each other's weights as fsdp does."""
        batch = (PIPELINE, *self.activation_rules["batch"])
        return replace(self, activation_rules={**self.activation_rules, "batch": batch})

    def for_decoding(self) -> "Layout":
        """That of inference for programs that decode token by token: a sequence of one can't be split."""
        layout = self.for_inference()
        return replace(layout, activation_rules={**layout.activation_rules, "seq": (), "residual_seq": ()})

    def inside(self, *manual: str) -> "Layout":
        """What holds for code in a `shard_map` over the mesh axes `manual`, whose gradients ZeRO divides outside."""
        return replace(self, manual=self.manual | set(manual), zero=0)

    @property
    def sizes(self) -> Mapping[str, int]:
        """How many parts each mesh axis splits into."""
        return {axis: 1 if axis in self.manual else size for axis, size in self.mesh.shape.items()}

    @property
    def splits(self) -> bool:
        """Whether any axis splits anything."""
        return bool(self.split_axes(*self.mesh.axis_names))

    def size(self, *mesh_axes: str) -> int:
        """How many parts the given mesh axes make."""
        return math.prod(self.sizes[axis] for axis in mesh_axes)

    def split_axes(self, *mesh_axes: str) -> tuple[str, ...]:
        """Those of `mesh_axes` that really split something."""
        return tuple(axis for axis in mesh_axes if self.sizes[axis] > 1)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the rows of a batch."""
        return self.split_axes(*self.activation_rules["batch"])

    @property
    def weight_axes(self) -> tuple[str, ...]:
        """The mesh axes over which weights are stored in parts, and gathered to be multiplied with."""
        return self.split_axes(*self.parameter_rules["embed"])

    @property
    def gradient_axes(self) -> tuple[str, ...]:
        """The mesh axes over which gradients of weights are kept in parts: `weight_axes`, and with ZeRO 2 `data`."""
        return self.split_axes(*self._rules_of("gradient")["embed"])

    def parameter(self, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
        """The sharding of a parameter."""
        return self._sharding(self.parameter_rules, axes, shape, what)

    def gradient(self, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
        """The sharding of a parameter's gradient."""
        return self._sharding(self._rules_of("gradient"), axes, shape, what)

    def moment(self, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
        """The sharding of what the optimizer keeps of a parameter: its moments, its average."""
        return self._sharding(self._rules_of("moment"), axes, shape, what)

    def _rules_of(self, what: Literal["gradient", "moment"]) -> Rules:
        split = self.zero == 2 or (self.zero == 1 and what == "moment")
        return split_over_data(self.parameter_rules) if split else self.parameter_rules

    def activation(self, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
        """The sharding of an activation or of a batch array."""
        return self._sharding(self.activation_rules, axes, shape, what)

    def _sharding(self, rules: Rules, axes: Sequence[str | None], shape: Sequence[int], what: str) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(rules, axes, shape, self.sizes, what))

    def replicated(self) -> NamedSharding:
        """The sharding of scalars."""
        return NamedSharding(self.mesh, PartitionSpec())

    def constrain(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """`x` with a sharding that this layout gave."""
        if not self.splits:
            return x
        # In a shard_map only the mesh of the context will do, whose manual axes it knows.
        return jax.lax.with_sharding_constraint(x, sharding.spec if self.manual else sharding)

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` of the shards that a device holds, over all axes that aren't manual yet."""
        if not self.manual:
            return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        axes = set(self.mesh.axis_names) - self.manual
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


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
    if layout is None or not layout.splits:
        return x
    return layout.constrain(x, layout.activation(axes, x.shape, f"activation {axes}"))
