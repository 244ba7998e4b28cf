"""Whether a disturbed run came to the same end as an undisturbed one: losses, rows, the last checkpoint."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.checkpoint import list_checkpoints
from jaxtrain.checkpoint.meta import read_meta
from jaxtrain.config import Config
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry import jsonl


@dataclass(frozen=True)
class Finding:
    """One thing that was compared: what was found, and whether it is as it must be."""

    what: str
    found: str
    passed: bool


def compare(undisturbed: Config, disturbed: Config, tolerance: float) -> list[Finding]:
    """What must be the same in both runs; `tolerance` is how far losses may be apart, relatively; 0: not at all."""
    ours, theirs = RunDirectory(disturbed.run_dir), RunDirectory(undisturbed.run_dir)
    losses = _losses(_read_losses(ours), _read_losses(theirs), tolerance)
    rows = _rows(_read_rows(ours), _read_rows(theirs))
    return [losses, rows, _last_checkpoint(disturbed.checkpoint_dir, undisturbed.checkpoint_dir, bool(tolerance))]


def _losses(ours: list[tuple[int, float]], theirs: list[tuple[int, float]], tolerance: float) -> Finding:
    what = "losses of all steps"
    if [step for step, _ in ours] != [step for step, _ in theirs]:
        return Finding(
            what, f"{len(ours)} steps are told of, not the same as the {len(theirs)} undisturbed ones", False
        )
    apart = [(abs(a - b) / max(abs(b), 1e-30), step) for (step, a), (_, b) in zip(ours, theirs, strict=True)]
    most, step = max(apart, default=(0.0, 0))
    if not most:
        return Finding(what, f"bit-equal over {len(ours)} steps", True)
    allowed = f", {tolerance:.0e} is allowed" if tolerance else ", and they must be bit-equal"
    return Finding(what, f"up to {most:.1e} apart (step {step}){allowed}", most <= tolerance)


def _rows(ours: dict[int, Counter[str]], theirs: dict[int, Counter[str]]) -> Finding:
    what = "rows of all batches"
    differing = sorted(at for at in ours.keys() | theirs.keys() if ours.get(at) != theirs.get(at))
    if differing:
        return Finding(what, f"others in {len(differing)} batches, first at position {differing[0]}", False)
    count = sum(rows.total() for rows in ours.values())
    return Finding(what, f"the same {count:,} rows, each in its batch", True)


def _last_checkpoint(ours: Path, theirs: Path, on_other_layout: bool) -> Finding:
    """Their bits are compared where both runs ended on the same layout."""
    what = "last checkpoint"
    found = [(directory, list_checkpoints(directory).steps) for directory in (ours, theirs)]
    metas = [read_meta(directory, steps[0]) for directory, steps in found if steps]
    if len(metas) < 2:
        return Finding(what, "missing", False)
    our, their = metas
    if (our.step, our.position) != (their.step, their.position):
        return Finding(what, f"step {our.step}, and step {their.step} undisturbed", False)
    if on_other_layout:
        return Finding(what, f"step {our.step} at the same data position", True)
    same = our.checksums == their.checksums
    return Finding(what, f"step {our.step}, {'every bit the same' if same else 'not the same bits'}", same)


def _read_losses(run: RunDirectory) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in jsonl.read(run.metrics) if "loss" in line]


def _read_rows(run: RunDirectory) -> dict[int, Counter[str]]:
    """For each data position the rows that all processes together read for it, and how often."""
    rows: dict[int, Counter[str]] = {}
    for _, path in run.row_logs():
        for line in jsonl.read(path):
            rows.setdefault(line["position"], Counter()).update(map(str, line["rows"]))
    return rows
