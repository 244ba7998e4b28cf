"""What a run will need, told before it runs: the compiled program, read."""

from jaxtrain.planner.collectives import Collective, by_axes, find_repeats, hidden_share, total
from jaxtrain.planner.compiled import CompiledProgram, Memory, compile_for
from jaxtrain.planner.targets import compile_only_devices, cuda_compiler_missing
