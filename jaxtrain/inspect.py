"""`python -m jaxtrain.inspect RUN[@STEP]`: which checkpoints there are, and what is in one, with no array read."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from jaxtrain.command import Parser, exit_code, leave
from jaxtrain.config import Difference, format_differences
from jaxtrain.errors import CheckpointError
from jaxtrain.output import aligned, outlive_the_terminal, size_text

if TYPE_CHECKING:
    from jaxtrain.checkpoint import Saved
    from jaxtrain.checkpoint.directory import Listing
    from jaxtrain.checkpoint.inspection import Leaf


T = TypeVar("T")


def main(arguments: Sequence[str]) -> int:
    """Runs the verb; returns its exit code (`jaxtrain.errors`)."""
    return exit_code(lambda: _inspect(_parse(arguments)))


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = Parser(
        "python -m jaxtrain.inspect",
        description="Shows which checkpoints a run has and what is in one. Arrays are read only by --verify.",
        epilog="example: python -m jaxtrain.inspect runs/quickstart@350 --verify",
    )
    add = parser.add_argument
    add("run", metavar="RUN[@STEP]", help="a run directory; its newest checkpoint, or that of STEP")
    add("--verify", action="store_true", help="read every array and compare its content with its checksum")
    add("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(list(arguments))


def _inspect(options: Namespace) -> None:
    if options.verify:
        # Where a run trains on the accelerators, there is no room on them.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jaxtrain.checkpoint import list_checkpoints, open_saved
    from jaxtrain.checkpoint.inspection import config_changes, leaves
    from jaxtrain.saved_run import checkpoints_of, existing_run

    path, step = existing_run(options.run)
    directory = checkpoints_of(path)
    stock = list_checkpoints(directory)
    changes = config_changes(directory, stock.steps)
    show = _Json() if options.json else _Text()
    show.stock(str(directory), stock, changes)
    try:
        if not stock.steps and (stock.incomplete or stock.set_aside or stock.leftovers):
            raise CheckpointError(f"{directory}: none of what is there is a complete checkpoint")
        saved = open_saved(directory, step)
        show.checkpoint(saved, leaves(saved.meta))
        if options.verify:
            _verify(saved, show)
    finally:
        show.end()


def _verify(saved: "Saved", show: "_Json | _Text") -> None:
    """Raises CheckpointError that names the damaged arrays."""
    from jaxtrain.checkpoint import deleted_meanwhile
    from jaxtrain.checkpoint.inspection import damaged_leaves

    found = dict(_with_progress(damaged_leaves(saved), len(saved.meta.arrays)))
    if not saved.path.is_dir():
        raise deleted_meanwhile(saved)
    show.verified(found)
    if damaged := [name for name, problem in found.items() if problem is not None]:
        raise CheckpointError(f"{saved.path} is damaged: {', '.join(damaged)}")


def _with_progress(found: Iterator[T], total: int) -> Iterator[T]:
    """The same, shown on a terminal while it takes its time."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return iter(track(found, "reading arrays", total, console=console, transient=True, disable=not console.is_terminal))


class _Json:
    """Everything as one object, at the end."""

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}

    def stock(self, directory: str, stock: "Listing", changes: dict[int, list[Difference]]) -> None:
        changed = {
            step: {change.key: [change.saved, change.now] for change in found} for step, found in changes.items()
        }
        kinds = ("incomplete", "set_aside", "leftovers")
        others = {kind: [path.name for path in getattr(stock, kind)] for kind in kinds}
        self._said = {"directory": directory, "steps": stock.steps[::-1], **others, "config_changes": changed}

    def checkpoint(self, saved: "Saved", leaves: "Sequence[Leaf]") -> None:
        from jaxtrain.checkpoint.inspection import bytes_on_disk

        meta = saved.meta
        described = {
            "step": meta.step,
            "position": meta.position,
            "skipped": meta.skipped,
            "metrics": meta.metrics,
            "saved_at": meta.saved_at,
            "origin": meta.origin,
            "data_hash": meta.data_hash,
            "format": meta.format,
            "versions": meta.versions,
            "bytes_on_disk": bytes_on_disk(saved.path),
            "arrays": {
                leaf.name: {"shape": leaf.shape, "dtype": leaf.dtype, "bytes": leaf.bytes, "checksum": leaf.checksum}
                for leaf in leaves
            },
        }
        self._said["checkpoint"] = described

    def verified(self, problems: dict[str, str | None]) -> None:
        self._said["verified"] = {name: problem or "right" for name, problem in problems.items()}

    def end(self) -> None:
        _write(json.dumps(self._said, indent=2) + "\n")


class _Text:
    """Lines and tables, as soon as they are known."""

    def stock(self, directory: str, stock: "Listing", changes: dict[int, list[Difference]]) -> None:
        _write(f"{directory}\nsteps: {', '.join(map(str, stock.steps[::-1])) or 'none that is complete'}\n")
        for title, paths in (
            ("incomplete", stock.incomplete),
            ("set aside", stock.set_aside),
            ("under way, or interrupted", stock.leftovers),
        ):
            if paths:
                _write(f"{title}: {', '.join(path.name for path in paths)}\n")
        for step, found in changes.items():
            _write(f"config changed before step {step}:\n")
            _write("".join(f"  {line}\n" for line in format_differences(found).splitlines()))

    def checkpoint(self, saved: "Saved", leaves: "Sequence[Leaf]") -> None:
        from jaxtrain.checkpoint.inspection import bytes_on_disk

        meta = saved.meta
        _write(f"\nstep {meta.step}: data position {meta.position:,} rows, {meta.skipped:,} updates skipped\n")
        if meta.metrics:
            _write(", ".join(f"{name} {value:.6g}" for name, value in meta.metrics.items()) + "\n")
        if meta.saved_at:
            _write(f"saved at {datetime.fromtimestamp(meta.saved_at).astimezone().isoformat(' ', 'seconds')}\n")
        if meta.origin is not None:
            _write(f"began with the parameters of {meta.origin.get('run')}, step {meta.origin.get('step')}\n")
        _write(f"data {meta.data_hash[:12]}, format {meta.format}, {size_text(bytes_on_disk(saved.path))} on disk\n")
        _write(", ".join(f"{name} {version}" for name, version in meta.versions.items()) + "\n\n")
        _write(aligned([("part", "arrays", "elements", "size"), *_parts(leaves)], right=(1, 2, 3)) + "\n")
        rows = [
            (leaf.name, "×".join(map(str, leaf.shape)) or "scalar", leaf.dtype, size_text(leaf.bytes), leaf.checksum)
            for leaf in leaves
        ]
        _write(aligned([("array", "shape", "dtype", "size", "checksum"), *rows], right=(3,)))

    def verified(self, problems: dict[str, str | None]) -> None:
        wrong = {name: problem for name, problem in problems.items() if problem is not None}
        _write(f"\nverified: {len(problems) - len(wrong)} of {len(problems)} arrays have the content that was saved\n")
        _write("".join(f"{name} {problem}\n" for name, problem in wrong.items()))

    def end(self) -> None:
        """Everything is said."""


def _parts(leaves: "Sequence[Leaf]") -> Iterator[tuple[str, ...]]:
    """A row for each part of the state, and the total."""
    parts: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        parts.setdefault(leaf.name.partition(".")[0], []).append(leaf)
    for name, of_part in [*parts.items(), ("total", list(leaves))]:
        elements, size = sum(leaf.size for leaf in of_part), sum(leaf.bytes for leaf in of_part)
        yield name, f"{len(of_part)}", f"{elements:,}", size_text(size)


def _write(text: str) -> None:
    sys.stdout.write(text)


if __name__ == "__main__":
    outlive_the_terminal()
    leave(main(sys.argv[1:]))
