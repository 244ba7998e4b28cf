"""Several processes as one run: coming together, and agreeing."""

import contextlib
import itertools
import os
import sys
import threading
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from jaxtrain.config import DistributedConfig
from jaxtrain.errors import EXIT_MISSING_WORKER, ConfigError, MissingWorkerError, first_line

_CLUSTER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE")
_PATIENCE = 3600
_FAREWELL_SECONDS = 10
_barrier_numbers = itertools.count()


def is_requested(config: DistributedConfig, environment: Mapping[str, str]) -> bool:
    """Whether the config, JAX's own variables, SLURM or Open MPI say that this is one of several processes."""
    return (
        config.coordinator is not None
        or any(name in environment for name in _CLUSTER_VARIABLES)
        # Only srun sets this; SLURM_NTASKS is also there in the batch script itself, which is one process.
        or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    )


def initialize(config: DistributedConfig) -> None:
    """Joins the other processes where there are any; must come before the first use of a device.

    Found, in this order, in `distributed.*` of the config, JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, SLURM, Open MPI.

    A process that is still alone after `distributed.start_timeout` ends with EXIT_MISSING_WORKER and a message.

    Raises:
        MissingWorkerError: the others can't be joined for another reason.
    """
    if not is_requested(config, os.environ):
        return
    count = config.processes or _number("JAX_NUM_PROCESSES")
    process = config.process_id if config.process_id is not None else _number("JAX_PROCESS_ID")
    address = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    message = (
        f"process {_or_unknown(process)} of {_or_unknown(count)} could not join the others at "
        f"{address or 'the cluster’s address'} within distributed.start_timeout={config.start_timeout} s; "
        f"check that all {_or_unknown(count)} were started and can reach that address"
    )
    try:
        with _deadline(config.start_timeout, message):
            jax.distributed.initialize(
                coordinator_address=address,
                num_processes=count,
                process_id=process,
                initialization_timeout=config.start_timeout + 60,
                heartbeat_timeout_seconds=config.heartbeat_timeout,
            )
    except Exception as error:
        raise MissingWorkerError(f"{message} ({first_line(error)})") from error


@contextlib.contextmanager
def _deadline(seconds: int, message: str) -> Iterator[None]:
    """Ends the process as a MissingWorkerError would if the block takes longer.

    At its own time limit JAX aborts the process from C++ with a stack trace: no exception could be caught.
    """

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()
        os._exit(EXIT_MISSING_WORKER)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def barrier(name: str, timeout: int) -> None:
    """Waits until every process is here, through the coordination service; no device takes part.

    Raises:
        MissingWorkerError: after `timeout` seconds, with the barrier's name.
    """
    if jax.process_count() == 1:
        return
    key = f"jaxtrain.{name}.{next(_barrier_numbers)}"
    try:
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout * 1000)
    except Exception as error:
        raise MissingWorkerError(
            f"not all {jax.process_count()} processes reached {name!r} within {timeout} s: {first_line(error)}"
        ) from error


def leave(code: int) -> None:
    """Ends a process of several with `code` where it failed alone; returns where all of them fail alike.

    JAX's own farewell at the end of a process waits for the others for minutes, and they may be waiting for this one.
    """
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    try:
        multihost.get_barrier_sync_fn()(key="jaxtrain.farewell", timeout_ms=_FAREWELL_SECONDS * 1000)
    except Exception:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def all_agree(mine: bool) -> bool:
    """Whether the answer is yes on every process."""
    return bool(np.all(_gather(mine)))


def same_everywhere(mine: int) -> bool:
    """Whether every process has the same number."""
    return len(set(_gather(np.int64(mine % 2**31)).tolist())) == 1


def from_first(mine: int) -> int:
    """Process 0's number, on every process."""
    return int(_gather(mine)[0])


def _gather(value: object) -> np.ndarray:
    barrier("agreement", _PATIENCE)  # a device collective would give up on a late process sooner
    return np.atleast_1d(np.asarray(multihost_utils.process_allgather(np.asarray(value, np.int32))))


def _number(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"environment variable {variable}={text} is not a number; processes count from 0")
    return None if text is None else int(text)


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)
