"""The picture of the last steps: which rank, and what it spent them on; and in words who is behind."""

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from jaxtrain.telemetry.pictures import Heat, count_steps, named_rows, new_figure, save_figure
from jaxtrain.telemetry.timeline import PARTS

Ranks = Mapping[int, tuple[str, list[dict[str, Any]]]]
"""As `read_timeline` gives them."""

TITLES = {"data": "waiting for data", "host": "its own work", "device": "waiting for devices"}
COLOURS = {"data": "Reds", "host": "Purples", "device": "Blues"}
BARS = {"data": "#c0392b", "host": "#6a51a3", "device": "#2b7bba"}
PROBE, PROBE_TITLE = "probe_seconds", "probe of the devices, over the median"
WORTH_NAMING = 0.05
MOST_ROWS = 24


def draw_timeline(ranks: Ranks, title: str, picture: Path) -> None:
    """Draws rank by step what the seconds went to, and beside it each rank's share of its time.

    Of more than `MOST_ROWS` ranks it shows those that differ most from the others: one row of a thousand would be lost.

    Raises:
        ConfigError: the picture can't be written.
    """
    if len(ranks) > MOST_ROWS:
        title = f"{title} ({MOST_ROWS} of {len(ranks):,} ranks, those that differ most)"
        ranks = _most_different(ranks)
    steps = sorted({line["step"] for _, lines in ranks.values() for line in lines})
    names = [str(rank) for rank in ranks]
    parts = {part: _table(ranks, steps, part) for part in PARTS}
    probes = _table(ranks, steps, PROBE)
    rows = len(PARTS) + bool(np.isfinite(probes).any())
    figure = new_figure(rows * max(1.3, min(3.0, 0.25 * len(ranks) + 0.6)))
    axes = figure.subplots(rows, 2, sharey=True, squeeze=False, width_ratios=[4, 1])
    longest = float(np.nanpercentile(np.nansum(list(parts.values()), axis=0), 98)) or 1.0
    for row, part in enumerate(PARTS):
        _draw_seconds(axes[row, 0], steps, parts[part], COLOURS[part], longest, TITLES[part])
        _draw_shares(axes[row, 1], ranks, part)
    if rows > len(PARTS):
        _draw_probes(axes[-1, 0], axes[-1, 1], steps, probes)
    for each in axes[:, 0]:
        each.set_yticks(*named_rows(names), fontsize=8)
        each.set_ylabel("rank")
        each.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    axes[0, 0].invert_yaxis()
    count_steps(axes[rows - 1, 0], steps[-1])
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    save_figure(figure, picture)


def who_is_behind(ranks: Ranks) -> dict[str, str]:
    """In words: of several ranks the one that waits longest for data, the busiest itself, that with the slowest device.

    Each only where it differs enough to be worth naming.
    """
    found: dict[str, str] = {}
    if len(ranks) < 2:
        return found
    for part, name in (("data", "waits longest for data"), ("host", "busiest itself")):
        shares = {rank: _share(lines, part) for rank, (_, lines) in ranks.items()}
        rank = max(shares, key=lambda rank: shares[rank])
        if shares[rank] - median(shares.values()) >= WORTH_NAMING:
            found[name] = f"rank {rank} ({ranks[rank][0]}), {shares[rank]:.0%} of the time"
    probes = {rank: _probe_seconds(lines) for rank, (_, lines) in ranks.items()}
    known = {rank: seconds for rank, seconds in probes.items() if seconds is not None}
    if len(known) > 1:
        slowest = max(known, key=lambda rank: known[rank])
        others = median(seconds for rank, seconds in known.items() if rank != slowest)
        if known[slowest] / others - 1 >= WORTH_NAMING:
            longer = f"{known[slowest] / others - 1:.0%}"
            found["slowest device"] = f"rank {slowest} ({ranks[slowest][0]}), its probe takes {longer} longer"
    return found


def _most_different(ranks: Ranks) -> Ranks:
    """By what they have above the median of data wait, own work or probe; in the order of ranks."""
    shares = [{rank: _share(lines, part) for rank, (_, lines) in ranks.items()} for part in ("data", "host")]
    probes = {rank: _probe_seconds(lines) for rank, (_, lines) in ranks.items()}
    usual = median([seconds for seconds in probes.values() if seconds is not None] or [1.0])
    columns = [*shares, {rank: (seconds or usual) / usual for rank, seconds in probes.items()}]
    middles = [median(column.values()) for column in columns]

    def difference(rank: int) -> float:
        return max(column[rank] - middle for column, middle in zip(columns, middles, strict=True))

    chosen = sorted(ranks, key=difference, reverse=True)[:MOST_ROWS]
    return {rank: ranks[rank] for rank in sorted(chosen)}


def _draw_seconds(axes: Axes, steps: list[int], table: Heat, colours: str, longest: float, title: str) -> None:
    edges = np.array([*steps, steps[-1] + 1], float) - 0.5, np.arange(len(table) + 1) - 0.5
    mesh = axes.pcolormesh(*edges, table, vmin=0, vmax=longest, cmap=colours)
    axes.set_facecolor("#d9d9d9")
    axes.set_title(title, loc="left", fontsize=9)
    axes.figure.colorbar(mesh, ax=axes, label="seconds", pad=0.01)


def _draw_shares(axes: Axes, ranks: Ranks, part: str) -> None:
    axes.barh(range(len(ranks)), [_share(lines, part) for _, lines in ranks.values()], color=BARS[part])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.tick_params(labelsize=8)
    axes.set_title("of the time", loc="left", fontsize=9)


def _draw_probes(axes: Axes, bars: Axes, steps: list[int], seconds: Heat) -> None:
    """Ratios to the median of the ranks in the same probe; the steps between two probes show the first."""
    probed = np.flatnonzero(np.isfinite(seconds).any(axis=0))
    ratio = seconds[:, probed] / np.nanmedian(seconds[:, probed], axis=0) - 1
    edges = np.array([steps[place] for place in probed] + [steps[-1] + 1], float) - 0.5
    mesh = axes.pcolormesh(edges, np.arange(len(seconds) + 1) - 0.5, ratio, vmin=-0.5, vmax=0.5, cmap="RdBu_r")
    axes.set_facecolor("#d9d9d9")
    axes.set_title(PROBE_TITLE, loc="left", fontsize=9)
    axes.figure.colorbar(mesh, ax=axes, pad=0.01, format=PercentFormatter(1.0))
    usual = [float(np.median(row[np.isfinite(row)])) if np.isfinite(row).any() else 0.0 for row in ratio]
    bars.barh(range(len(usual)), usual, color="#4d4d4d")
    bars.set_xlim(min(-0.1, *usual), max(0.5, *usual))
    bars.xaxis.set_major_formatter(PercentFormatter(1.0))
    bars.tick_params(labelsize=8)
    bars.set_title("median", loc="left", fontsize=9)


def _table(ranks: Ranks, steps: list[int], key: str) -> Heat:
    """One row a rank, one column a step; NaN where a rank told nothing."""
    place = {step: column for column, step in enumerate(steps)}
    table = np.full((len(ranks), len(steps)), np.nan)
    for row, (_, lines) in enumerate(ranks.values()):
        for line in lines:
            table[row, place[line["step"]]] = line.get(key, np.nan)
    return table


def _share(lines: list[dict[str, Any]], part: str) -> float:
    total = sum(line[name] for line in lines for name in PARTS)
    return sum(line[part] for line in lines) / total if total else 0.0


def _probe_seconds(lines: list[dict[str, Any]]) -> float | None:
    probes = [line[PROBE] for line in lines if PROBE in line]
    return median(probes) if probes else None
