"""What XLA makes of the shipped configs for GPUs that aren't there: the figures of README's table."""

import functools
import os
import tempfile
from collections.abc import Callable

import pytest

from jaxtrain.config import load
from jaxtrain.config.cluster import load_cluster
from jaxtrain.planner import CompiledProgram, compile_for, cuda_compiler_missing, hidden_share, total
from tests.runs import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(cuda_compiler_missing()), reason=cuda_compiler_missing()),
]

GIB = 2**30
SEQUENCE, VOCAB = 8192, 128_256
Compiled = Callable[[], CompiledProgram]
PIPELINE_OF_70B = ("mesh.pipeline=4", "mesh.fsdp=8", "mesh.tensor=8", "microbatch=1")
KERNELS = {"flash_forward", "flash_query_gradient", "flash_key_gradients"}


@functools.cache
def compiled(name: str, devices: int, *overrides: str) -> tuple[CompiledProgram, str]:
    """A config's program, and what the compiler warned of."""
    config = load(ROOT / "configs" / f"{name}.yml", ["compile_cache=null", *overrides])
    with tempfile.TemporaryFile() as log:
        stderr = os.dup(2)
        os.dup2(log.fileno(), 2)  # XLA's own lines, which Python doesn't see
        try:
            program = compile_for(config, load_cluster("h100"), devices)
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        log.seek(0)
        return program, log.read().decode()


def program(name: str, devices: int, *overrides: str) -> CompiledProgram:
    return compiled(name, devices, *overrides)[0]


def llama_8b() -> CompiledProgram:
    return program("llama3-8b", 8)


def llama_70b() -> CompiledProgram:
    return program("llama3-70b", 256)


USABLE = 0.75 * 79.11 * GIB
"""What JAX takes of the card unless told otherwise."""

STAGES = {
    "70B gathered once": ("llama3-70b", 256, *PIPELINE_OF_70B, "fsdp.gather=step"),
    "70B gathered for each micro-batch": ("llama3-70b", 256, *PIPELINE_OF_70B, "fsdp.gather=microbatch"),
    "405B": ("llama3-405b", 512),
}
"""Name to config, devices and overrides."""


def with_stages(name: str) -> CompiledProgram:
    return program(*STAGES[name])


def test_llama_8b_on_8_gpus_sends_at_most_what_the_bound_allows_and_hides_most_of_it() -> None:
    collectives = llama_8b().collectives
    assert total(collectives) <= 42.5 * GIB
    assert hidden_share(collectives) >= 0.85


def test_llama_8b_on_8_gpus_fits_in_24_gib() -> None:
    assert llama_8b().memory.peak <= 24 * GIB


def test_llama_70b_on_256_gpus_sends_at_most_280_gib_and_fits_in_10() -> None:
    assert total(llama_70b().collectives) <= 280 * GIB
    assert llama_70b().memory.peak <= 10 * GIB


def test_the_tensor_collectives_of_llama_70b_hide_in_part() -> None:
    assert hidden_share(llama_70b().collectives) >= 0.4


@pytest.mark.parametrize(("of", "heads"), [(llama_8b, 32), (llama_70b, 8)])
def test_attention_is_a_flash_kernel_and_stores_no_scores(of: Compiled, heads: int) -> None:
    assert {name.rpartition(" ")[2] for name in of().kernels} >= KERNELS
    assert not of().buffers_with(heads, SEQUENCE, SEQUENCE)


def test_no_device_holds_all_logits_in_float32() -> None:
    rows = 2
    assert not llama_8b().buffers_with(rows * SEQUENCE, VOCAB)
    assert not llama_70b().buffers_with(rows * SEQUENCE, VOCAB // 8)


@pytest.mark.parametrize("of", [llama_8b, llama_70b])
def test_what_is_gathered_is_bfloat16_and_nothing_is_gathered_twice(of: Compiled) -> None:
    gathers = [each for each in of().collectives if each.kind == "all-gather" and each.nbytes > GIB / 64]
    assert gathers
    assert {each.operand.dtype for each in gathers} == {"bf16"}
    assert not of().repeats


def test_the_program_does_not_grow_with_depth() -> None:
    few, many = (len(program("llama3-8b", 8, f"model.layers={layers}").text) for layers in (4, 40))
    assert many < 1.05 * few


def test_the_program_does_not_grow_with_the_number_of_devices() -> None:
    few, many = (
        len(program("llama3-8b", devices, f"global_batch={2 * devices}", f"mesh.fsdp={devices}").text)
        for devices in (8, 2048)
    )
    assert many < 2 * few


def sent_over(program: CompiledProgram, axis: str) -> int:
    return total([each for each in program.collectives if each.axes == (axis,)])


@pytest.mark.parametrize("name", STAGES)
def test_stages_send_hardly_more_than_the_bounds(name: str) -> None:
    program = with_stages(name)
    assert program.bounds is not None
    assert sent_over(program, "fsdp") <= 1.05 * program.bounds.weights
    assert sent_over(program, "tensor") <= 1.05 * program.bounds.residual
    assert sent_over(program, "pipeline") <= 0.01 * total(program.collectives)


@pytest.mark.parametrize(("name", "gib"), [("70B gathered once", 21), ("70B gathered for each micro-batch", 11)])
def test_llama_70b_in_stages_fits_in_half_of_what_a_peer_needs(name: str, gib: int) -> None:
    assert with_stages(name).memory.peak <= gib * GIB


def test_llama_405b_on_512_gpus_fits_in_what_a_process_may_take() -> None:
    assert with_stages("405B").memory.peak <= USABLE


@pytest.mark.parametrize("name", STAGES)
def test_stages_move_nothing_twice_and_sum_no_whole_parameter(name: str) -> None:
    program = with_stages(name)
    assert not program.repeats
    sums = [each for each in program.collectives if each.kind == "all-reduce"]
    assert all(each.bytes_each < GIB / 64 for each in sums)
    assert "nvoluntary" not in compiled(*STAGES[name])[1]
    assert not program.module.unknown_loops
