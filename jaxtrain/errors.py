"""What can end a run, and the exit code that says so.

Every error that a person can cause or mend is a `JaxtrainError`: it is printed as its message, without a traceback.
Anything else is a bug or a broken machine: it keeps its traceback and ends with `EXIT_CRASHED`.
"""

import contextlib
import errno
from collections.abc import Iterator

EXIT_COMPLETE = 0
EXIT_CRASHED = 1
EXIT_BAD_INPUT = 2
EXIT_NON_FINITE = 3
EXIT_BAD_CHECKPOINT = 4
EXIT_BAD_DATA = 5
EXIT_MISSING_WORKER = 6
EXIT_UNEQUAL = 7
EXIT_LOST_PROCESS = 8
EXIT_STUCK = 9
EXIT_STUCK_DEVICE = 10
EXIT_STUCK_DATA = 11
EXIT_STUCK_CHECKPOINT = 12
EXIT_DIVERGED = 13
EXIT_BAD_HOST = 14
EXIT_REPEATED_CRASH = 15
EXIT_TOO_MANY_RESTARTS = 16
EXIT_REQUEUE = 75
"""`EX_TEMPFAIL` of sysexits.h: nothing is wrong and the same command goes on; a scheduler can be told to requeue."""
EXIT_INTERRUPTED = 130


class JaxtrainError(Exception):
    """A failure whose message says what is wrong, where, and what to do; subclasses have an exit code of their own."""

    exit_code = EXIT_CRASHED

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code


class ConfigError(JaxtrainError, exit_code=EXIT_BAD_INPUT):
    """The request can't be met: a wrong key or value, or a run directory that belongs to another run."""


class NonFiniteError(JaxtrainError, exit_code=EXIT_NON_FINITE):
    """The loss or a gradient was not finite and `non_finite: stop` holds."""


class CheckpointError(JaxtrainError, exit_code=EXIT_BAD_CHECKPOINT):
    """Checkpoints exist but none can be read, or one, or another file of the run, can't be written."""


class StorageError(CheckpointError, exit_code=EXIT_STUCK_CHECKPOINT):
    """A checkpoint could not be written, for a reason that may pass: a file server's failure or its slowness."""


class DataError(JaxtrainError, exit_code=EXIT_BAD_DATA):
    """The data set is broken or doesn't fit the model, found while training."""


class RunPaused(JaxtrainError, exit_code=EXIT_REQUEUE):
    """The run was asked to end before its goal; it is saved, and the same command goes on with it. No failure."""


class MissingWorkerError(JaxtrainError, exit_code=EXIT_MISSING_WORKER):
    """Not all processes came together in time."""


class DivergedError(JaxtrainError, exit_code=EXIT_DIVERGED):
    """The numbers are finite, and the run has lost its way."""


class BadHostError(JaxtrainError, exit_code=EXIT_BAD_HOST):
    """A host computes wrong numbers or is too slow; the run is saved, and should go on without it."""


class Shown(SystemExit):
    """Ends a command that has shown what was asked for, such as its help. Any other SystemExit is somebody else's."""


class UnequalError(JaxtrainError, exit_code=EXIT_UNEQUAL):
    """A mesh doesn't train as one device does."""


def first_line(error: BaseException) -> str:
    """What an error of a library says, short enough to stand in a message of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def refusing_os_errors(setting: str, remedy: str) -> Iterator[None]:
    """Turns an OSError of the block, such as of a full disk or a directory that can't be written, into a ConfigError.

    Args:
        setting: what the person chose, such as `run_dir=runs/a`.
        remedy: what the person can do.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{setting}: {_said_of_a_file(error)}; {remedy}") from error


LASTING = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG
)  # fmt: skip
"""What another start would meet again."""


@contextlib.contextmanager
def storing(directory: object) -> Iterator[None]:
    """Turns an OSError of the block, which writes what a run keeps in `directory`, into a CheckpointError where another
    start would meet it again, and else into a StorageError."""
    try:
        yield
    except OSError as error:
        lasting = error.errno in LASTING
        kind, remedy = (CheckpointError, "mend that, and the") if lasting else (StorageError, "the")
        raise kind(f"run_dir={directory}: {_said_of_a_file(error)}; {remedy} same command goes on") from error


def _said_of_a_file(error: OSError) -> str:
    file = error.filename2 or error.filename  # of a rename, the name that the person knows
    return f"{f'{file}: ' if file else ''}{error.strerror or error}"
