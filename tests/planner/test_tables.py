import io
import json

from rich.console import Console

from jaxtrain.planner import CompiledProgram, Memory
from jaxtrain.planner.bounds import Bounds
from jaxtrain.planner.tables import as_data, tables
from tests.planner.hlo_texts import NESTED_LOOPS, OVERLAP, entry

GIB = 2**30
MEMORY = Memory(
    {"params": 3 * GIB, "batch": GIB // 2, "step": 4},
    donated=3 * GIB,
    outputs=3 * GIB,
    temporaries=5 * GIB,
    peak=8 * GIB,
)


def shown(text: str, bounds: Bounds | None = None) -> str:
    program = CompiledProgram(text, {"fsdp": 2, "tensor": 1}, MEMORY, bounds=bounds)
    console = Console(file=io.StringIO(), width=150)
    console.print(tables(program, device_memory=80 * GIB))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def line(text: str, beginning: str) -> list[str]:
    """The words that follow in the one line that begins with these words."""
    words = beginning.split()
    (found,) = (line.split() for line in text.splitlines() if line.split()[: len(words)] == words)
    return found[len(words) :]


def test_memory_is_shown_by_part_against_what_the_gpu_has() -> None:
    text = shown(OVERLAP)
    assert line(text, "params") == ["3.00"]
    assert line(text, "batch ") == ["0.50"]
    assert line(text, "step ") == ["<0.01"]
    assert line(text, "temporaries") == ["5.00"]
    assert line(text, "peak, of 80.00 that the GPU has") == ["8.00"]


def test_equal_collectives_are_added_up_in_one_line() -> None:
    weight = f"bf16[{GIB // 4},8]"  # gathered: 4 GiB
    text = shown(OVERLAP.replace("bf16[4,8]", f"bf16[{GIB // 8},8]").replace("bf16[8,8]", weight))
    assert line(text, f"params.w all-gather fsdp update {weight}") == ["5", "20.00", "60%", "40%"]
    assert line(text, "fsdp ") == ["20.00", "40.0%"]
    assert line(text, "params.w all-gather fsdp update 5") == ["1", "16.00"]


def test_the_lower_bound_stands_below_what_is_moved() -> None:
    text = shown(OVERLAP, Bounds(weights=2 * GIB, gradients=0, residual=GIB))
    assert line(text, "lower bound (weights 2.00, residual 1.00)") == ["3.00"]
    assert "lower bound" not in shown(OVERLAP)


def test_nothing_moved_is_said_so() -> None:
    text = shown(entry("ROOT %p = f32[4]{0} parameter(0)"))
    assert line(text, "all ") == ["0.00", "100.0%"]
    assert "Nothing is moved twice." in text


def test_loops_of_unknown_length_are_named() -> None:
    unknown = NESTED_LOOPS.replace('"known_trip_count":{"n":"5"},', "").replace("{{0,1,2,3}}", "{{0,1}}")
    assert "they are counted once: while.3" in shown(unknown)


def test_the_data_holds_the_same_numbers() -> None:
    program = CompiledProgram(OVERLAP, {"fsdp": 2}, MEMORY, bounds=Bounds(7, 0, 0))
    data = json.loads(json.dumps(as_data(program)))
    assert data["memory"]["arguments"]["params"] == 3 * GIB
    assert data["collective_bytes"] == 5 * 128 == sum(collective["bytes"] for collective in data["collectives"])
    assert data["behind_matrix_product"] == 0.4
    assert data["collectives"][0]["result"] == "bf16[8,8]"
    assert data["bounds"]["total"] == 7
    assert data["repeats"][0]["nbytes"] == 4 * 128
    assert data["kernels"] == {"__cublas$lt$matmul": 1}
