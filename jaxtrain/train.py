"""python -m jaxtrain.train CONFIG [key=value …]: trains, or goes on training, to the config's goal."""

import sys
import time
from collections.abc import Sequence

from jaxtrain.command import exit_code, join, leave
from jaxtrain.config import Config, dump, parse_arguments
from jaxtrain.output import outlive_the_terminal


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""

    def work() -> None:
        parsed = parse_arguments("python -m jaxtrain.train", arguments)
        if parsed.print_config:
            sys.stdout.write(dump(parsed.config))
        else:
            train(parsed.config)

    return exit_code(work, "interrupted; the same command goes on from the newest checkpoint")


def train(config: Config) -> None:
    """Trains in this process, joining the others where there are any."""
    started = time.monotonic()
    devices = join(config)
    from jaxtrain import loop

    loop.run(config, devices, started)


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
