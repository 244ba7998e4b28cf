"""The fast tier: checkpoints on each host's own disk, with a copy of each process's part on another host's.

A step can be restored when a whole part of each process is found somewhere: its own, or its copy, sent over from the
host that has it. So any one host may lose its disk, and processes may come back on other hosts. The mesh and the number
of processes must be the same; with others, the tier of `checkpoint.dir` is used.

Orbax has a tier of this kind (`orbax.checkpoint.experimental.emergency.p2p`), which works on CPU processes too. It is
not used, since it copies nothing to a neighbour: it looks for a replica, so where fsdp spreads one copy of the state
over all hosts, the loss of one disk loses every step of this tier; and it takes altered bytes as they are.
"""

import json
import logging
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain import distributed
from jaxtrain.checkpoint.arrays import read_by_all
from jaxtrain.checkpoint.exchange import Address, Exchange
from jaxtrain.checkpoint.meta import Meta, Unreadable
from jaxtrain.checkpoint.shards import Pieces, copy_pieces, place_pieces, read_part, write_part
from jaxtrain.config import DistributedConfig
from jaxtrain.errors import first_line

_log = logging.getLogger(__name__)

OnSaved = Callable[[int, float, float], None]
_BUSY, _FAILED, _DONE = range(3)


@dataclass(frozen=True)
class _Process:
    """What every process tells the others: where it is reached, and which disk it writes to."""

    address: Address
    disk: str


@dataclass(frozen=True)
class Found:
    """A step of which every part is somewhere: by owner, the processes whose disk has the part."""

    step: int
    holders: dict[int, list[int]]


class LocalTier:
    """The local checkpoints of one run. Every process calls every method, in the same order.

    Args:
        folder: of this run and no other one, on a disk of this host; it is there.
        on_saved: called from a background thread, with (step, seconds, seconds of these that the loop stood still),
            once this process's part and its copy are written.
    """

    def __init__(self, folder: Path, group: DistributedConfig, on_saved: OnSaved):
        self._folder = folder
        self._on_saved = on_saved
        self._rank, self._count = jax.process_index(), jax.process_count()
        secret = distributed.texts(secrets.token_hex(32))[0].encode()
        self._exchange = Exchange(self._folder, distributed.own_address(group), secret)
        self._processes = self._introduce(f"{socket.gethostname()}:{self._folder.resolve()}")
        self._keeper = keeper(self._rank, [process.disk for process in self._processes])
        disks = [process.disk for process in self._processes]
        self._sweeps = disks.index(disks[self._rank]) == self._rank
        self._writing: threading.Thread | None = None
        self._failed = False
        self._newest: int | None = None
        self._whole: int | None = None

    @property
    def has_copies(self) -> bool:
        """Whether this process's part has a copy on another disk."""
        return self._keeper is not None

    def save(self, state: Any, describe: Callable[[], Meta]) -> bool:
        """Starts to save; returns when `state` may be donated. False, on every process, where one still runs."""
        began = time.monotonic()
        running = self._writing is not None and self._writing.is_alive()
        ended = distributed.least(_BUSY if running else _FAILED if self._failed else _DONE)
        if ended == _BUSY:
            return False
        if ended == _DONE:
            self._whole = self._newest
        meta = describe()
        self._newest, self._failed = meta.step, False
        pieces = copy_pieces(state)
        stall = time.monotonic() - began
        self._writing = threading.Thread(
            target=self._write, args=(pieces, meta, began, stall), name="local-save", daemon=True
        )
        self._writing.start()
        return True

    def found(self) -> list[Found]:
        """The steps that may be restored, newest first; the same on every process. A save that runs is waited for."""
        if self._writing is not None:
            self._writing.join()
        mine = [[int(path.parent.name), *map(int, path.stem.split("-of-"))] for path in self._folder.glob("*/*.npz")]
        steps: dict[int, dict[int, list[int]]] = {}
        others = set()
        for holder, text in enumerate(distributed.texts(json.dumps(mine))):
            for step, owner, count in json.loads(text):
                if count == self._count:
                    steps.setdefault(step, {}).setdefault(owner, []).append(holder)
                else:
                    others.add((step, count))
        for step, count in sorted(others):
            _log.warning("local checkpoint %d is of %d processes, not %d, and is not used", step, count, self._count)
        whole = [Found(step, holders) for step, holders in steps.items() if len(holders) == self._count]
        for step in sorted(steps.keys() - {found.step for found in whole}):
            missing = sorted(set(range(self._count)) - steps[step].keys())
            _log.warning("local checkpoint %d lacks the part of process %s and is not used", step, missing[0])
        return sorted(whole, key=lambda found: found.step, reverse=True)

    def restore(self, found: Found, abstract_state: Any) -> tuple[Any, Meta]:
        """The state and its description; its checksums are the caller's to compare.

        Raises:
            Unreadable: on every process, where one of them has no whole part of it.
        """
        meta, state = read_by_all(lambda: self._read(found, abstract_state))
        if not distributed.same_everywhere((meta.step, meta.position, sorted(meta.checksums.items()))):
            raise Unreadable("the processes have parts of different saves")
        return state, meta

    def forget_after(self, step: int) -> None:
        """Deletes what is of later steps: the run goes on from this one and will come there another time."""
        self._newest = self._whole = step  # stays, if it is here, until a later one is whole
        self._sweep(lambda other: other > step)

    def close(self, durable: int) -> None:
        """Waits for a save that runs; deletes what a checkpoint of step `durable` makes useless."""
        if self._writing is not None:
            self._writing.join()
        self._exchange.close()
        self._sweep(lambda step: step <= durable)

    def _introduce(self, disk: str) -> list[_Process]:
        address = self._exchange.address
        told = [json.loads(text) for text in distributed.texts(json.dumps([*address, disk]))]
        return [_Process((host, port), disk) for host, port, disk in told]

    def _part(self, step: int, owner: int) -> str:
        return f"{step}/{owner}-of-{self._count}.npz"

    def _write(self, pieces: Pieces, meta: Meta, began: float, stall: float) -> None:
        name = self._part(meta.step, self._rank)
        try:
            write_part(self._folder / name, pieces, meta)
            if self._keeper is not None:
                self._exchange.put(self._processes[self._keeper].address, name, self._folder / name)
        except Exception as error:  # the run has its other checkpoints
            self._failed = True
            _log.warning("local checkpoint %d of process %d failed: %s", meta.step, self._rank, first_line(error))
            return
        self._sweep(lambda step: step < meta.step and step != self._whole)
        self._on_saved(meta.step, time.monotonic() - began, stall)

    def _read(self, found: Found, abstract_state: Any) -> tuple[Meta, Any]:
        problems = []
        for holder in self._nearest(found.holders[self._rank]):
            try:
                meta, pieces = self._read_from(holder, self._part(found.step, self._rank))
                state = place_pieces(pieces, abstract_state)
            except (Unreadable, OSError) as problem:
                problems.append(f"on the disk of process {holder}: {first_line(problem)}")
                continue
            for text in problems:
                _log.warning("local checkpoint %d %s; the copy with process %d is used", found.step, text, holder)
            return meta, state
        raise Unreadable("; ".join(problems))

    def _nearest(self, holders: list[int]) -> Iterator[int]:
        """This disk first; of each disk, one process."""
        disks = [process.disk for process in self._processes]
        seen = set()
        for holder in sorted(holders, key=lambda holder: disks[holder] != disks[self._rank]):
            if disks[holder] not in seen:
                seen.add(disks[holder])
                yield holder

    def _read_from(self, holder: int, name: str) -> tuple[Meta, Pieces]:
        if self._processes[holder].disk == self._processes[self._rank].disk:
            return read_part(self._folder / name)
        return read_part(self._exchange.get(self._processes[holder].address, name))

    def _sweep(self, condemned: Callable[[int], bool]) -> None:
        """By one process of each disk."""
        if not self._sweeps:
            return
        for folder in self._folder.iterdir():
            if folder.name.isdecimal() and condemned(int(folder.name)):
                shutil.rmtree(folder, ignore_errors=True)


def keeper(process: int, disks: list[str]) -> int | None:
    """Which process keeps the copy of this one's part: the next one with another disk; None where all share one.

    Where hosts have equally many processes, each keeps as many copies.
    """
    others = [other for other in range(len(disks)) if disks[other] != disks[process]]
    if not others:
        return None
    place = [other for other in range(len(disks)) if disks[other] == disks[process]].index(process)
    following = [other for other in others if other > process] or others
    same_disk = [other for other in others if disks[other] == disks[following[0]]]
    return same_disk[place % len(same_disk)]
