"""`python -m jaxtrain.schedule --kind 1f1b --stages 4 --microbatches 8`: a pipeline's schedule in time, and drawn.

Nothing is trained: the schedule's table is run with given times, as the stages would run it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxtrain.command import Parser, at_least, exit_code, leave
from jaxtrain.output import aligned, outlive_the_terminal
from jaxtrain.pipeline.buffers import plan_buffers
from jaxtrain.pipeline.schedule import KINDS, make_schedule
from jaxtrain.pipeline.simulation import Timeline, microbatches_in_flight, simulate
from jaxtrain.pipeline.split import split_layers

FORMATS = (".png", ".svg")
MOST_TURNS = 500_000
"""Turns of all stages, idle ones too, that are still simulated in seconds."""
MOST_LAYERS = 1_000_000
MOST_TIME = 1e100


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    return exit_code(lambda: _show(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "python -m jaxtrain.schedule", description="Show what a pipeline's schedule costs.", allow_abbrev=False
    )
    parser.add_argument("--kind", default="1f1b", help=f"{', '.join(KINDS)} (default: 1f1b)")
    parser.add_argument("--stages", type=at_least(1), required=True, help="mesh.pipeline")
    parser.add_argument("--microbatches", type=at_least(1), required=True, help="micro-batches in a step")
    parser.add_argument("--chunks", type=at_least(1), default=1, help="pipeline.chunks, of each stage (default: 1)")
    times = "one micro-batch takes in the {} of a whole stage, or of one layer with --layers (default: {})"
    parser.add_argument("--forward", type=_time, default=1.0, metavar="TIME", help=times.format("forward", 1))
    parser.add_argument("--backward", type=_time, default=2.0, metavar="TIME", help=times.format("backward", 2))
    parser.add_argument(
        "--link", type=_time, default=0.0, metavar="TIME", help="an exchange of neighbours (default: 0)"
    )
    parser.add_argument("--layers", type=at_least(1), help="split so many layers over the stages")
    parser.add_argument(
        "--first", type=_time, metavar="LAYERS", help="what the embedding weighs, in layers (default: 0)"
    )
    parser.add_argument("--last", type=_time, metavar="LAYERS", help="what the head weighs, in layers (default: 0)")
    parser.add_argument("--output", type=Path, metavar="FILE.svg|FILE.png", help="draw it there")
    parsed = parser.parse_args(arguments)
    if parsed.layers is None and not (parsed.first is parsed.last is None):
        parser.error("--first and --last weigh against layers; give --layers too")
    if parsed.forward + parsed.backward == 0:
        parser.error("--forward 0 and --backward 0 leave no time to show")
    turns = parsed.stages * parsed.chunks * (parsed.microbatches + parsed.stages)
    if turns > MOST_TURNS:
        parser.error(
            f"stages × chunks × (micro-batches + stages) = {turns:,} are too many to simulate; {MOST_TURNS:,} are not"
        )
    if (parsed.layers or 0) > MOST_LAYERS:
        parser.error(f"--layers {parsed.layers:,} are too many to split; {MOST_LAYERS:,} are not")
    if parsed.output is not None and parsed.output.suffix not in FORMATS:
        parser.error(f"--output {parsed.output} must end in {' or '.join(FORMATS)}")
    return parsed


def _show(parsed: argparse.Namespace) -> None:
    schedule = make_schedule(parsed.kind, parsed.stages, parsed.microbatches, parsed.chunks)
    split, loads = None, [1 / schedule.chunks] * schedule.virtual_stages
    if parsed.layers is not None:
        first, last = parsed.first or 0.0, parsed.last or 0.0
        split = split_layers(parsed.layers, schedule.stages, schedule.chunks, 1.0, first, last)
        loads = [float(counts[chunk]) for chunk in range(schedule.chunks) for counts in split]
        loads[0] += first
        loads[-1] += last
    timeline = simulate(
        schedule,
        forward=[load * parsed.forward for load in loads],
        backward=[load * parsed.backward for load in loads],
        link=parsed.link,
    )
    rows = summary(timeline, split)
    if parsed.output is not None:
        from jaxtrain.pipeline.picture import draw_schedule  # matplotlib takes a while

        draw_schedule(timeline, parsed.output)
        rows["picture"] = str(parsed.output)
    sys.stdout.write(aligned(list(rows.items())))


def summary(timeline: Timeline, split: tuple[tuple[int, ...], ...] | None = None) -> dict[str, str]:
    """The numbers of a schedule, in the order shown.

    Args:
        split: the layers of each chunk of each stage, where they are known.
    """
    schedule = timeline.schedule
    stashed = plan_buffers(schedule).stash_slots
    over = timeline.total / timeline.ideal - 1
    chunks = "" if schedule.chunks == 1 else f" ({stashed} chunks, {schedule.chunks} a micro-batch)"
    rows = {
        "schedule": f"{schedule.title}, {len(schedule.ticks)} ticks",
        "total": f"{timeline.total:.6g}" + (f", {over:.1%} over the ideal" if over >= 0.0005 else ""),
        "ideal": f"{timeline.ideal:.6g}",
        "bubble": f"{timeline.bubble:.1%} of the time",
        "in flight": f"{microbatches_in_flight(schedule):.4g} micro-batches at most{chunks}",
    }
    if split is not None:
        rows["layers"] = ", ".join(" + ".join(map(str, counts)) for counts in split) + ", by stage"
    return rows


def _time(text: str) -> float:
    """A number of at least 0 that stays finite when many are added."""
    try:
        if 0 <= float(text) <= MOST_TIME:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} is no number from 0 to {MOST_TIME:g}")


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
