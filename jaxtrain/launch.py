"""python -m jaxtrain.launch local --processes N CONFIG [key=value …]: trains in N processes, over failures."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.command import MOST_PROCESSES, Parser, at_least, exit_code, leave, seconds
from jaxtrain.config import Config, parse_arguments
from jaxtrain.errors import EXIT_COMPLETE, ConfigError
from jaxtrain.launchers.devices import share_of_devices
from jaxtrain.launchers.local import Local, Program
from jaxtrain.launchers.lock import claim, wait_for_former_processes
from jaxtrain.launchers.policy import Policy
from jaxtrain.launchers.sizes import Size, in_words, workable_sizes
from jaxtrain.launchers.slots import Slots
from jaxtrain.launchers.supervisor import Limits, Supervisor
from jaxtrain.launchers.view import View
from jaxtrain.output import outlive_the_terminal
from jaxtrain.run_directory import RunDirectory

PROGRAM = "python -m jaxtrain.launch local"
DESCRIPTION = """\
Trains CONFIG in N processes on this machine, each with its own devices, and starts them all again from the newest good
checkpoint when one fails. Ends with the run's exit code; see README.md, "Exit codes".
"""


@dataclass(frozen=True)
class Options:
    """What the command line asks for, beside the config."""

    processes: int
    least: int
    spares: int
    restarts: int
    silence: float


def main(arguments: Sequence[str], module: str = "jaxtrain.train", warm: str = "jaxtrain.loop") -> int:
    """Runs the verb; returns its exit code.

    Args:
        module: what the processes run, as `python -m` does.
        warm: what a spare imports while it waits.
    """
    ended = EXIT_COMPLETE

    def work() -> None:
        nonlocal ended
        options, rest = parse(arguments)
        ended = launch(parse_arguments(PROGRAM, rest), rest, options, module, warm)

    return exit_code(work) or ended


def parse(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """The options, and what is left for the training."""
    parser = Parser(
        prog="python -m jaxtrain.launch",
        usage="python -m jaxtrain.launch local --processes N [--elastic MIN] [--spares K] [--restarts R] "
        "[--silence SECONDS] CONFIG [KEY=VALUE ...]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("where", choices=["local"], help="local: all processes on this machine")
    parser.add_argument(
        "--processes", type=at_least(1, MOST_PROCESSES), required=True, metavar="N", help="processes of the run"
    )
    parser.add_argument(
        "--elastic", type=at_least(1), metavar="MIN",
        help="go on with fewer where slots are lost, down to so many (default: all are needed)",
    )  # fmt: skip
    parser.add_argument(
        "--spares", type=at_least(0, MOST_PROCESSES), default=0, metavar="K",
        help="slots and warm processes in reserve; on GPUs each has its share of them (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--restarts", type=at_least(0), default=10, metavar="R",
        help="restarts until the run must have made a new checkpoint (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--silence", type=seconds, default=30.0, metavar="SECONDS",
        help="a process without a sign of life for so long is killed (default: 30)",
    )  # fmt: skip
    found, rest = parser.parse_known_args(list(arguments))
    least = found.processes if found.elastic is None else found.elastic
    if least > found.processes:
        raise ConfigError(f"--elastic {least} is more than --processes {found.processes}; it is the least that will do")
    return Options(found.processes, least, found.spares, found.restarts, found.silence), rest


def launch(config: Config, arguments: Sequence[str], options: Options, module: str, warm: str) -> int:
    """Trains to the end, whatever happens between; returns the run's exit code.

    Raises:
        JaxtrainError: the request can't be met, or the supervisor gives up.
    """
    if config.distributed.coordinator is not None:
        raise ConfigError(
            f"distributed.coordinator={config.distributed.coordinator}: the launcher sets distributed.* for each of "
            f"its processes; leave these keys out"
        )
    devices, by_slot = share_of_devices(config, options.processes, options.processes + options.spares, os.environ)
    workable = sizes_of(config, devices, options)
    directory = RunDirectory(config.run_dir)
    program = Program(module, tuple(arguments), warm, os.environ, by_slot)
    with claim(directory):
        wait_for_former_processes(directory)
        launcher = Local(program, directory.logs, options.spares)
        slots = Slots(options.processes + options.spares, directory.excluded, launcher.host)
        limits = Limits(
            options.processes, options.least, options.silence, config.distributed.start_timeout, config.grace_seconds
        )
        view = View()
        try:
            end = Supervisor(
                config, launcher, directory, Policy(options.restarts, config.seed), slots, workable, limits, view
            ).run()
        finally:
            shown = view.close()
    if not shown:
        os._exit(end.code)  # whoever doesn't read what is shown must not hold the end up, as flushing stdout would
    if end.reason:
        sys.stderr.write(f"error: {end.reason}\n")
    return end.code


def sizes_of(config: Config, devices: int, options: Options) -> dict[int, Size]:
    """The numbers of processes that this run may have."""
    found = workable_sizes(config, devices, options.processes)
    if options.least < options.processes and not any(options.least <= size < options.processes for size in found):
        raise ConfigError(
            f"--elastic {options.least}: this config can't train with fewer than {options.processes} and at least "
            f"{options.least} processes of {devices} devices each; the numbers that work are {in_words(found)}"
        )
    return {size: given for size, given in found.items() if size >= options.least}


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
