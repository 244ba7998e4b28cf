"""`python -m jaxtrain.report RUN [--output FILE.png]`: what happened in a run, as a table and a picture of its loss."""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator
from rich.console import Console
from rich.table import Table
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from jaxtrain.errors import EXIT_COMPLETE, ConfigError, JaxtrainError
from jaxtrain.telemetry.events import read_events
from jaxtrain.telemetry.metrics import read_metrics

Record = dict[str, Any]
Curve = Float64[np.ndarray, " points"]

MEDIAN_POINTS = 400
LABELLED_RESTARTS = 6
WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 9, 5.5, 200
RAW, MEDIAN, EVALUATION, RATE, RESTART, TEXT = "#a6c8e4", "#0b4f8a", "#d1570a", "#4d4d4d", "#8a8a8a", "#5a5a5a"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the summary of a run and draws its loss; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.report", description="Show what happened in a run.")
    parser.add_argument("run", type=Path, metavar="RUN", help="the directory of the run (run_dir in its config)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.png", help="where the picture goes (default: RUN/loss.png)"
    )
    parsed = parser.parse_args(arguments)
    try:
        run = read_run(parsed.run)
        picture = parsed.output or parsed.run / "loss.png"
        draw(run, picture)
    except JaxtrainError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    console = Console()
    console.print(summary_table(run))
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    return EXIT_COMPLETE


@dataclass(frozen=True)
class Run:
    """What a run directory tells: `steps` and `evaluations` are lines of metrics, one for each step."""

    path: Path
    config: Record
    info: Record
    events: list[Record]
    steps: list[Record]
    evaluations: list[Record]

    @property
    def planned(self) -> int | None:
        """Steps that the run was to have: those of the config, or what its data gave where that leaves it open."""
        told = [event["steps"] for event in self.of_kind("start") if event.get("steps") is not None]
        return self.config.get("steps") or (told[-1] if told else None)

    @property
    def restarts(self) -> list[int]:
        """The step after which each later start went on; a start that found the run complete is none."""
        events = [event for event in self.events if event.get("process", 0) == 0]
        starts = [
            event
            for event, following in pairwise([*events, {}])
            if event.get("kind") == "start" and not _is_stop_without_a_step(event, following)
        ]
        return [int(start.get("step", 0)) for start in starts[1:]]

    def of_kind(self, kind: str) -> list[Record]:
        return [event for event in self.events if event.get("kind") == kind]

    def curve(self, key: str) -> tuple[Curve, Curve]:
        """Steps and values of a metric, where it was measured; NaN where it was not a number."""
        lines = [line for line in self.steps if line.get(key) is not None]
        return np.array([line["step"] for line in lines], float), np.array([line[key] for line in lines], float)


def read_run(path: Path) -> Run:
    """Reads a run directory.

    Raises:
        ConfigError: `path` is no run directory, or the run has not finished a step yet.
    """
    if not path.is_dir():
        raise ConfigError(f"{path}: no such directory; name the run_dir of a run")
    metrics = path / "metrics.jsonl"
    if not metrics.exists():
        raise ConfigError(f"{path}: no run here (metrics.jsonl is missing); name the run_dir of a run")
    lines = [line for line in read_metrics(metrics) if "step" in line]
    # The last line wins where an evaluation was repeated after a restart.
    steps = {line["step"]: line for line in lines if "loss" in line}
    evaluations = {line["step"]: line for line in lines if "eval_loss" in line}
    if not steps:
        raise ConfigError(f"{path}: the run has not finished a step yet (metrics.jsonl holds no loss)")
    events = path / "events.jsonl"
    return Run(
        path=path,
        config=_read_config(path / "config.yml"),
        info=_read_info(path / "run.json"),
        events=read_events(events) if events.exists() else [],
        steps=list(steps.values()),
        evaluations=list(evaluations.values()),
    )


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
    rows["training loss"] = f"{_loss(run.steps[0]['loss'])} first, {_loss(run.steps[-1]['loss'])} last"
    rows |= _evaluation_rows(run) | _speed_rows(run) | _event_rows(run)
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


def draw(run: Run, picture: Path) -> None:
    """Draws the loss over the steps, with the learning rate below where it was measured.

    Raises:
        ConfigError: the picture can't be written.
    """
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    steps, rates = run.curve("learning_rate")
    if len(steps):
        losses_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
        _draw_learning_rate(rate_axes, steps, rates)
        bottom = rate_axes
    else:
        losses_axes = bottom = figure.subplots()
    _draw_losses(losses_axes, run)
    _draw_restarts(losses_axes, run.restarts)
    bottom.set_xlim(0, run.steps[-1]["step"] * 1.01)
    bottom.set_xlabel("step (optimizer updates)")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.xaxis.set_major_formatter(EngFormatter(sep="") if run.steps[-1]["step"] >= 100_000 else "{x:,.0f}")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    losses_axes.legend(frameon=False, loc="upper right")
    try:
        figure.savefig(picture)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{picture}: the picture can't be written ({error}); name another file with --output"
        ) from error


def running_median(values: Curve, points: int = MEDIAN_POINTS) -> tuple[Curve, Curve]:
    """Medians of windows a twenty-fifth of the curve long.

    Args:
        values: may hold NaN, which don't count.
        points: how many medians at most; a curve of a million steps needs no more than a picture has columns.

    Returns:
        Positions in `values`, and the medians there. A window is cut at the ends of the curve, never shifted.
    """
    half = max(2, len(values) // 50)
    centres = np.unique(np.linspace(0, len(values) - 1, min(points, len(values))).round().astype(int))
    windows = [values[max(0, centre - half) : centre + half + 1] for centre in centres]
    finite = [window[np.isfinite(window)] for window in windows]
    return centres.astype(float), np.array([np.median(window) if len(window) else np.nan for window in finite])


def _draw_losses(axes: Axes, run: Run) -> None:
    steps, losses = run.curve("loss")
    losses = np.where(np.isfinite(losses), losses, np.nan)
    centres, medians = running_median(losses)
    axes.plot(steps, losses, color=RAW, linewidth=1, label="training, each step")
    axes.plot(steps[centres.astype(int)], medians, color=MEDIAN, linewidth=2.2, label="training, running median")
    evaluated = [(line["step"], line["eval_loss"]) for line in run.evaluations if np.isfinite(line["eval_loss"])]
    if evaluated:
        axes.plot(
            *zip(*evaluated, strict=True), "o-", color=EVALUATION, linewidth=1, markersize=5.5, label="evaluation"
        )
    axes.set_ylabel("loss (nats)")
    axes.set_title(_title(run), loc="left", fontsize=11)
    _leave_out_spikes(axes, losses, medians)


def _leave_out_spikes(axes: Axes, losses: Curve, medians: Curve) -> None:
    """A spike a thousand times the loss would leave a flat line: it is cut off, and the picture says so."""
    if not np.isfinite(losses).any():
        return
    highest, lowest = float(np.nanmax(losses)), float(np.nanmin(losses))
    usual = float(np.nanmax([losses[0], np.nanmax(medians)]))  # the first loss is no spike, however fast it falls
    span = max(usual - lowest, 0.5 * abs(usual))
    if highest > usual + span:
        axes.set_ylim(lowest - 0.05 * span, usual + 0.5 * span)
        axes.text(
            0.01, 0.03, f"losses up to {highest:,.4g} are cut off", transform=axes.transAxes, color=TEXT, fontsize=9
        )


def _draw_learning_rate(axes: Axes, steps: Curve, rates: Curve) -> None:
    axes.plot(steps, rates, color=RATE, linewidth=1.5)
    axes.set_ylabel("learning\nrate")
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axes.yaxis.set_major_locator(MaxNLocator(3))


def _draw_restarts(axes: Axes, restarts: list[int]) -> None:
    for step in restarts:
        axes.axvline(step, color=RESTART, linewidth=1, linestyle=(0, (4, 3)))
    named = restarts if len(restarts) <= LABELLED_RESTARTS else restarts[:1]
    for step in named:
        text = f"restart at {step:,}" if named is restarts else f"first of {len(restarts)} restarts"
        axes.annotate(
            text, (step, 0.98), xycoords=("data", "axes fraction"), xytext=(-4, 0), textcoords="offset points",
            rotation=90, ha="right", va="top", color=TEXT, fontsize=9,
        )  # fmt: skip


def _title(run: Run) -> str:
    done, planned = run.steps[-1]["step"], run.planned
    parts = [f"{done:,} of {planned:,} steps" if planned else f"{done:,} steps", f"loss {_loss(run.steps[-1]['loss'])}"]
    if run.evaluations:
        parts.append(f"evaluation {_loss(run.evaluations[-1]['eval_loss'])}")
    return f"{run.path.resolve().name}: {', '.join(parts)}"


def _evaluation_rows(run: Run) -> dict[str, str]:
    finite = [line for line in run.evaluations if np.isfinite(line["eval_loss"])]
    if not finite:
        return {}
    best, last = min(finite, key=lambda line: line["eval_loss"]), run.evaluations[-1]
    return {
        "evaluation loss": f"{_loss(best['eval_loss'])} best (step {best['step']:,}), {_loss(last['eval_loss'])} last"
    }


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
    if skips := run.of_kind("skip"):
        batches = {(skip.get("step"), skip.get("position")) for skip in skips}  # a resumed run skips some once more
        rows["updates skipped"] = f"{len(batches)}"
    times = [event["time"] for event in run.events if "time" in event]
    if times:
        rows["wall time"] = f"{timedelta(seconds=round(max(times) - min(times)))} from the first event to the last"
    git = run.info.get("git")
    if git:
        rows["code"] = f"{git['commit'][:12]}{' with uncommitted changes' if git['dirty'] else ''}"
    return rows


def _is_stop_without_a_step(start: Record, following: Record) -> bool:
    return (
        following.get("kind") == "stop"
        and following.get("exit_code") == EXIT_COMPLETE
        and following.get("step") == start.get("step")
    )


def _read_config(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        config = YAML(typ="safe").load(path)
    except YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    return config if isinstance(config, dict) else {}


def _read_info(path: Path) -> Record:
    if not path.exists():
        return {}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    return info if isinstance(info, dict) else {}


def _loss(value: float) -> str:
    return f"{value:.4f}"


if __name__ == "__main__":
    sys.exit(main())
