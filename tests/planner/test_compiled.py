import functools
import tempfile
from pathlib import Path

import pytest

from jaxtrain import runtime
from jaxtrain.config import Config
from jaxtrain.config.cluster import load_cluster
from jaxtrain.planner import CompiledProgram, Memory, compile_for, total
from jaxtrain.planner.bounds import fsdp_bound
from jaxtrain.planner.compiled import compiler_options
from jaxtrain.planner.hlo import Shape
from tests.planner.hlo_texts import NESTED_LOOPS, entry
from tests.planner.programs import needs_cuda_compiler
from tests.runs import tiny_config

LAYERS, EMBED, MLP, VOCAB, ROWS, SEQUENCE = 2, 64, 192, 512, 8, 256
HEADS, HEAD_DIM = 2, 64  # a size that the flash kernels know
SMALL = [
    "precision=bfloat16", "remat=full", f"data.sequence={SEQUENCE}", f"model.mlp={MLP}", f"model.vocab={VOCAB}",
    f"model.heads={HEADS}", f"model.kv_heads={HEADS}", f"model.head_dim={HEAD_DIM}", f"model.layers={LAYERS}",
    f"model.embed={EMBED}", f"global_batch={ROWS}",
]  # fmt: skip
MATRICES = {
    **dict.fromkeys(("attention.query", "attention.key", "attention.value"), EMBED * HEADS * HEAD_DIM),
    "attention.output": HEADS * HEAD_DIM * EMBED,
    **dict.fromkeys(("mlp.gate", "mlp.up", "mlp.down"), EMBED * MLP),
}
"""Elements of each matrix of a layer."""


def small_config(*overrides: str) -> Config:
    with tempfile.TemporaryDirectory() as folder:
        return tiny_config(Path(folder), Path(folder) / "data", *SMALL, *overrides)


@functools.cache
def on_fsdp() -> CompiledProgram:
    return compile_for(small_config("mesh.fsdp=8"), load_cluster("h100"), 8)


@functools.cache
def on_fsdp_and_tensor() -> CompiledProgram:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "xla_flags", lambda config: ["--xla_gpu_enable_triton_gemm=false"])
        return compile_for(small_config("mesh.fsdp=4", "mesh.tensor=2"), load_cluster("a100"), 8)


@needs_cuda_compiler
@pytest.mark.slow
def test_each_weight_of_a_layer_is_gathered_once_a_pass_in_bfloat16_and_its_gradient_scattered_once() -> None:
    program = on_fsdp()
    for name, elements in MATRICES.items():
        gathers = [c for c in program.collectives if c.moved == f"params.layers.{name}"]
        assert {(c.kind, c.axes, c.result.dtype) for c in gathers} == {("all-gather", ("fsdp",), "bf16")}
        for part_of in ("forward", "backward"):
            assert sum(c.times for c in gathers if c.part_of == part_of) == 1
        scatters = [c for c in program.collectives if c.moved == f"gradient of layers.{name}"]
        assert {c.kind for c in scatters} == {"reduce-scatter"}
        assert {c.part_of for c in scatters} == {"backward"}
        assert total(gathers + scatters) == fsdp_bound(LAYERS * elements)
    assert program.repeats == []


@needs_cuda_compiler
@pytest.mark.slow
def test_memory_is_told_by_part_and_adds_up() -> None:
    memory = on_fsdp().memory
    numbers = LAYERS * sum(MATRICES.values()) + 2 * VOCAB * EMBED
    replicated = LAYERS * 2 * EMBED + EMBED
    assert memory.arguments["params"] == 4 * (numbers // 8 + replicated)
    assert memory.arguments["optimizer"] == 2 * memory.arguments["params"] + 4
    assert memory.arguments["batch"] == 5 * 4 * SEQUENCE
    given = sum(memory.arguments.values())
    assert memory.donated == sum(memory.arguments[part] for part in ("params", "optimizer", "step"))
    assert given < memory.peak <= given + memory.temporaries + memory.outputs - memory.donated + 4096


@needs_cuda_compiler
@pytest.mark.slow
def test_the_residual_moves_as_often_as_the_bound_says_and_only_at_the_ends_beyond_it() -> None:
    program = on_fsdp_and_tensor()
    assert program.bounds is not None
    residual = 2 * (ROWS // 4) * SEQUENCE * EMBED
    assert program.bounds.residual == 11 * LAYERS * residual
    moved = total([c for c in program.collectives if c.axes == ("tensor",)])
    ends = 4 * residual  # embedding and head, forward and backward
    statistics = 3 * 4 * (ROWS // 4) * SEQUENCE  # of the loss: maximum, sum and target's logit of each token
    assert program.bounds.residual <= moved <= program.bounds.residual + ends + 2 * statistics


@needs_cuda_compiler
@pytest.mark.slow
def test_the_flags_of_a_run_take_effect() -> None:
    assert any("cublas" in kernel for kernel in on_fsdp_and_tensor().kernels)
    assert not any("cublas" in kernel for kernel in on_fsdp().kernels)


@needs_cuda_compiler
@pytest.mark.slow
def test_kernels_are_named_and_counted_with_loops() -> None:
    kernels = on_fsdp().kernels
    assert all(kernel.startswith("__gpu$xla.gpu.triton: ") for kernel in kernels)
    assert {times for kernel, times in kernels.items() if "forward" in kernel} == {2 * LAYERS}, "computed again once"
    assert {times for kernel, times in kernels.items() if "gradient" in kernel} == {LAYERS}


@needs_cuda_compiler
@pytest.mark.slow
def test_buffers_are_found_by_their_sizes() -> None:
    program = on_fsdp()
    assert program.buffers_with(LAYERS, SEQUENCE, EMBED, dtype="bf16"), "the layers' inputs are kept"
    assert program.buffers_with(SEQUENCE, SEQUENCE) == [], "a flash kernel stores no scores"
    assert all(a.shape.nbytes >= b.shape.nbytes for a, b in zip(program.buffers, program.buffers[1:], strict=False))


def read(text: str) -> CompiledProgram:
    return CompiledProgram(text, {"fsdp": 4}, Memory({}, 0, 0, 0, 0))


SIZES = {
    (8192, 8192): True, (2, 32): True, (64, 8192): True, (8192, 64): True, (2 * 32 * 8192, 8192): True,
    (2 * 32 * 8192 * 8192,): True, (16384,): False, (8192, 8192, 8192): False, (32, 2): True, (2, 8192, 8192): True,
}  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_may_be_spread_over_neighbouring_dimensions(sizes: tuple[int, ...]) -> None:
    program = read(entry("%p = f32[4]{0} parameter(0)", "ROOT %x = f32[2,32,8192,8192]{3,2,1,0} broadcast(%p)"))
    assert bool(program.buffers_with(*sizes)) is SIZES[sizes]
    assert bool(program.buffers_with(*sizes, dtype="bf16")) is False


def test_views_and_loops_write_no_buffer() -> None:
    assert {buffer.instruction for buffer in read(NESTED_LOOPS).buffers} == {"psum"}
    views = entry(
        "%p = f32[4]{0} parameter(0)",
        "%view = f32[2,2]{1,0} bitcast(%p)",
        "%both = (f32[2,2]{1,0}, f32[2,2]{1,0}) fusion(%view), kind=kLoop, calls=%main",
        "ROOT %one = f32[2,2]{1,0} get-tuple-element(%both), index=0",
    )
    (buffer,) = read(views).buffers
    assert (buffer.shape, buffer.count, buffer.instruction) == (Shape("f32", (2, 2)), 1, "both")


def test_flags_become_options_of_their_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_mine=false --xla_other")
    flags = ["--xla_a=true", "--xla_b=false", "--xla_c", "--xla_d=1024", "--xla_e=-1", "--xla_f=x,y", "--xla_g="]
    expected = {"xla_a": True, "xla_b": False, "xla_c": True, "xla_d": 1024, "xla_e": -1, "xla_f": "x,y", "xla_g": ""}
    assert compiler_options(flags) == expected
    assert compiler_options(["--xla_gpu_mine=true"]) == {}, "what the user has set stays"
