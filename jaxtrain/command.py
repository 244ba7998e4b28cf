"""What all commands that compute have in common: how they begin, how they end, and how they say what went wrong."""

import argparse
import contextlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from jaxtrain.errors import (
    EXIT_COMPLETE,
    EXIT_CRASHED,
    EXIT_INTERRUPTED,
    ConfigError,
    JaxtrainError,
    RunPaused,
    Shown,
    first_line,
)

if TYPE_CHECKING:
    import jax

    from jaxtrain.config import Config


class Parser(argparse.ArgumentParser):
    """A command line whose faults are errors as all others are: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{self.prog}: {message}; --help tells what there is")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Called when help has been printed."""
        raise Shown(status)


MOST_PROCESSES = 1024
"""On one machine."""


def at_least(least: int, most: int | None = None) -> Callable[[str], int]:
    """The type of an option that is a whole number, from `least` on, up to `most` where that is given."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
        if most is not None and value > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, not {text}")
        return value

    return number


def seconds(text: str) -> float:
    """The type of an option that is a time limit of a second or more."""
    value = float(text)
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def exit_code(work: Callable[[], None], when_interrupted: str = "interrupted") -> int:
    """Does the work of a command; returns its exit code (`jaxtrain.errors`), having said what went wrong if it isn't 0.

    Args:
        when_interrupted: what to say after Ctrl-C.
    """
    try:
        work()
        return EXIT_COMPLETE
    except KeyboardInterrupt:
        sys.stderr.write(f"{when_interrupted}\n")
        return _after_a_farewell(EXIT_INTERRUPTED)
    except RunPaused as pause:
        return _after_a_farewell(pause.exit_code)
    except JaxtrainError as error:
        sys.stderr.write(f"error: {error}\n")
        return _after_a_farewell(error.exit_code)
    except Shown:
        raise
    except SystemExit as error:  # its code says nothing about our goal
        traceback.print_exc()
        sys.stderr.write(f"error: sys.exit({error.code!r}) was called by the code above, before the work was done\n")
        return _after_a_farewell(EXIT_CRASHED)
    except Exception:
        traceback.print_exc()
        return _after_a_farewell(EXIT_CRASHED)


def join(config: "Config") -> Sequence["jax.Device"]:
    """Sets JAX up as the config says and joins the other processes where there are any; returns all devices.

    Raises:
        ConfigError: JAX_PLATFORMS asks for devices that aren't there, or this host's name can't be resolved.
        MissingWorkerError: not all processes came together.
    """
    from jaxtrain import runtime

    runtime.configure(config)
    import jax

    from jaxtrain import distributed

    distributed.initialize(config.distributed)
    try:
        return list(jax.devices())
    except (RuntimeError, AssertionError) as error:
        if "gloo" in str(error):
            raise ConfigError(
                f"the processes can't find each other by the name of this host, {socket.gethostname()} "
                f"({first_line(error)}); let it be resolved, such as by a line in /etc/hosts"
            ) from error
        platforms = os.environ.get("JAX_PLATFORMS")
        if not platforms:
            raise
        raise ConfigError(
            f"JAX_PLATFORMS={platforms}: JAX finds no such device ({first_line(error)}); "
            f"unset it, or install what it needs"
        ) from error


def _after_a_farewell(code: int) -> int:
    """`code`, once the other processes had a moment to say that they fail too."""
    distributed = sys.modules.get("jaxtrain.distributed")
    if distributed is not None:
        distributed.farewell()
    return code


def leave(code: int) -> NoReturn:
    """Ends this process with `code`, and a failed one at once.

    A thread of a library may still wait, such as Orbax's for the rest of a save that failed: nobody must wait for it.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    if code == EXIT_COMPLETE:
        sys.exit(code)
    os._exit(code)
