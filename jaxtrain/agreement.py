"""What is asked of the loop beside its steps: a save, an end. All processes do it at the same step.

What is due by time, process 0's clock decides; what else is requested, such as an end after a signal, any process may
ask for. No process waits for another to answer: requests go through the train step as flags of each process, which it
returns joined among its metrics, and are read with these, one step late. (A program of its own behind each step would
be another collective in flight beside the next step's, and on CPUs several of them can lock each other out.) One
process alone has no flags.
"""

import time
from dataclasses import astuple, dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import Config


@dataclass(frozen=True)
class Requests:
    """What the loop is asked to do at the next step where it can.

    Attributes:
        save: save, and go on.
        end: save and end, since `max_hours` have passed.
        preempt: save and end, since a process was told to leave.
        exclude: save and end, since a host is bad.
        save_locally: save to the hosts' own disks, and go on.
    """

    save: bool = False
    end: bool = False
    preempt: bool = False
    exclude: bool = False
    save_locally: bool = False

    def __or__(self, other: "Requests") -> "Requests":
        return Requests(*(a or b for a, b in zip(astuple(self), astuple(other), strict=True)))


class Agreement:
    """Asked once a step by every process.

    Args:
        started: when this start began, by `now()`.
    """

    def __init__(self, config: Config, mesh: Mesh, started: float):
        minutes, hours = config.checkpoint.every_minutes, config.max_hours
        self._save_after = None if minutes is None else 60 * minutes
        local = config.checkpoint.local
        self._save_locally_after = None if local is None or local.every_minutes is None else 60 * local.every_minutes
        self._end_at = None if hours is None else started + 3600 * hours
        self._saved_at = self._saved_locally_at = now()
        self._requested = Requests()
        self._flags = _Flags(mesh) if jax.process_count() > 1 else None

    def request(self, requests: Requests) -> None:
        """Asks for more, from any process and any thread."""
        self._requested |= requests

    def save_every(self, seconds: float) -> None:
        """Asks for a save when so long has passed since the last one began; process 0's counts. From any thread."""
        self._save_after = seconds

    def saved(self) -> None:
        """A save began, for whatever reason."""
        self._saved_at = now()
        self._requested = replace(self._requested, save=False)
        self.saved_locally()

    def saved_locally(self) -> None:
        """A save to the hosts' own disks began, or another one that makes it needless."""
        self._saved_locally_at = now()
        self._requested = replace(self._requested, save_locally=False)

    def ask(self) -> Requests:
        """What this process asks for now."""
        first = jax.process_index() == 0
        save = self._save_after is not None and now() >= self._saved_at + self._save_after
        end = self._end_at is not None and now() >= self._end_at
        after = self._save_locally_after
        locally = after is not None and now() >= self._saved_locally_at + after
        return self._requested | Requests(save=save and first, end=end and first, save_locally=locally and first)

    def abstract_inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What `inputs` will be, to compile the train step for."""
        return {} if self._flags is None else {"flags": self._flags.abstract}

    def inputs(self, asked: Requests) -> dict[str, jax.Array]:
        """What the train step gets beside its other inputs."""
        return {} if self._flags is None else {"flags": self._flags.raised(asked)}

    def answer(self, asked: Requests, flags: jax.Array | None) -> Requests:
        """What is due, the same on every process; `flags` are those among the metrics of the step asked with."""
        return asked if flags is None else Requests(*(bool(flag) for flag in jax.device_get(flags)))


class _Flags:
    """`step.StepInputs["flags"]`: int32[devices, flags], of each process on its own devices; placed once per value."""

    def __init__(self, mesh: Mesh):
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        shape = (mesh.size, len(astuple(Requests())))
        self.abstract = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        self._placed: dict[Requests, jax.Array] = {}

    def raised(self, mine: Requests) -> jax.Array:
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
