"""python -m jaxtrain.train CONFIG [key=value …]: trains, or goes on training, to the config's goal."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from jaxtrain.config import Config, dump, parse_arguments
from jaxtrain.errors import (
    EXIT_COMPLETE,
    EXIT_CRASHED,
    EXIT_INTERRUPTED,
    ConfigError,
    JaxtrainError,
    RunPaused,
    first_line,
)
from jaxtrain.output import outlive_the_terminal


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    try:
        parsed = parse_arguments("python -m jaxtrain.train", arguments)
        if parsed.print_config:
            print(dump(parsed.config), end="")
        else:
            train(parsed.config)
        return EXIT_COMPLETE
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the newest checkpoint", file=sys.stderr)
        return _after_a_farewell(EXIT_INTERRUPTED)
    except RunPaused as pause:
        return _after_a_farewell(pause.exit_code)
    except JaxtrainError as error:
        print(f"error: {error}", file=sys.stderr)
        return _after_a_farewell(error.exit_code)
    except Exception:
        traceback.print_exc()
        return _after_a_farewell(EXIT_CRASHED)


def train(config: Config) -> None:
    """Trains in this process, joining the others where there are any."""
    started = time.monotonic()
    from jaxtrain import runtime

    runtime.configure(config)
    import jax

    from jaxtrain import distributed, loop

    distributed.initialize(config.distributed)
    loop.run(config, _devices(jax), started)


def _devices(jax: ModuleType) -> Sequence[Any]:
    try:
        return list(jax.devices())
    except (RuntimeError, AssertionError) as error:
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


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
