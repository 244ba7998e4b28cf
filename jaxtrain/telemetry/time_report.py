"""A run's wall time as the report shows it: tables, a file and a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter
from rich import box
from rich.table import Table

from jaxtrain.telemetry.goodput import KINDS, Account
from jaxtrain.telemetry.pictures import new_figure, save_figure
from jaxtrain.telemetry.returns import PARTS, Return, medians

SHOWN_RETURNS = 8
COLUMNS = 720
_COLOURS = {
    "productive": "#0b4f8a", "lost": "#c0392b", "waiting": "#e0a800", "evaluating": "#d1570a", "saving": "#2e8b57",
    "restoring": "#7fbf9b", "compiling": "#8e44ad", "starting": "#c39bd3", "idle": "#d0d0d0", "other": "#5d6d7e",
}  # fmt: skip
_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_LEAST_IN_UNIT = 3


def goodput_table(found: Account) -> Table:
    """Each kind of time: seconds, share, and what it is."""
    count = len(found.attempts)
    title = f"goodput {found.goodput:.1%} of {duration(found.total)} in {count} {'start' if count == 1 else 'starts'}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for kind, seconds in found.seconds.items():
        if seconds:
            table.add_row(kind, duration(seconds), f"{seconds / found.total:.1%}", KINDS[kind])
    return table


def returns_table(returns: Sequence[Return]) -> Table:
    """Each fault with the seconds until the next finished step; of many the last ones, and the median of all."""
    title = "seconds from a fault to the next finished step"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("fault", overflow="fold")
    for part in (*PARTS, "total"):
        table.add_column(part.replace("first ", "1st "), justify="right", no_wrap=True)
    if left := max(len(returns) - SHOWN_RETURNS, 0):
        table.add_row(f"… {left} before")
    for one in returns[left:]:
        table.add_row(f"{one.what} ({one.starts} starts)" if one.starts > 1 else one.what, *_cells(one))
    if len(returns) > 1:
        table.add_section()
        table.add_row(f"median of {len(returns)}", *_cells(medians(returns)))
    return table


def as_json(found: Account, returns: Sequence[Return]) -> dict[str, Any]:
    """What `RUN/goodput.json` holds: seconds."""
    return {
        "total": round(found.total, 3),
        "goodput": round(found.goodput, 4),
        "seconds": {kind: round(seconds, 3) for kind, seconds in found.seconds.items()},
        "starts": len(found.attempts),
        "returns": [
            {"fault": one.what, "starts": one.starts, "total": round(one.total, 3)}
            | {part: round(seconds, 3) for part, seconds in one.seconds.items()}
            for one in returns
        ],
    }


def draw_time(found: Account, name: str, picture: Path) -> None:
    """Draws what the time was spent on, from left to right, with a mark at each start.

    Raises:
        ConfigError: the picture can't be written.
    """
    size, unit = next((entry for entry in _UNITS if found.total >= _LEAST_IN_UNIT * entry[0]), _UNITS[-1])
    begin = found.spans[0].begin
    edges = np.linspace(0, found.total, min(COLUMNS, max(len(found.spans) * 40, 200)) + 1)
    figure = new_figure(2.5)
    axes = figure.subplots()
    below = np.zeros(len(edges) - 1)
    for kind, seconds in found.seconds.items():
        if not seconds:
            continue
        spans = [(span.begin - begin, span.end - begin) for span in found.spans if span.kind == kind]
        height = _covered(np.array(spans), edges) / np.diff(edges)
        label = f"{kind} {seconds / found.total:.1%}"
        axes.bar(
            edges[:-1] / size, height, np.diff(edges) / size, below, align="edge", color=_COLOURS[kind], label=label
        )
        below += height
    for attempt in found.attempts:
        axes.plot((attempt.begin - begin) / size, 1.03, marker="v", color="#333333", markersize=5, clip_on=False)
    axes.set_xlim(0, found.total / size)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    axes.set_xlabel(f"{unit} since the first start")
    axes.set_title(
        f"{name}: goodput {found.goodput:.1%} of {duration(found.total)}, ▾ starts", loc="left", fontsize=11, pad=12
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=5, frameon=False, fontsize=8.5)
    save_figure(figure, picture)


def duration(seconds: float) -> str:
    """`12.3 s`, `4 min 05 s`, `3 h 07 min`, `12 d 3 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _cells(one: Return) -> list[str]:
    return [*(_cell(one.seconds.get(part)) for part in PARTS), _cell(one.total)]


def _cell(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f}" if seconds < 100 else f"{seconds:,.0f}"


def _covered(spans: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Seconds of the spans, which don't overlap and rise, in each column."""
    begins, ends = spans[:, 0], spans[:, 1]
    before = np.concatenate([[0.0], np.cumsum(ends - begins)])
    index = np.searchsorted(begins, edges, side="right")
    last = np.maximum(index - 1, 0)
    covered = before[last] + np.clip(edges - begins[last], 0, ends[last] - begins[last])
    return np.diff(np.where(index == 0, 0.0, covered))
