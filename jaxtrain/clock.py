"""What is due by time: a save, the end of this start. Process 0's clock decides, for all at the same step.

No process waits for another's clock: the answer travels through the devices behind each step, as its metrics do, and is
read with them, one step late. With one process, or where no key asks for a time, no device has anything to do.
"""

import time
from dataclasses import dataclass
from typing import Any

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
        self._or = _Or(mesh, flags=2) if jax.process_count() > 1 and self._is_set() else None

    def saved(self) -> None:
        """A save began, for whatever reason."""
        self._saved_at = now()

    def ask(self) -> Any:
        """What is due now, to be given to `answer` when the step that was just dispatched is read."""
        if not self._is_set():
            return ()
        moment = now()
        save = self._save_after is not None and moment >= self._saved_at + self._save_after
        end = self._end_at is not None and moment >= self._end_at
        if self._or is None:
            return save, end
        # The others take part, and say nothing.
        return self._or((save, end) if jax.process_index() == 0 else (False, False))

    def answer(self, asked: Any) -> Due:
        """The same on every process."""
        return Due(*(bool(flag) for flag in jax.device_get(asked)))

    def _is_set(self) -> bool:
        return self._save_after is not None or self._end_at is not None


class _Or:
    """Flags of each process → whether any has raised them, on the devices of a mesh, without waiting."""

    def __init__(self, mesh: Mesh, flags: int):
        self._sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._shape = (mesh.size, flags)
        replicated = NamedSharding(mesh, PartitionSpec())
        abstract = jax.ShapeDtypeStruct(self._shape, jnp.int32, sharding=self._sharding)
        self._any = jax.jit(lambda raised: raised.max(axis=0), out_shardings=replicated).lower(abstract).compile()
        self._placed: dict[tuple[bool, ...], jax.Array] = {}

    def __call__(self, mine: tuple[bool, ...]) -> jax.Array:
        if mine not in self._placed:
            rows = np.broadcast_to(np.array(mine, np.int32), self._shape)
            self._placed[mine] = jax.make_array_from_callback(self._shape, self._sharding, lambda index: rows[index])
        result: jax.Array = self._any(self._placed[mine])
        return result


def now() -> float:
    """Seconds of a clock that never goes back."""
    return time.monotonic()
