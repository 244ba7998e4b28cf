"""Processes of one run on this machine: started, watched and ended together."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from jaxtrain.errors import refusing_os_errors
from jaxtrain.launchers.sizes import with_overrides
from jaxtrain.launchers.worker import PARENT_VARIABLE
from jaxtrain.resilience.beat import ATTEMPT_VARIABLE, FOLDER_VARIABLE

OF_A_GROUP = (
    "JAX_COORDINATOR_ADDRESS",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "OMPI_COMM_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
)
"""What would tell a process that it is of some other group."""
_WORKER = ("-m", "jaxtrain.launchers.worker")


@dataclass(frozen=True)
class Program:
    """What each process runs, as `python -m MODULE argument …`.

    Attributes:
        warm: a module whose import is most of its start, for spares.
        environment: of each process.
        by_slot: what more it is told in each slot, such as which GPUs are its own.
    """

    module: str
    arguments: tuple[str, ...]
    warm: str
    environment: Mapping[str, str]
    by_slot: Sequence[Mapping[str, str]] = ()


class Process:
    """One process, and all that it starts: they are a session of their own, and end together.

    Attributes:
        log_begin: the byte of its log with which its own words begin: there may be an earlier launch's before.
    """

    def __init__(self, popen: "subprocess.Popen[str]", log: Path):
        self._popen = popen
        self.log = log
        self.log_begin = 0
        self.code: int | None = None
        self.warm = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ended(self) -> int | None:
        """Its exit code, or minus the signal that it died of; None: it is alive. What it has left running is killed."""
        if self.code is None:
            # Not taken from the kernel's table before its session is gone: its number can't be another's until then.
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._signal_all(signal.SIGKILL)
                self.code = self._popen.wait()
                if self._popen.stdin is not None:
                    with contextlib.suppress(OSError):
                        self._popen.stdin.close()
        return self.code

    def send(self, number: int) -> None:
        """A signal to the process alone, if it lives."""
        if self.code is None:
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Ends it and all that it started, and waits until they are gone."""
        if self.code is None:
            self._signal_all(signal.SIGKILL)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.ended()

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, and nobody lets it go on."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
        except (OSError, IndexError):
            return False

    def order(self, orders: Mapping[str, object]) -> bool:
        """Tells a waiting process what to be; False: it is dead."""
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(orders) + "\n")
            self._popen.stdin.close()
        except OSError:
            return False
        return self.ended() is None

    def _signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Group:
    """The processes of one attempt, by rank."""

    def __init__(self, processes: Sequence[Process], slots: Sequence[int], beats: Path, port: socket.socket | None):
        self.processes = tuple(processes)
        self.slots = tuple(slots)
        self.beats = beats
        self._port = port

    def ended(self) -> dict[int, int]:
        """Rank to exit code, of those that have ended."""
        return {rank: code for rank, process in enumerate(self.processes) if (code := process.ended()) is not None}

    def send(self, number: int) -> None:
        """A signal to each that lives."""
        for process in self.processes:
            process.send(number)

    def kill(self) -> None:
        """Ends all that live, and lets go of the port."""
        for process in self.processes:
            process.kill()
        if self._port is not None:
            self._port.close()


class Local:
    """Starts processes on this machine.

    Each has a session of its own, so that a Ctrl-C at the terminal reaches the supervisor alone, and dies with the
    supervisor, even if that is killed.

    Args:
        logs: the folder of the logs.
        spares: how many warm processes wait.
    """

    def __init__(self, program: Program, logs: Path, spares: int = 0):
        self._program = program
        self._logs = logs
        self._wanted_spares = spares
        self._spares: list[Process] = []
        with refusing_os_errors("TMPDIR", "set it to a directory that can be written"):
            self._beats = tempfile.TemporaryDirectory(prefix="jaxtrain-beats-", ignore_cleanup_errors=True)

    @property
    def host(self) -> str:
        return socket.gethostname()

    def start(self, attempt: int, slots: Sequence[int], overrides: Sequence[str] = ()) -> Group:
        """Starts one process in each slot, as ranks of one group; warm ones as far as there are any.

        Raises:
            OSError: one can't be started, such as for want of memory; then none is.
        """
        beats = Path(self._beats.name) / str(attempt)
        with contextlib.suppress(OSError):  # a full disk: then no sign of life can be written, and nobody is silent
            beats.mkdir(parents=True)
        port = free_port() if len(slots) > 1 else None
        arguments = with_overrides(self._program.arguments, overrides)
        processes: list[Process] = []
        try:
            for rank, slot in enumerate(slots):
                environment = {**self._environment(slot), FOLDER_VARIABLE: str(beats), ATTEMPT_VARIABLE: str(attempt)}
                if port is not None:
                    environment["JAX_COORDINATOR_ADDRESS"] = f"127.0.0.1:{port.getsockname()[1]}"  # needs no resolver
                    environment |= {"JAX_NUM_PROCESSES": str(len(slots)), "JAX_PROCESS_ID": str(rank)}
                log = self._logs / f"attempt-{attempt}-rank-{rank}.log"
                processes.append(self._start_one(environment, arguments, log))
        except BaseException:
            Group(processes, slots, beats, port).kill()
            raise
        return Group(processes, slots, beats, port)

    def refill(self) -> None:
        """Starts what is missing of the spares, as far as that can be."""
        self._spares = [spare for spare in self._spares if spare.ended() is None]
        while len(self._spares) < self._wanted_spares:
            command = [sys.executable, *_WORKER, "--wait", self._program.warm]
            log = self._logs / "spares.log"
            try:
                with _opened(log) as file:
                    self._spares.append(Process(_popen(command, self._environment(None), file, subprocess.PIPE), log))
            except OSError:
                return  # short of memory or processes; the run itself has what it needs

    def close(self) -> None:
        """Ends the spares."""
        for spare in self._spares:
            spare.kill()
        self._beats.cleanup()

    def _start_one(self, environment: dict[str, str], arguments: Sequence[str], log: Path) -> Process:
        module = self._program.module
        begin = log.stat().st_size if log.exists() else 0
        while self._spares:
            spare = self._spares.pop(0)
            with _opened(log):
                spare.log, spare.log_begin = log, begin
            orders = {"module": module, "arguments": [*arguments], "environment": environment, "log": str(log)}
            if spare.ended() is None and spare.order(orders):
                spare.warm = True
                return spare
            spare.kill()
        with _opened(log) as file:
            command = [sys.executable, *_WORKER, module, *arguments]
            process = Process(_popen(command, environment, file, subprocess.DEVNULL), log)
        process.log_begin = begin
        return process

    def _environment(self, slot: int | None) -> dict[str, str]:
        kept = {name: value for name, value in self._program.environment.items() if name not in OF_A_GROUP}
        own = self._program.by_slot[slot] if slot is not None and self._program.by_slot else {}
        return {**kept, "PYTHONUNBUFFERED": "1", PARENT_VARIABLE: str(os.getpid()), **own}


def _popen(
    command: Sequence[str], environment: Mapping[str, str], log: BinaryIO, stdin: int
) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command, env=dict(environment), stdin=stdin, stdout=log, stderr=log, text=True, start_new_session=True
    )


def _opened(log: Path) -> BinaryIO:
    """The log to append to; on a full disk nothing is kept, and the run goes on."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab", buffering=0)
    except OSError:
        return Path(os.devnull).open("ab", buffering=0)


def free_port() -> socket.socket:
    """A port that nobody has, held against all who ask for any, until the socket is closed.

    A process that asks for this very one gets it: bound, and not listening, the socket is in nobody's way who sets
    SO_REUSEADDR, as servers do.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held
