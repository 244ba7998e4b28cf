"""Saving and restoring: asynchronous, verified by content, independent of layout.

A checkpoint is one Orbax composite, committed as a whole: `state`, which plain Orbax reads without a target, and
`meta`, JSON with step, data position, config, versions and a checksum per leaf.
"""

import contextlib
import importlib.metadata
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain import distributed
from jaxtrain.checkpoint.arrays import Types, array_types, read_arrays, read_by_all, state_handler, verify
from jaxtrain.checkpoint.checksum import as_text, content_sums
from jaxtrain.checkpoint.completion import Completion
from jaxtrain.checkpoint.directory import (
    Listing,
    delete,
    list_checkpoints,
    set_aside,
    state_path,
    step_path,
)
from jaxtrain.checkpoint.local import Found, LocalTier, OnSaved
from jaxtrain.checkpoint.meta import Meta, Unreadable, read_meta
from jaxtrain.checkpoint.retention import Retention
from jaxtrain.checkpoint.tree import to_plain
from jaxtrain.config import CheckpointConfig
from jaxtrain.errors import LASTING, CheckpointError, ConfigError, StorageError, first_line
from jaxtrain.executables import compile_or_load

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_log = logging.getLogger(__name__)

_READY, _THERE, _BUSY = range(3)
_WITHOUT_LIMIT, _LATER = 30 * 24 * 3600, 60


class Checkpointer:
    """The checkpoints of one run. Every process calls every method; process 0 owns the directory.

    Attributes:
        tier: where the state was restored from: `durable`, or `local`; None before.

    Args:
        directory: where the steps lie; made at the first save.
        rules: which checkpoints stay.
        on_saved: called on process 0, from a background thread, with (step, seconds, seconds of these that the loop
            stood still) once a save is committed.
        limit: seconds in which others see to it that a save ends; Orbax waits for other processes a minute longer.

    Raises:
        ConfigError: no checkpoint can be saved at this path.
    """

    def __init__(self, directory: Path, rules: CheckpointConfig, on_saved: OnSaved, limit: float | None = None):
        if "[" in str(directory):
            # Orbax looks for the parts of a save with `glob`; where it finds none it commits a checkpoint without data.
            raise ConfigError(
                f"{directory}: checkpoints can't be kept below a path with `[`, which Orbax takes for a pattern; "
                f"choose another run_dir or checkpoint.dir"
            )
        self.directory = directory
        self._retention = Retention(directory, rules)
        self._patience = rules.patience
        self._local: LocalTier | None = None
        self.tier: str | None = None
        self._on_saved = [on_saved]
        self._completion: Completion | None = None
        self._sums: Callable[[Any], dict[str, jax.Array]] = jax.jit(content_sums)
        self._orbax = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(state=state_handler(), meta=ocp.JsonCheckpointHandler()),
            async_options=ocp.options.AsyncOptions(
                timeout_secs=_WITHOUT_LIMIT if limit is None else ceil(limit) + _LATER
            ),
        )

    def tell(self, on_saved: OnSaved) -> None:
        """Calls this too once a save is committed."""
        self._on_saved.append(on_saved)

    def use_local(self, tier: LocalTier) -> None:
        """Saves and restores there too."""
        self._local = tier

    def claim(self) -> None:
        """Makes the directory, and raises an OSError now if nothing can be written there when the first save is due."""
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass

    def prepare(self, abstract_state: Any) -> None:
        """Compiles the checksum program, so that no save waits for a compiler; warns where the disk is too small."""
        leaves = jax.tree.leaves(abstract_state)
        if jax.process_index() == 0:
            self._retention.warn_of_small_disk(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))
        devices = list(leaves[0].sharding.mesh.devices.flat)
        self._sums = compile_or_load(jax.jit(content_sums).lower(abstract_state), devices)

    def save(self, state: Any, meta: Meta, *, patient: bool = True) -> bool:
        """Starts to save; returns when `state` may be donated. The write itself runs in the background.

        A step that is already there is not written again.

        Args:
            patient: whether to wait for a save that still runs, however long it takes, or for `checkpoint.patience`.

        Returns:
            False where nothing was begun, since the save before still runs; the same on every process.

        Raises:
            CheckpointError: this save can't start, or an earlier one failed in the background.
        """
        path = step_path(self.directory, meta.step)
        readiness = self._readiness(path, patient) if jax.process_index() == 0 else _READY
        began = time.monotonic()
        readiness = distributed.from_first(readiness)
        if readiness == _BUSY:
            return False
        self.wait()
        if readiness == _THERE:
            return True
        plain, complete = to_plain(state), self._described(state, meta)
        with _naming(path):
            self._orbax.save(
                path, args=ocp.args.Composite(state=ocp.args.PyTreeSave(plain), meta=ocp.args.JsonSave(vars(complete)))
            )
        if jax.process_index() == 0:
            stall = time.monotonic() - began
            self._completion = Completion(
                path, lambda: self._completed(meta.step, began, stall), self._orbax.check_for_errors
            )
        return True

    def save_locally(self, state: Any, meta: Meta) -> bool:
        """Starts to save to the hosts' own disks; False, on every process, where such a save still runs."""
        assert self._local is not None, "asked for by checkpoint.local"
        return self._local.save(state, lambda: self._described(state, meta))

    def _described(self, state: Any, meta: Meta) -> Meta:
        return replace(
            meta,
            checksums=as_text(jax.device_get(self._sums(state))),
            arrays=array_types(state),
            saved_at=time.time(),
            versions={name: importlib.metadata.version(name) for name in _PACKAGES},
        )

    def _readiness(self, path: Path, patient: bool) -> int:
        """Waits for the save that is running; by process 0 alone, for all."""
        if self._completion is not None and not patient:
            with _naming(self.directory):
                if not self._completion.wait(self._patience):
                    return _BUSY
        self.wait()
        return _THERE if path.exists() else _READY

    def check(self) -> None:
        """Raises the CheckpointError of a background save that failed; costs nothing otherwise."""
        with _naming(self.directory):
            self._orbax.check_for_errors()
            if self._completion is not None:
                self._completion.check()

    def wait(self) -> None:
        """Waits for the save that is running, if any, and for the deletion of what it replaces."""
        completion, self._completion = self._completion, None
        with _naming(self.directory):
            try:
                self._orbax.wait_until_finished()
            finally:
                if completion is not None:
                    completion.ended()
            if completion is not None:
                completion.check()

    def settle(self) -> None:
        """Lets a running save finish where the run ends early; that it failed is logged, since worse is on its way."""
        try:
            self.wait()
        except CheckpointError as error:
            _log.error("%s", error)

    def close(self) -> None:
        """Waits for the last save; deletes what the rules no longer keep, also where they were changed since."""
        self.wait()
        if jax.process_index() == 0:
            self._retention.apply()
        self._orbax.close()
        if self._local is not None:
            self._local.close(max(list_checkpoints(self.directory).steps, default=0))

    def newest_up_to(self, step: int) -> int | None:
        """The newest complete checkpoint that is not after `step`; a save that is running is waited for."""
        self.wait()
        return max((saved for saved in self._agreed_listing().steps if saved <= step), default=None)

    def go_back_to(self, step: int, abstract_state: Any) -> tuple[Any, Meta]:
        """The newest checkpoint that can be read of those not after `step`; all that are after it are deleted.

        They are of a way that the run no longer goes. Until the older one is read they stay.

        Raises:
            CheckpointError: none can be read.
        """
        restored = self.restore_newest(abstract_state, step)
        if restored is None:
            raise CheckpointError(f"{self.directory}: no checkpoint up to step {step} is left to go back to")
        if jax.process_index() == 0:
            for later in list_checkpoints(self.directory).steps:
                if later > restored[1].step:
                    delete(step_path(self.directory, later))
                    self._retention.forget(later)
        distributed.barrier("later checkpoints deleted")
        return restored

    def restore_newest(self, abstract_state: Any, up_to: int | None = None) -> tuple[Any, Meta] | None:
        """The newest checkpoint that is complete and reads back with its checksums; None if there is none at all.

        Newer ones that can't be read are set aside with a warning, never taken as absent. Of equal steps, the one that
        is not on the hosts' own disks is taken.

        Args:
            up_to: later steps than this one are left out, and alone.

        Raises:
            CheckpointError: checkpoints are there, but none can be read, or they don't fit the program.
        """
        listing = self._agreed_listing()
        unusable = [(path, "incomplete") for path in listing.incomplete]
        for path in listing.incomplete:
            _log.warning("%s is not a complete checkpoint and is not used", path)
        local = {found.step: found for found in self._local.found()} if self._local is not None else {}
        attempts = [*((step, "durable") for step in listing.steps), *((step, "local") for step in local)]
        attempts = [(step, tier) for step, tier in attempts if up_to is None or step <= up_to]
        for step, tier in sorted(attempts, key=lambda attempt: (-attempt[0], attempt[1])):
            try:
                restored = self._restore(step, abstract_state, local[step] if tier == "local" else None)
            except Unreadable as problem:
                path = step_path(self.directory, step)
                named = path if tier == "durable" else f"{step} on the hosts' own disks"
                _log.warning("checkpoint %s can't be read and is not used: %s", named, problem)
                if tier == "durable":
                    unusable.append((path, "unreadable"))
                continue
            self._set_aside(unusable)
            self._forget_after(step)
            self.tier = tier
            return restored
        if unusable:
            names = ", ".join(path.name for path, _ in unusable)
            raise CheckpointError(
                f"{self.directory}: none of the checkpoints that are there can be read ({names}); "
                f"put back a copy of one, or start anew in another run_dir"
            )
        self._forget_after(0)
        return None

    def newest_meta(self) -> Meta | None:
        """The description of the newest complete checkpoint whose description can be read."""
        for step in list_checkpoints(self.directory).steps:
            try:
                return read_meta(self.directory, step)
            except Unreadable:
                continue
        return None

    def _restore(self, step: int, abstract_state: Any, found: Found | None) -> tuple[Any, Meta]:
        def read() -> tuple[Any, Meta]:
            meta = read_meta(self.directory, step)
            _refuse_other_arrays(step, meta.arrays, array_types(abstract_state))
            return read_arrays(state_path(self.directory, step), abstract_state), meta

        if found is not None and self._local is not None:
            state, meta = self._local.restore(found, abstract_state)
        else:
            state, meta = read_by_all(read)
        verify(self._sums(state), meta.checksums)
        return state, meta

    def _forget_after(self, step: int) -> None:
        if self._local is not None:
            self._local.forget_after(step)

    def _agreed_listing(self) -> Listing:
        """What the directory holds, the same for every process, without what interrupted saves left."""
        listing = list_checkpoints(self.directory)
        if not distributed.same_everywhere(listing.steps):
            raise CheckpointError(
                f"{self.directory}: the processes see different checkpoints there (this one: {listing.steps}); "
                f"checkpoint.dir must be the same shared directory for all"
            )
        if jax.process_index() == 0:
            for path in listing.leftovers:
                _log.warning("%s is left over from an interrupted save; removed", path)
                delete(path)
        distributed.barrier("checkpoints listed")
        return listing

    def _set_aside(self, unusable: list[tuple[Path, str]]) -> None:
        """Only done where another checkpoint is good: else the next start would find none, and begin at step 0."""
        if jax.process_index() == 0:
            for path, why in unusable:
                set_aside(path, why)
        distributed.barrier("unusable checkpoints set aside")

    def _completed(self, step: int, began: float, stall: float) -> None:
        seconds = time.monotonic() - began
        for on_saved in self._on_saved:
            on_saved(step, seconds, stall)
        self._retention.apply()


def _refuse_other_arrays(step: int, saved: Types, wanted: Types) -> None:
    """Orbax would cast a dtype without a word, so types are compared first."""
    for name in sorted(saved.keys() | wanted.keys()):
        if saved.get(name) != wanted.get(name):
            raise CheckpointError(
                f"checkpoint {step} has {name} as {saved.get(name, 'nothing')}, the program wants "
                f"{wanted.get(name, 'nothing')}; nothing is cast or left out silently"
            )


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns whatever Orbax raises while saving into a CheckpointError that names the path."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        said, text = first_line(error), str(error)
        # TensorStore says so behind names so long that the line is cut before.
        lasting = next((why for why in map(os.strerror, LASTING) if why in text), None)
        if lasting is None:
            raise StorageError(f"{path}: save failed: {said}; the same command goes on") from error
        said = said if lasting in said else f"{lasting} ({said})"
        raise CheckpointError(f"{path}: save failed: {said}") from error
