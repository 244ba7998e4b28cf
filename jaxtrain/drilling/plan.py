"""Which faults a drill puts into a run, and when: drawn from a seed, the same for the same seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.errors import ConfigError

FAULTS = {
    "kill": "SIGKILL to one process",
    "stop": "SIGSTOP to one process: it is there and does nothing",
    "term": "SIGTERM to one process, as a scheduler preempts a job",
    "nan": "a batch whose loss is not a number",
    "slow": "one process that takes half as long again for each step",
    "corrupt": "SIGKILL to all, and the newest checkpoint has changed on the disk",
    "full": "a full disk while a checkpoint is written",
    "lost": "a process that dies and whose place stays empty until the next restart",
}
"""Kind to what is done."""


@dataclass(frozen=True)
class Fault:
    """One fault: it strikes process `rank` once `step` is finished."""

    kind: str
    step: int
    rank: int


def make_plan(kinds: Sequence[str], seed: int, steps: int, processes: int, every: int) -> tuple[Fault, ...]:
    """One fault of each kind, in this order, spread over the run.

    The first comes once two checkpoints are there, so that one may be lost; the last some steps before the end.

    Args:
        steps: of the whole run.
        every: steps between checkpoints.

    Raises:
        ConfigError: a kind is unknown or there twice, or the run is too short for so many faults.
    """
    for kind in kinds:
        if kind not in FAULTS:
            raise ConfigError(f"--faults {kind}: there is no such fault; there are {', '.join(FAULTS)}")
        if kinds.count(kind) > 1:
            raise ConfigError(
                f"--faults {kind},{kind}: one fault of each kind can be told from the others; name it once"
            )
    first = 2 * every + 1
    room = (steps - first) // max(len(kinds), 1)
    if room < every + 1:
        needed = first + len(kinds) * (every + 1)
        raise ConfigError(
            f"steps={steps}: {len(kinds)} faults with a checkpoint before each need at least {needed} steps at "
            f"checkpoint.every={every}; raise steps, lower checkpoint.every, or choose fewer --faults"
        )
    draw = random.Random(seed)
    return tuple(
        Fault(kind, step=first + index * room + draw.randrange(room - every), rank=draw.randrange(processes))
        for index, kind in enumerate(kinds)
    )
