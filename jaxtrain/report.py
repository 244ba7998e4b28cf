"""`python -m jaxtrain.report RUN [--output FILE.png]`: what happened in a run, as a table and pictures."""

import argparse
import statistics
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxtrain.command import Parser, exit_code, leave
from jaxtrain.errors import refusing_os_errors
from jaxtrain.files import replace_json
from jaxtrain.output import outlive_the_terminal
from jaxtrain.telemetry.goodput import account
from jaxtrain.telemetry.pictures import draw_losses, draw_norms, evaluation_title, loss_text
from jaxtrain.telemetry.returns import read_returns
from jaxtrain.telemetry.run_files import Run, read_run
from jaxtrain.telemetry.time_report import as_json, draw_time, goodput_table, returns_table
from jaxtrain.telemetry.timeline_picture import draw_timeline, who_is_behind


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    return exit_code(lambda: _report(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("python -m jaxtrain.report", description="Show what happened in a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of the run (run_dir in its config)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.png", help="where the picture goes (default: RUN/loss.png)"
    )
    return parser.parse_args(arguments)


def _report(parsed: argparse.Namespace) -> None:
    """Prints the summary of a run and draws its loss, and its norms and the timeline of its ranks if it has any."""
    run = read_run(parsed.run)
    pictures = draw(run, parsed.output)
    console = Console()
    console.print(summary_table(run))
    pictures += _show_time(run, parsed.output, console)
    for picture in pictures:
        console.print(f"picture: {picture}", highlight=False, soft_wrap=True)


def draw(run: Run, output: Path | None) -> list[Path]:
    """The pictures of a run: losses at `output`, norms and timeline beside them; without it `loss.png`, `norms.png` and
    `timeline.png` in the run.

    Raises:
        ConfigError: one can't be written.
    """
    pictures = [output or run.path / "loss.png"]
    draw_losses(run, pictures[0])

    def beside(name: str) -> Path:
        pictures.append(run.path / f"{name}.png" if output is None else output.with_stem(f"{output.stem}-{name}"))
        return pictures[-1]

    if run.norms:
        draw_norms(run, beside("norms"))
    if run.timeline:
        name = run.path.resolve().name
        draw_timeline(run.timeline, f"{name}: what the last steps of each rank were spent on", beside("timeline"))
    return pictures


def _show_time(run: Run, output: Path | None, console: Console) -> list[Path]:
    """Prints what the wall time went to and how fast the run was back after faults; writes `goodput.json`, and draws.

    Raises:
        ConfigError: it can't be written.
    """
    found = account(run.events)
    if found is None:
        return []
    returns = read_returns(found.attempts)
    console.print(goodput_table(found))
    if returns:
        console.print(returns_table(returns))
    if output is not None and output.exists() and not output.is_file():
        return []  # such as /dev/stdout, which has no place beside it
    beside = run.path / "goodput.json" if output is None else output.with_name(f"{output.stem}-goodput.json")
    with refusing_os_errors(f"{beside}", "name another place with --output"):
        replace_json(beside, as_json(found, returns))
    picture = beside.with_suffix(".png" if output is None else output.suffix)
    draw_time(found, run.path.resolve().name, picture)
    return [picture]


def summary_table(run: Run) -> Table:
    """The numbers of a run, one a line; what was not measured is left out."""
    table = Table(title=str(run.path.resolve().name), show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in summary(run).items():
        table.add_row(name, value)
    return table


def summary(run: Run) -> dict[str, str]:
    """The same as text by name, in the order shown."""
    done, planned = run.steps[-1]["step"], run.planned
    rows = {"steps": f"{done:,} of {planned:,}" if planned else f"{done:,}"}
    rows["training loss"] = f"{loss_text(run.steps[0]['loss'])} first, {loss_text(run.steps[-1]['loss'])} last"
    rows |= _evaluation_rows(run) | _speed_rows(run) | who_is_behind(run.timeline) | _event_rows(run)
    rows["ended"] = how_it_ended(run)
    return rows


def how_it_ended(run: Run) -> str:
    """The last stop, unless a start came after it."""
    kinds = [event.get("kind") for event in run.events]
    if "start" not in kinds:
        return "unknown (events.jsonl tells of no start)"
    last_start = len(kinds) - 1 - kinds[::-1].index("start")
    stops = [event for event in run.events[last_start:] if event.get("kind") == "stop"]
    if not stops:
        return "still running, or killed without a word"
    code = f" (exit code {stops[-1]['exit_code']})" if "exit_code" in stops[-1] else ""
    return f"{stops[-1].get('reason', 'no reason given')}{code}"


def _evaluation_rows(run: Run) -> dict[str, str]:
    rows = {}
    for name in run.evaluated:
        steps, values = run.curve(name)
        if not np.isfinite(values).any():
            continue
        if name.endswith("loss"):
            best = int(np.nanargmin(np.where(np.isfinite(values), values, np.nan)))
            found = f"{loss_text(values[best])} best (step {steps[best]:,.0f}), {loss_text(values[-1])} last"
        else:
            found = f"{values[-1]:.4g} last"
        rows[evaluation_title(name)] = found
    return rows


def _speed_rows(run: Run) -> dict[str, str]:
    rows = {}
    _, tokens = run.curve("tokens")
    _, speeds = run.curve("tokens_per_second")
    _, seconds = run.curve("step_seconds")
    if len(tokens):
        rows["tokens"] = f"{tokens.sum():,.0f}"
    if len(speeds):
        rows["tokens per second"] = f"{np.median(speeds):,.0f} median"
    if len(seconds):
        rows["seconds per step"] = f"{np.median(seconds):.4g} median"
    timed = [line for line in run.steps if line.get("data_wait") is not None and line.get("step_seconds")]
    if timed:
        waited = sum(line["data_wait"] * line["step_seconds"] for line in timed)
        rows["waiting for data"] = f"{waited / sum(line['step_seconds'] for line in timed):.1%} of the step time"
    return rows


def _event_rows(run: Run) -> dict[str, str]:
    if not run.events:
        return {}
    rows = {"restarts": f"{len(run.restarts)}"}
    saves = [event["seconds"] for event in run.of_kind("save") if event.get("seconds") is not None]
    if saves:
        rows["saves"] = f"{len(saves)}, {statistics.median(saves):.3g} s median, {max(saves):.3g} s longest"
    if traced := [event for event in run.of_kind("profile") if "first" in event and "last" in event]:
        rows["profiled"] = ", ".join(f"steps {event['first']:,} to {event['last']:,}" for event in traced)
    if skips := run.of_kind("skip"):
        batches = {(skip.get("step"), skip.get("position")) for skip in skips}  # a resumed run skips some once more
        rows["updates skipped"] = f"{len(batches)}"
    for number, found in enumerate(run.of_kind("health"), start=1):
        rows["health" if number == 1 else f"health, {number}"] = str(found.get("detail", found.get("what")))
    times = [event["time"] for event in run.events if "time" in event]
    if times:
        rows["wall time"] = f"{timedelta(seconds=round(max(times) - min(times)))} from the first event to the last"
    git = run.info.get("git")
    if isinstance(git, dict) and "commit" in git:
        rows["code"] = f"{str(git['commit'])[:12]}{' with uncommitted changes' if git.get('dirty') else ''}"
    return rows


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
