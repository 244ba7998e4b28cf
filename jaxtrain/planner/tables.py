"""A compiled program shown: as tables for people, as plain data for scripts."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxtrain.planner.collectives import Collective, by_axes, hidden_share, total
from jaxtrain.planner.compiled import CompiledProgram

GIB = 2**30
ROWS = 24
"""Lines that a table has at most; what is left out is added up in one more."""


def tables(program: CompiledProgram, device_memory: int) -> RenderableType:
    """Everything, one table under the other. `device_memory`: bytes of one GPU."""
    parts: dict[str, Table] = {
        **({"choices": _choices(program)} if program.choices else {}),
        "memory of a device": _memory(program, device_memory),
        "collectives, bytes of a device and step": _axes(program),
        "what is moved": _moved(program.collectives),
    }
    if program.repeats:
        parts["moved again"] = _repeats(program)
    parts["largest arrays that kernels write"] = _buffers(program)
    if program.kernels:
        parts["kernels that are called by name"] = _kernels(program)
    notes = [] if program.repeats else ["Nothing is moved twice."]
    if program.module.unknown_loops:
        names = ", ".join(program.module.unknown_loops)
        notes.append(f"The compiler doesn't know how often these loops run; they are counted once: {names}")
    shown: list[RenderableType] = []
    for title, table in parts.items():
        shown += [Text(title, "bold"), table, ""]
    return Group(*shown, *notes)


def as_data(program: CompiledProgram) -> dict[str, Any]:
    """Everything as JSON can hold it; bytes are per device and step."""
    moved = program.collectives
    return {
        "mesh": dict(program.mesh.sizes),
        "micro_batches": program.micro_batches,
        "compile_seconds": round(program.seconds, 2),
        "choices": program.choices,
        "memory": asdict(program.memory),
        "bounds": None if program.bounds is None else {**asdict(program.bounds), "total": program.bounds.total},
        "collective_bytes": total(moved),
        "behind_matrix_product": hidden_share(moved),
        "axes": {_axes_name(axes): _sums(members) for axes, members in by_axes(moved).items()},
        "collectives": [_collective(collective) for collective in moved],
        "repeats": [asdict(repeat) for repeat in program.repeats],
        "buffers": [{**asdict(b), "shape": str(b.shape), "bytes": b.shape.nbytes} for b in program.buffers[:100]],
        "kernels": dict(program.kernels),
        "unknown_loops": list(program.module.unknown_loops),
    }


def _sums(members: Sequence[Collective]) -> dict[str, Any]:
    return {"bytes": total(members), "behind_matrix_product": hidden_share(members)}


def _collective(collective: Collective) -> dict[str, Any]:
    shapes = {"operand": str(collective.operand), "result": str(collective.result)}
    return {**asdict(collective), **shapes, "bytes": collective.nbytes}


def _new_table(*columns: str) -> Table:
    """A table whose columns are numbers, but for those whose names end in ':'."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        is_text = column.endswith(":")
        table.add_column(column.rstrip(":"), justify="left" if is_text else "right", no_wrap=True)
    return table


def _choices(program: CompiledProgram) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, choice in program.choices.items():
        table.add_row(name, choice)
    return table


def _memory(program: CompiledProgram, device_memory: int) -> Table:
    memory = program.memory
    table = _new_table("part:", "GiB")
    for part, size in memory.arguments.items():
        table.add_row(part, _gib(size))
    table.add_row("outputs that are no donated arguments", _gib(memory.outputs - memory.donated))
    table.add_row("temporaries", _gib(memory.temporaries))
    table.add_section()
    table.add_row(f"peak, of {_gib(device_memory)} that the GPU has", _gib(memory.peak))
    return table


def _axes(program: CompiledProgram) -> Table:
    table = _new_table("axis:", "GiB", "behind a matrix product")
    for axes, members in by_axes(program.collectives).items():
        table.add_row(_axes_name(axes), _gib(total(members)), f"{hidden_share(members):.1%}")
    table.add_section()
    table.add_row("all", _gib(total(program.collectives)), f"{hidden_share(program.collectives):.1%}")
    if program.bounds is not None:
        names = {"weights": program.bounds.weights, "gradients": program.bounds.gradients}
        names |= {"residual": program.bounds.residual}
        parts = [f"{name} {_gib(size)}" for name, size in names.items() if size]
        table.add_row(f"lower bound ({', '.join(parts)})" if parts else "lower bound", _gib(program.bounds.total), "")
    return table


def _moved(collectives: Sequence[Collective]) -> Table:
    columns = ("what is moved:", "by:", "axis:", "pass:", "array:", "runs", "GiB", "async", "behind")
    table = _new_table(*columns)
    lines: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for collective in collectives:
        larger = max(collective.operand, collective.result, key=lambda shape: shape.nbytes)
        key = (collective.moved, collective.kind, _axes_name(collective.axes), collective.part_of, str(larger))
        lines[key].append(collective)
    ordered = sorted(lines.items(), key=lambda item: -total(item[1]))
    for line, members in ordered[:ROWS]:
        times = sum(member.executions for member in members)
        asynchronous = total([member for member in members if member.is_async]) / max(total(members), 1)
        table.add_row(*line, f"{times}", _gib(total(members)), f"{asynchronous:.0%}", f"{hidden_share(members):.0%}")
    if rest := [member for _, members in ordered[ROWS:] for member in members]:
        table.add_row(f"{len(ordered) - ROWS} more", "", "", "", "", "", _gib(total(rest)), "", "")
    return table


def _repeats(program: CompiledProgram) -> Table:
    table = _new_table("what is moved:", "by:", "axis:", "pass:", "times", "needed", "GiB too many")
    for repeat in program.repeats[:ROWS]:
        place = (repeat.moved, repeat.kind, _axes_name(repeat.axes), repeat.part_of)
        table.add_row(*place, f"{repeat.times:.3g}", f"{repeat.needed}", _gib(repeat.nbytes))
    return table


def _buffers(program: CompiledProgram) -> Table:
    table = _new_table("array:", "GiB", "written by", "made in:")
    for buffer in program.buffers[: ROWS // 2]:
        table.add_row(str(buffer.shape), _gib(buffer.shape.nbytes), f"{buffer.count}", buffer.made_by)
    return table


def _kernels(program: CompiledProgram) -> Table:
    table = _new_table("kernel:", "times")
    for name, times in program.kernels.items():
        table.add_row(name, f"{times:,}")
    return table


def _axes_name(axes: Sequence[str]) -> str:
    return "×".join(axes) or "none"


def _gib(size: int) -> str:
    return "<0.01" if 0 < size < GIB / 200 else f"{size / GIB:,.2f}"
