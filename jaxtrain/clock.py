"""What is due by time: a save, the end of this start. Process 0's clock decides, for all at the same step.

No process waits for another's clock: the answer goes through the train step as flags of each process, which it returns
joined among its metrics, and is read with these, one step late. (A program of its own behind each step would be another
collective in flight beside the next step's, and on CPUs several of them can lock each other out.) With one process, or
where no key asks for a time, the step has no flags.
"""

import time
from dataclasses import astuple, dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import Config


@dataclass(frozen=True)
class Due:
    """What time asks for."""

    save: bool = False
    end: bool = False

    def __or__(self, other: "Due") -> "Due":
        return Due(self.save or other.save, self.end or other.end)


class Clock:
    """Asked once a step by every process.

    Args:
        started: when this start began, by `now()`.
    """

    def __init__(self, config: Config, mesh: Mesh, started: float):
        minutes, hours = config.checkpoint.every_minutes, config.max_hours
        self._save_after = None if minutes is None else 60 * minutes
        self._end_at = None if hours is None else started + 3600 * hours
        self._saved_at = now()
        is_set = self._save_after is not None or self._end_at is not None
        self._flags = _Flags(mesh) if jax.process_count() > 1 and is_set else None

    def saved(self) -> None:
        """A save began, for whatever reason."""
        self._saved_at = now()

    def ask(self) -> Due:
        """What is due now by this process's clock."""
        save = self._save_after is not None and now() >= self._saved_at + self._save_after
        end = self._end_at is not None and now() >= self._end_at
        return Due(save, end)

    def abstract_inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What `inputs` will be, to compile the train step for."""
        return {} if self._flags is None else {"flags": self._flags.abstract}

    def inputs(self, asked: Due) -> dict[str, jax.Array]:
        """What the train step gets beside its other inputs."""
        if self._flags is None:
            return {}
        # The other processes take part, and say nothing.
        return {"flags": self._flags.raised(asked if jax.process_index() == 0 else Due())}

    def answer(self, asked: Due, flags: jax.Array | None) -> Due:
        """What is due, the same on every process; `flags` are those among the metrics of the step asked with."""
        return asked if flags is None else Due(*(bool(flag) for flag in jax.device_get(flags)))


class _Flags:
    """`step.StepInputs["flags"]`: int32[devices, flags], of each process on its own devices; placed once per value."""

    def __init__(self, mesh: Mesh):
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        shape = (mesh.size, len(astuple(Due())))
        self.abstract = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        self._placed: dict[Due, jax.Array] = {}

    def raised(self, mine: Due) -> jax.Array:
        """The flags of this process, on its devices."""
        if mine not in self._placed:
            rows = np.broadcast_to(np.array(astuple(mine), np.int32), self.abstract.shape)
            placed = jax.make_array_from_callback(
                self.abstract.shape, self.abstract.sharding, lambda index: rows[index]
            )
            self._placed[mine] = placed
        return self._placed[mine]


def now() -> float:
    """Seconds of a clock that never goes back."""
    return time.monotonic()
