"""Pictures of a run: its losses with learning rate and speed, and the norms of its layers."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from jaxtrain.errors import ConfigError
from jaxtrain.files import replace_bytes
from jaxtrain.telemetry.run_files import EVALUATION, Curve, Record, Run

MEDIAN_POINTS = 400
LABELLED_RESTARTS = 6
WIDTH_INCHES, LOSS_INCHES, STRIP_INCHES, DOTS_PER_INCH = 9, 4.4, 1.1, 200
RAW, MEDIAN, RATE, RESTART, TEXT = "#a6c8e4", "#0b4f8a", "#4d4d4d", "#8a8a8a", "#5a5a5a"
EVALUATIONS = ("#d1570a", "#2e8b57", "#8e44ad", "#b8860b", "#c2185b", "#008b8b")
COLUMNS = 400
NAMED_LAYERS = 32

Heat = Float64[np.ndarray, "rows lines"]


def draw_losses(run: Run, picture: Path) -> None:
    """Draws the losses over the steps, with the learning rate and the speed below where they were measured.

    Raises:
        ConfigError: the picture can't be written.
    """
    strips: list[Callable[[Axes], None]] = []
    steps, rates = run.curve("learning_rate")
    if len(steps):
        strips.append(lambda axes: _draw_learning_rate(axes, steps, rates))
    if np.isfinite(run.curve("tokens_per_second")[1]).any():
        strips.append(lambda axes: _draw_speed(axes, run))
    figure = new_figure(LOSS_INCHES + STRIP_INCHES * len(strips))
    heights = [LOSS_INCHES, *[STRIP_INCHES] * len(strips)]
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
    _draw_losses(axes[0], run)
    _draw_restarts(axes[0], run.restarts)
    for strip, draw in zip(axes[1:], strips, strict=True):
        draw(strip)
    axes[-1].set_xlim(0, run.steps[-1]["step"] * 1.01)
    count_steps(axes[-1], run.steps[-1]["step"])
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(color="#e6e6e6", linewidth=0.8)
        each.set_axisbelow(True)
    axes[0].legend(loc="upper right", framealpha=0.85, edgecolor="none")
    save_figure(figure, picture)


def draw_norms(run: Run, picture: Path) -> None:
    """Draws the gradient's norm and the relative size of the update, layer by step, as colours.

    Raises:
        ConfigError: the picture can't be written.
    """
    steps = np.array([line["step"] for line in run.norms], float)
    names = list(_layers(run.norms[0], "gradient_norm"))
    gradient, weight, update = (
        np.array([[_layers(line, kind).get(name, np.nan) for line in run.norms] for name in names])
        for kind in ("gradient_norm", "parameter_norm", "update_norm")
    )
    ratio = np.divide(update, weight, out=np.full_like(update, np.nan), where=weight > 0)
    figure = new_figure(2 * max(2.2, min(5.0, 0.22 * len(names) + 0.8)))
    axes = figure.subplots(2, 1, sharex=True)
    _draw_heat(axes[0], steps, names, gradient, "gradient norm")
    _draw_heat(axes[1], steps, names, ratio, "update / parameter")
    axes[0].set_title(f"{run.path.resolve().name}: norms by layer", loc="left", fontsize=11)
    count_steps(axes[1], int(steps[-1]))
    save_figure(figure, picture)


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


def loss_text(value: float) -> str:
    """A loss as the report and its pictures write it."""
    return f"{value:.4f}"


def evaluation_title(name: str) -> str:
    """`eval_loss` as `evaluation loss`, `eval_code_loss` as `evaluation loss, code`."""
    kind = name.removeprefix(EVALUATION)
    where = kind.removesuffix("loss").rstrip("_") if kind.endswith("_loss") else ""
    return f"evaluation loss, {where}" if where else f"evaluation {kind.replace('_', ' ')}"


def _draw_losses(axes: Axes, run: Run) -> None:
    steps, losses = run.curve("loss")
    losses = np.where(np.isfinite(losses), losses, np.nan)
    centres, medians = running_median(losses)
    axes.plot(steps, losses, color=RAW, linewidth=1, label="training, each step")
    axes.plot(steps[centres.astype(int)], medians, color=MEDIAN, linewidth=2.2, label="training, running median")
    for index, name in enumerate(name for name in run.evaluated if name.endswith("loss")):
        at, values = run.curve(name)
        finite = np.isfinite(values)
        if finite.any():
            colour, label = EVALUATIONS[index % len(EVALUATIONS)], evaluation_title(name).replace(" loss", "")
            axes.plot(at[finite], values[finite], "o-", color=colour, linewidth=1, markersize=5.5, label=label)
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


def _draw_speed(axes: Axes, run: Run) -> None:
    steps, speeds = run.curve("tokens_per_second")
    speeds = np.where(np.isfinite(speeds), speeds, np.nan)
    centres, medians = running_median(speeds)
    axes.plot(steps, speeds, color=RAW, linewidth=0.8)
    axes.plot(steps[centres.astype(int)], medians, color=MEDIAN, linewidth=1.5)
    axes.set_ylabel("tokens\nper second")
    axes.set_ylim(0, 1.25 * float(np.nanmax(medians)))
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))


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
    last = loss_text(run.steps[-1]["loss"])
    parts = [f"{done:,} of {planned:,} steps" if planned else f"{done:,} steps", f"loss {last}"]
    _, evaluated = run.curve("eval_loss")
    if len(evaluated):
        parts.append(f"evaluation {loss_text(evaluated[-1])}")
    return f"{run.path.resolve().name}: {', '.join(parts)}"


def _layers(line: Record, kind: str) -> dict[str, float]:
    """One norm for each layer over all its stacked parameters, then one for each of the model's other parts.

    A part is the first word of a parameter's name; norms of parameters add up as squares.
    """
    squares: dict[str, float] = {}
    stacked = {name: norms for name, norms in line[kind].items() if isinstance(norms, list)}
    for name, norms in stacked.items():
        for layer, norm in enumerate(norms):
            row = f"{name.split('.')[0]} {layer}"
            squares[row] = squares.get(row, 0.0) + norm**2
    for name, norm in line[kind].items():
        if name not in stacked:
            row = name.split(".")[0]
            squares[row] = squares.get(row, 0.0) + norm**2
    return {row: float(np.sqrt(square)) for row, square in squares.items()}


def _draw_heat(axes: Axes, steps: Curve, names: list[str], heat: Heat, label: str) -> None:
    """Rows from the top; a column stands for the steps since the one before, with the largest value of its lines."""
    columns = np.array_split(np.arange(len(steps)), min(COLUMNS, len(steps)))
    ends = np.array([steps[column[-1]] for column in columns])
    visible = np.where(np.isfinite(heat) & (heat > 0), heat, -np.inf)
    tiles = np.stack([visible[:, column].max(axis=1) for column in columns], axis=1)
    tiles = np.ma.masked_invalid(tiles)
    axes.set_facecolor("#d9d9d9")
    axes.invert_yaxis()
    axes.set_yticks(*named_rows(names), fontsize=8)
    if tiles.count():
        mesh = axes.pcolormesh(
            np.concatenate([[0.0], ends]), np.arange(len(names) + 1) - 0.5, tiles, norm=LogNorm(), cmap="viridis"
        )
        axes.figure.colorbar(mesh, ax=axes, label=label, pad=0.01)
    else:
        axes.set_ylabel(f"{label}: none")


def named_rows(names: list[str]) -> tuple[list[int], list[str]]:
    """Where there are many rows, only every so-many-th says its name."""
    each = -(-len(names) // NAMED_LAYERS)
    return list(range(0, len(names), each)), names[::each]


def count_steps(axes: Axes, last: int) -> None:
    """Labels the axis of the steps."""
    axes.set_xlabel("step (optimizer updates)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if last >= 100_000 else "{x:,.0f}")


def new_figure(height: float) -> Figure:
    """An empty figure, so many inches high."""
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Figure, picture: Path) -> None:
    """Whole or not at all: where the disk is full, an earlier picture stays as it is."""
    drawn = io.BytesIO()
    try:
        figure.savefig(drawn, format=picture.suffix.removeprefix(".") or "png")
        if picture.exists() and not picture.is_file():
            picture.write_bytes(drawn.getvalue())  # such as /dev/stdout
        else:
            picture.parent.stat()  # not made by us: its name may be misspelt
            replace_bytes(picture.resolve(), drawn.getvalue())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{picture}: the picture can't be written ({error}); name another file with --output"
        ) from error
