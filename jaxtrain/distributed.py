"""Several processes as one run: coming together, and agreeing."""

import contextlib
import itertools
import os
import re
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from jaxtrain.config import DistributedConfig
from jaxtrain.errors import EXIT_MISSING_WORKER, ConfigError, JaxtrainError, MissingWorkerError, first_line
from jaxtrain.resilience.whereabouts import here

OF_ONE_PROCESS = ("distributed.", "compile_cache", "checkpoint.local", "data.dir", "data.workers", "data.prefetch")
"""Keys, or their beginnings, that may differ between the processes of a run."""

_CLUSTER_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "OMPI_COMM_WORLD_SIZE")
_CLUSTER_FOUND_BY_JAX = ("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri")
_PATIENCE = 3600
_WATCHED = 14 * 86400
"""Seconds that a barrier waits where a watchdog looks on, which ends a run that waits too long, and names the cause."""
_FAREWELL_SECONDS = 5
"""Shorter than process 0 waits for one that has failed, since the end of process 0 ends all others."""
_ESTABLISHED = "01"
_barrier_numbers = itertools.count()


def is_requested(config: DistributedConfig, environment: Mapping[str, str]) -> bool:
    """Whether the config, JAX's own variables, SLURM or Open MPI say that this is one of several processes."""
    return (
        config.coordinator is not None
        or any(name in environment for name in _CLUSTER_VARIABLES)
        # Only srun sets this; SLURM_NTASKS is also there in the batch script itself, which is one process.
        or (_number("SLURM_STEP_NUM_TASKS", environment) or 1) > 1
    )


def initialize(config: DistributedConfig) -> None:
    """Joins the other processes where there are any; must come before the first use of a device.

    Found, in this order, in `distributed.*` of the config, JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, SLURM, Open MPI.

    A process that is still alone after `distributed.start_timeout` ends with EXIT_MISSING_WORKER and a message.

    Raises:
        ConfigError: what is given can't be a group of processes.
        MissingWorkerError: the others can't be joined for another reason.
    """
    count = config.processes or _number("JAX_NUM_PROCESSES")
    process = config.process_id if config.process_id is not None else _number("JAX_PROCESS_ID")
    address = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if not is_requested(config, os.environ):
        if count is not None and count > 1:
            raise ConfigError(
                f"JAX_NUM_PROCESSES={count} without JAX_COORDINATOR_ADDRESS: each process would train alone; "
                f"set JAX_COORDINATOR_ADDRESS=HOST:PORT, or unset JAX_NUM_PROCESSES"
            )
        return
    _check_group(address, count, process)
    message = (
        f"process {_or_unknown(process)} of {_or_unknown(count)} could not join the others at "
        f"{address or 'the cluster’s address'} within distributed.start_timeout={config.start_timeout} s; "
        f"check that all {_or_unknown(count)} were started and can reach that address"
    )
    try:
        with _deadline(config.start_timeout, lambda: f"{_who_came(address, process, count)}{message}"):
            jax.distributed.initialize(
                coordinator_address=address,
                num_processes=count,
                process_id=process,
                initialization_timeout=config.start_timeout + 60,
                # Ours is for the watchdog, which can say whom it lost; JAX's client only aborts.
                heartbeat_timeout_seconds=2 * config.heartbeat_timeout + 60,
            )
    except Exception as error:
        raise MissingWorkerError(f"{message} ({first_line(error)})") from error


def _check_group(address: str | None, count: int | None, process: int | None) -> None:
    """Refuses what JAX would only refuse with a crash or after a wait."""
    if address is not None and not re.fullmatch(r"\S+:\d{1,5}", address):
        raise ConfigError(f"coordinator {address} is not HOST:PORT, such as node0:1234")
    found_by_jax = any(name in os.environ for name in _CLUSTER_FOUND_BY_JAX)
    if address is not None and None in (count, process) and not found_by_jax:
        raise ConfigError(
            f"coordinator {address} is given without the number of processes or this one's; set JAX_NUM_PROCESSES "
            f"and JAX_PROCESS_ID, or distributed.processes and distributed.process_id"
        )
    if count is not None and (count < 1 or (process is not None and process >= count)):
        raise ConfigError(f"process {_or_unknown(process)} of {count}: processes are numbered from 0 to their number")
    if address is not None and process == 0 and (problem := _cannot_listen(int(address.rpartition(":")[2]))):
        raise ConfigError(f"coordinator {address}: process 0 can't listen there ({problem}); choose another port")


def _cannot_listen(port: int) -> str | None:
    """Why no server can start on this port of this machine; JAX's would end the process with a segmentation fault."""
    try:
        with socket.create_server(("", port)):
            return None
    except (OSError, OverflowError) as error:
        return first_line(error)


@contextlib.contextmanager
def _deadline(seconds: int, message: Callable[[], str]) -> Iterator[None]:
    """Ends the process as a MissingWorkerError would if the block takes longer.

    At its own time limit JAX aborts the process from C++ with a stack trace: no exception could be caught.
    """

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.write(f"error: {message()}\n")
        sys.stderr.flush()
        os._exit(EXIT_MISSING_WORKER)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _who_came(address: str | None, process: int | None, count: int | None) -> str:
    """For a message, how many processes are connected to this one, where it is the one that all connect to."""
    if process != 0 or address is None or count is None:
        return ""
    port, connected = f":{int(address.rpartition(':')[2]):04X}", 0
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            connected += sum(row[1].endswith(port) and row[3] == _ESTABLISHED for row in rows)
    return f"{connected} of {count} processes came: "


def barrier(name: str, timeout: int = _PATIENCE) -> None:
    """Waits until every process is here, through the coordination service; no device takes part.

    Args:
        timeout: seconds. Under a watchdog the limit of the phase holds instead, which names who is missing.

    Raises:
        MissingWorkerError: after `timeout` seconds, with the barrier's name.
    """
    if jax.process_count() == 1:
        return
    timeout = _WATCHED if here.watched else timeout
    key = f"jaxtrain.{name}.{next(_barrier_numbers)}"
    try:
        with here.wait(name):
            multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout * 1000)
    except Exception as error:
        raise MissingWorkerError(
            f"not all {jax.process_count()} processes reached {name!r} within {timeout} s: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def together(what: str) -> Iterator[None]:
    """Every process passes the block or none does: where it fails on one alone, the others would wait for that one.

    No process may wait for another one inside.

    Raises:
        JaxtrainError: this process's own, or a ConfigError where another one failed.
    """
    problem: JaxtrainError | None = None
    try:
        yield
    except JaxtrainError as error:
        problem = error
    if not all_agree(problem is None):
        raise problem or ConfigError(f"another process could not {what}; its own output says why")


def farewell() -> None:
    """Waits a moment for the other processes before this one ends with an error.

    Where all of them fail alike, each can say so and end with its own code; where this one failed alone, the others are
    waiting for it in vain, and it must not wait for them as JAX does at the end of a process, for minutes.
    """
    if not jax.distributed.is_initialized():
        return
    try:
        alone, first = jax.process_count() == 1, jax.process_index() == 0
    except (RuntimeError, AssertionError):
        return  # there are no devices, which is why this process ends
    if alone:
        return
    with contextlib.suppress(Exception):
        multihost.get_barrier_sync_fn()(key="jaxtrain.farewell", timeout_ms=_FAREWELL_SECONDS * 1000)
    if first:
        time.sleep(1)  # the coordinator goes last: its end ends the others


def all_agree(mine: bool) -> bool:
    """Whether the answer is yes on every process."""
    return bool(np.all(_gather(mine)))


def same_everywhere(mine: object) -> bool:
    """Whether every process has the same, as its `repr` tells."""
    return not differing([mine])


def differing(mine: Sequence[object]) -> list[int]:
    """The places where the processes have different things, as their `repr` tells, in lists of the same length."""
    gathered = _gather([_number_of(repr(each)) for each in mine])
    return np.flatnonzero((gathered != gathered[:1]).any(axis=0)).tolist() if jax.process_count() > 1 else []


def hosts() -> int:
    """How many machines the processes run on."""
    return len(set(_gather(_number_of(socket.gethostname())).tolist()))


def _number_of(text: str) -> int:
    """A number for a text, small enough to be compared between processes."""
    return zlib.crc32(text.encode()) % 2**31


def least(mine: int) -> int:
    """The smallest of the processes' numbers, on every process."""
    return int(_gather(mine).min())


def texts(mine: str) -> list[str]:
    """What each process gives, by process."""
    if jax.process_count() == 1:
        return [mine]
    content = mine.encode()
    lengths = _gather(len(content)).tolist()
    rows = _gather(np.frombuffer(content.ljust(max(lengths)), np.uint8))
    return [bytes(row[:length].astype(np.uint8)).decode() for row, length in zip(rows, lengths, strict=True)]


def own_address(config: DistributedConfig) -> str:
    """This host, as the host of the coordinator reaches it."""
    coordinator = config.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
    return _address_towards(coordinator.rpartition(":")[0] if coordinator else socket.gethostname())


def _address_towards(host: str) -> str:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect((host, 9))  # nothing is sent
            return str(route.getsockname()[0])
    except OSError:
        return socket.gethostname()


def from_first(mine: int) -> int:
    """Process 0's number, on every process."""
    return int(_gather(mine)[0])


def _gather(value: object) -> np.ndarray:
    barrier("agreement")  # a device collective would give up on a late process sooner
    with here.wait("agreement"):
        return np.atleast_1d(np.asarray(multihost_utils.process_allgather(np.asarray(value, np.int32))))


def _number(variable: str, environment: Mapping[str, str] = os.environ) -> int | None:
    text = environment.get(variable)
    if text is not None and not text.isdecimal():
        raise ConfigError(f"environment variable {variable}={text} is not a number; processes count from 0")
    return None if text is None else int(text)


def _or_unknown(value: int | None) -> str:
    return "?" if value is None else str(value)
