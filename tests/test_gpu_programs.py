"""What XLA makes of the shipped configs for GPUs that aren't there: the figures of README's table."""

import functools
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
KERNELS = {"flash_forward", "flash_query_gradient", "flash_key_gradients"}


@functools.cache
def program(name: str, devices: int, *overrides: str) -> CompiledProgram:
    config = load(ROOT / "configs" / f"{name}.yml", ["compile_cache=null", *overrides])
    return compile_for(config, load_cluster("h100"), devices)


def llama_8b() -> CompiledProgram:
    return program("llama3-8b", 8)


def llama_70b() -> CompiledProgram:
    return program("llama3-70b", 256)


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


@pytest.mark.parametrize(("compiled", "heads"), [(llama_8b, 32), (llama_70b, 8)])
def test_attention_is_a_flash_kernel_and_stores_no_scores(compiled: Compiled, heads: int) -> None:
    assert {name.rpartition(" ")[2] for name in compiled().kernels} >= KERNELS
    assert not compiled().buffers_with(heads, SEQUENCE, SEQUENCE)


def test_no_device_holds_all_logits_in_float32() -> None:
    rows = 2
    assert not llama_8b().buffers_with(rows * SEQUENCE, VOCAB)
    assert not llama_70b().buffers_with(rows * SEQUENCE, VOCAB // 8)


@pytest.mark.parametrize("compiled", [llama_8b, llama_70b])
def test_what_is_gathered_is_bfloat16_and_nothing_is_gathered_twice(compiled: Compiled) -> None:
    gathers = [each for each in compiled().collectives if each.kind == "all-gather" and each.nbytes > GIB / 64]
    assert gathers
    assert {each.operand.dtype for each in gathers} == {"bf16"}
    assert not compiled().repeats


def test_the_program_does_not_grow_with_depth() -> None:
    few, many = (len(program("llama3-8b", 8, f"model.layers={layers}").text) for layers in (4, 40))
    assert many < 1.05 * few


def test_the_program_does_not_grow_with_the_number_of_devices() -> None:
    few, many = (
        len(program("llama3-8b", devices, f"global_batch={2 * devices}", f"mesh.fsdp={devices}").text)
        for devices in (8, 2048)
    )
    assert many < 2 * few
