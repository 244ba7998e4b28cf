"""`python -m jaxtrain.drill CONFIG [key=value …]`: does this run survive what clusters do to runs?

Trains the config twice under the supervisor, left alone and under a seeded plan of faults, and compares the ends. Its
runs have a directory of their own; the config's own is not touched.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxtrain.command import MOST_PROCESSES, Parser, at_least, exit_code, leave, seconds
from jaxtrain.config import Config, parse_arguments
from jaxtrain.drilling.drill import Outcome, Report, Request, Tell, drill
from jaxtrain.drilling.plan import FAULTS, make_plan
from jaxtrain.errors import ConfigError, UnequalError, refusing_os_errors
from jaxtrain.launchers.sizes import with_overrides
from jaxtrain.output import aligned, outlive_the_terminal

PROGRAM = "python -m jaxtrain.drill"
EVERYTHING = ",".join(FAULTS)


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""

    def work() -> None:
        options, rest = _parser().parse_known_args(arguments)
        _drill(parse_arguments(PROGRAM, rest), rest, options)

    return exit_code(work, "interrupted; the drill's runs stay where they are")


def _parser() -> Parser:
    parser = Parser(
        PROGRAM,
        usage="%(prog)s CONFIG [KEY=VALUE …] [--faults LIST] [--processes N] [--seed N] [--dir DIR]",
        description="Train a config under a seeded plan of faults, and compare the end with an undisturbed run's.",
        epilog="faults: " + "; ".join(f"{kind}: {what}" for kind, what in FAULTS.items()),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--faults", default=EVERYTHING, metavar="LIST", help="kinds of faults, in their order")
    parser.add_argument("--seed", type=at_least(0), default=0, metavar="N", help="of the plan: steps and processes")
    parser.add_argument(
        "--processes", type=at_least(1, MOST_PROCESSES), default=2, metavar="N", help="processes of the run"
    )
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the two runs go (default: run_dir-drill)")
    parser.add_argument(
        "--silence", type=seconds, default=10, metavar="SECONDS", help="without a sign of life, after which one is dead"
    )
    parser.add_argument(
        "--patience", type=seconds, default=300, metavar="SECONDS", help="for a fault to be seen, and for each way back"
    )
    return parser


def _drill(config: Config, arguments: list[str], options: argparse.Namespace) -> None:
    request = make_request(config, arguments, options)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:  # fmt: skip
        report = drill(request, _shown_by(bar, request))
    sys.stdout.write(as_text(report))
    sys.stdout.flush()
    if not report.passed:
        raise UnequalError(f"the drill failed; its runs are in {request.disturbed.run_dir.parent}")


def make_request(config: Config, arguments: list[str], options: argparse.Namespace) -> Request:
    """What is drilled, once it is clear that it can be.

    Raises:
        ConfigError: no drill can be made of this config, or there are runs in its directory already.
    """
    if config.steps is None:
        raise ConfigError("steps is not set: a drill needs to know where to put its faults; give steps=…")
    if config.checkpoint.every == 0:
        raise ConfigError("checkpoint.every=0: without checkpoints nothing survives; give checkpoint.every=…")
    kinds = options.faults.split(",")
    if "lost" in kinds and options.processes < 2:
        raise ConfigError(f"--processes {options.processes}: a drill that loses one needs at least 2")
    plan = make_plan(kinds, options.seed, config.steps, options.processes, config.checkpoint.every)
    folder = options.dir or config.run_dir.with_name(f"{config.run_dir.name}-drill")
    with refusing_os_errors(f"--dir {folder}", "choose another one"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--dir {folder}: is not empty; delete it, or choose another one")
    overrides = ["data.log_rows=true", "log_every=1", "resume=true", "checkpoint.dir=null"]
    overrides += ["non_finite=skip"] if "nan" in kinds else []
    overrides += ["health.policy=warn", "health.every=1", "health.share=0.5"] if "slow" in kinds else []
    overrides += [] if config.checkpoint.keep > 1 or "corrupt" not in kinds else ["checkpoint.keep=2"]
    given = with_overrides(arguments, overrides)
    undisturbed, disturbed = (load_again(given, folder / name) for name in ("undisturbed", "disturbed"))
    return Request(given, undisturbed, disturbed, plan, options.processes, options.silence, options.patience)


def load_again(arguments: list[str], run_dir: Path) -> Config:
    """The config of one of the two runs."""
    return parse_arguments(PROGRAM, with_overrides(arguments, [f"run_dir={run_dir}"]))


def _shown_by(bar: Progress, request: Request) -> Tell:
    """On a bar for each of the two runs."""
    total = request.disturbed.steps
    tasks = {True: bar.add_task("undisturbed", total=total), False: bar.add_task("disturbed", total=total)}

    def tell(what: str, step: int) -> None:
        bar.update(tasks[what == "undisturbed"], completed=step, description=f"{what:<16}")

    return tell


def as_text(report: Report) -> str:
    """The result, for people."""
    rows: list[tuple[str, ...]] = [("fault", "process", "after step", "seen after", "back after", "")]
    rows += [_row(outcome) for outcome in report.outcomes]
    found = [(finding.what, finding.found, _verdict(finding.passed)) for finding in report.findings]
    verdict = "PASSED" if report.passed else "FAILED"
    return f"{aligned(rows, right=(1, 2, 3, 4))}\n{aligned(found)}\n{verdict}\n"


def _row(outcome: Outcome) -> tuple[str, ...]:
    fault = outcome.fault
    seconds = ("" if value is None else f"{value:.1f} s" for value in (outcome.seen, outcome.back))
    result = "passed" if outcome.passed else f"FAILED: {'; '.join(outcome.problems)}"
    return fault.kind, str(fault.rank), str(fault.step), *seconds, result


def _verdict(passed: bool) -> str:
    return "passed" if passed else "FAILED"


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
