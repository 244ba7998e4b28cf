"""What XLA makes of a pipelined step: memory that doesn't grow with micro-batches, and no collective too many."""

import functools

import jax
import pytest

from jaxtrain.models.parameters import named_leaves
from jaxtrain.planner import CompiledProgram
from jaxtrain.planner.compiled import read_step
from jaxtrain.program import Program
from tests.runs import tiny_program

LAYERS = 6
SIZES = [f"model.layers={LAYERS}", "model.mlp=352", "model.kv_heads=4", "model.vocab=288", "data.vocab=288"]
"""So that no part of a parameter is as large as another one, or as one layer."""
ZERO_2 = ["mesh.data=2", "mesh.fsdp=2", "sharding.zero=2"]
ONCE = ["mesh.pipeline=2", "mesh.data=2", "mesh.fsdp=2", "microbatch=1", "fsdp.gather=step"]


@functools.cache
def program(devices: int, *overrides: str) -> Program:
    return tiny_program(devices, *SIZES, *overrides)


@functools.cache
def compiled(devices: int, *overrides: str) -> CompiledProgram:
    return read_step(program(devices, *overrides), "cpu")


@functools.cache
def temporaries(schedule: str, microbatches: int, *overrides: str) -> int:
    """Bytes on a device, without what is as large as the batch: its arrays in the order of micro-batches."""
    mesh = ["mesh.pipeline=2", f"pipeline.schedule={schedule}", "microbatch=1", f"global_batch={microbatches}"]
    step = program(2, *mesh, *overrides)
    batch = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.batch))
    return compiled(2, *mesh, *overrides).memory.temporaries - batch


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_temporaries_of_1f1b_are_the_same_for_8_and_64_micro_batches(schedule: str) -> None:
    chunks = ["pipeline.chunks=2"] if schedule != "1f1b" else []
    few, many = (temporaries(schedule, microbatches, *chunks) for microbatches in (8, 64))
    assert many == pytest.approx(few, rel=0.02)


def test_gpipe_keeps_all_of_them() -> None:
    """So that the test above could see a stash that grows."""
    assert temporaries("gpipe", 64) > 3 * temporaries("gpipe", 8)


def test_full_rematerialisation_makes_the_stash_small() -> None:
    assert temporaries("1f1b", 8, "remat=full") < 0.6 * temporaries("1f1b", 8)


def whole_parameters(step: Program) -> set[int]:
    """Numbers in each parameter that is stored in parts, and in one layer of it."""
    leaves = {name: leaf.size for name, leaf in named_leaves(step.state["params"]).items() if "norm" not in name}
    return {*leaves.values(), *(size // LAYERS for name, size in leaves.items() if name.startswith("layers."))}


@pytest.mark.parametrize(
    "overrides", [ZERO_2, ONCE, [*ONCE, "sharding.zero=2"]], ids=["zero 2", "once", "once, zero 2"]
)
def test_no_parameter_s_gradient_is_all_reduced_whole(overrides: list[str]) -> None:
    devices = 8 if "mesh.pipeline=2" in overrides else 4
    whole = whole_parameters(program(devices, *overrides))
    parts = {size // number for size in whole for number in (2, 4, 8)}
    assert not whole & parts, "sizes that can't be told apart"
    reduced = [each for each in compiled(devices, *overrides).collectives if each.kind == "all-reduce"]
    assert reduced
    assert [each for each in reduced if each.operand.elements in whole] == []


@pytest.mark.parametrize("mesh", [["mesh.data=2", "mesh.fsdp=2", "microbatch=1"], ONCE[:4]], ids=str)
def test_weights_that_are_gathered_once_are_not_gathered_in_any_loop(mesh: list[str]) -> None:
    devices = 8 if "mesh.pipeline=2" in mesh else 4
    turns = {
        gather: [
            each.executions
            for each in compiled(devices, *mesh, f"fsdp.gather={gather}").collectives
            if each.kind in ("all-gather", "reduce-scatter") and "fsdp" in each.axes
        ]
        for gather in ("step", "microbatch")
    }
    assert set(turns["step"]) == {1}
    assert max(turns["microbatch"]) > 1


def test_with_zero_2_gradients_that_are_gathered_once_are_scattered_over_data_instead_of_reduced_whole() -> None:
    def moved(kind: str, zero: int) -> int:
        collectives = compiled(8, *ONCE, f"sharding.zero={zero}").collectives
        return sum(each.nbytes for each in collectives if each.kind == kind and "data" in each.axes)

    assert moved("all-reduce", 2) < 0.1 * moved("all-reduce", 1)
    assert moved("reduce-scatter", 2) > 0.9 * moved("all-reduce", 1)
    assert moved("reduce-scatter", 1) == 0
