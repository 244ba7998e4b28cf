"""python -m jaxtrain.train CONFIG [key=value …]: trains, or goes on training, to the config's goal."""

import sys
import time
from collections.abc import Sequence

from jaxtrain.command import exit_code, join, leave
from jaxtrain.config import Config, parse_arguments
from jaxtrain.output import outlive_the_terminal
from jaxtrain.resilience.last_words import delay_aborts
from jaxtrain.resilience.preemption import Signals, listening


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""

    def work() -> None:
        config = parse_arguments("python -m jaxtrain.train", arguments)
        with listening() as signals:
            train(config, signals)

    return exit_code(work)


def train(config: Config, signals: Signals) -> None:
    """Trains in this process, joining the others where there are any, until its goal or until it is told to leave."""
    started = time.monotonic()
    devices = join(config)
    from jaxtrain import loop

    loop.run(config, devices, started, signals)


if __name__ == "__main__":
    outlive_the_terminal()
    delay_aborts()
    leave(main(sys.argv[1:]))
