"""What a run will need, told before it runs: the compiled program, read."""

from jaxtrain.planner.collectives import Collective, Repeat, by_axes, find_repeats, hidden_share, total
from jaxtrain.planner.compiled import Buffer, CompiledProgram, Memory, compile_for, read_step
from jaxtrain.planner.targets import compile_only_devices, cuda_compiler_missing

__all__ = [
    "Buffer",
    "Collective",
    "CompiledProgram",
    "Memory",
    "Repeat",
    "by_axes",
    "compile_for",
    "compile_only_devices",
    "cuda_compiler_missing",
    "find_repeats",
    "hidden_share",
    "read_step",
    "total",
]
