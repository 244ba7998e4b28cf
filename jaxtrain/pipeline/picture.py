"""A schedule as a picture: stages down, time across."""

from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from jaxtrain.errors import refusing_os_errors
from jaxtrain.pipeline.simulation import Span, Timeline

SHADES = {False: ("#c3dcf0", "#0b4f8a"), True: ("#fbd8b8", "#c04c05")}
"""Forward and backward: the first chunk's colour and the last one's."""
LONE_SHADE = 0.25
"""Where between the two a schedule with one chunk is."""
POINTS, DOTS_PER_INCH = 72, 200
LEAST_WIDTH_INCHES, MOST_WIDTH_INCHES, MARGIN_INCHES = 9.0, 24.0, 1.0
STAGE_INCHES, MOST_HEIGHT_INCHES, FRAME_INCHES = 0.36, 14.0, 1.5
DIGIT_WIDTH = 0.68
"""Of the font size, with some air."""
LEAST_FONT, MOST_FONT = 5.0, 9.0
MOST_NUMBERS = 6000
NAMED_STAGES = 32
LINE, LINE_SHARE = 0.6, 0.15
"""The white line around a box, in points, and at most as a share of the narrowest box."""


def draw_schedule(timeline: Timeline, picture: Path) -> None:
    """Draws what each stage does when; the number in a box is its micro-batch, and what is left white is idle.

    Numbers are left out where they would not be legible.

    Args:
        picture: a file that ends in .png or .svg.

    Raises:
        ConfigError: it can't be written.
    """
    schedule = timeline.schedule
    digits = len(str(schedule.microbatches - 1))
    narrowest = min((span.end - span.start for span in timeline.spans if span.end > span.start), default=timeline.total)
    wanted = MARGIN_INCHES + timeline.total / narrowest * digits * DIGIT_WIDTH * (LEAST_FONT + 1) / POINTS
    width = min(MOST_WIDTH_INCHES, max(LEAST_WIDTH_INCHES, wanted))
    stage_inches = min(STAGE_INCHES, MOST_HEIGHT_INCHES / schedule.stages)
    figure = Figure(
        figsize=(width, FRAME_INCHES + stage_inches * schedule.stages), dpi=DOTS_PER_INCH, layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    box_points = narrowest / timeline.total * (width - MARGIN_INCHES) * POINTS
    _draw_boxes(axes, timeline, line=min(LINE, LINE_SHARE * box_points))
    font = min(MOST_FONT, 0.6 * stage_inches * POINTS, box_points / (digits * DIGIT_WIDTH))
    if font >= LEAST_FONT and len(timeline.spans) <= MOST_NUMBERS:
        _write_numbers(axes, timeline, font)
    _frame(axes, timeline)
    with (
        refusing_os_errors(f"--output {picture}", "name another file"),
        mpl.rc_context({"svg.hashsalt": "schedule"}),  # the same picture is the same file
    ):
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _draw_boxes(axes: Axes, timeline: Timeline, line: float) -> None:
    boxes = defaultdict(list)
    for span in timeline.spans:
        boxes[_colour(timeline, span.backward, span.work.chunk)].append(_corners(span))
    for colour, corners in boxes.items():
        axes.add_collection(PolyCollection(corners, facecolors=[colour], edgecolors="white", linewidths=line))


def _corners(span: Span) -> list[tuple[float, float]]:
    top, bottom = span.stage - 0.46, span.stage + 0.46
    return [(span.start, top), (span.end, top), (span.end, bottom), (span.start, bottom)]


def _write_numbers(axes: Axes, timeline: Timeline, font: float) -> None:
    for span in timeline.spans:
        if span.end > span.start:
            dark = np.dot(_colour(timeline, span.backward, span.work.chunk), (0.299, 0.587, 0.114)) < 0.55
            axes.text(
                (span.start + span.end) / 2, span.stage, str(span.work.microbatch), fontsize=font,
                color="white" if dark else "black", ha="center", va="center_baseline",
            )  # fmt: skip


def _frame(axes: Axes, timeline: Timeline) -> None:
    schedule = timeline.schedule
    axes.set_title(f"{schedule.title}, bubble {timeline.bubble:.1%}", loc="left", fontsize=11)
    axes.set_xlim(0, timeline.total)
    axes.set_ylim(schedule.stages - 0.4, -0.6)
    axes.set_yticks(range(0, schedule.stages, -(-schedule.stages // NAMED_STAGES)))
    axes.set_ylabel("stage")
    axes.set_xlabel("time")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    patches = [
        Patch(facecolor=_colour(timeline, backward, chunk), label=_label(timeline, backward, chunk))
        for backward in sorted({span.backward for span in timeline.spans})
        for chunk in sorted({0, schedule.chunks - 1})  # the shades of those between lie between
    ]
    patches.append(Patch(facecolor="white", edgecolor="#8a8a8a", linewidth=0.6, label="idle"))
    axes.figure.legend(
        handles=patches, loc="outside lower right", ncols=len(patches), frameon=False, fontsize=9,
        handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip


def _label(timeline: Timeline, backward: bool, chunk: int) -> str:
    name = "backward" if backward else "forward"
    return f"{name}, chunk {chunk}" if timeline.schedule.chunks > 1 else name


def _colour(timeline: Timeline, backward: bool, chunk: int) -> tuple[float, float, float]:
    first, last = (np.array(to_rgb(colour)) for colour in SHADES[backward])
    chunks = timeline.schedule.chunks
    red, green, blue = first + (last - first) * (chunk / (chunks - 1) if chunks > 1 else LONE_SHADE)
    return float(red), float(green), float(blue)
