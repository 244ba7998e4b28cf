"""A training step compiled for GPUs that aren't there, and what stands in it."""

import math
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxtrain import runtime
from jaxtrain.config import Config
from jaxtrain.config.cluster import ClusterConfig
from jaxtrain.executables import without_compile_cache
from jaxtrain.planner.bounds import Bounds, bounds_of
from jaxtrain.planner.collectives import Collective, CollectiveReader, Repeat, find_repeats
from jaxtrain.planner.groups import MeshShape
from jaxtrain.planner.hlo import Instruction, Module, Shape, parse
from jaxtrain.planner.targets import compile_only_devices
from jaxtrain.program import Program, build


@dataclass(frozen=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments: what the program is given, by part: params, optimizer, batch, …
        donated: how much of that is overwritten by outputs.
        outputs: all outputs, the donated ones included.
        temporaries: the most that is alive at once beside arguments and outputs.
        peak: the most that is alive at once in all, as XLA counts it.
    """

    arguments: Mapping[str, int]
    donated: int
    outputs: int
    temporaries: int
    peak: int


@dataclass(frozen=True)
class Buffer:
    """An array that a kernel writes, one of equal ones.

    Attributes:
        count: how many instructions write an array of this shape for the same operation.
        made_by: the Python function and operation that it comes from.
    """

    shape: Shape
    count: int
    made_by: str
    instruction: str


class CompiledProgram:
    """A compiled program on a mesh, read.

    Attributes:
        text: the scheduled program as XLA prints it.
        mesh: the sizes of the mesh's axes.
        memory: bytes on one device.
        micro_batches: passes in a step; weights may be gathered once in each.
        bounds: what such a step must move at least; None for a program that isn't a training step.
        seconds: how long it took to compile.
        choices: what was chosen where there are several ways, and why, by name.
    """

    def __init__(
        self,
        text: str,
        mesh: Mapping[str, int],
        memory: Memory,
        micro_batches: int = 1,
        bounds: Bounds | None = None,
        seconds: float = 0.0,
        choices: Mapping[str, str] | None = None,
    ) -> None:
        self.text, self.memory, self.micro_batches = text, memory, micro_batches
        self.mesh = MeshShape(dict(mesh))
        self.bounds, self.seconds, self.choices = bounds, seconds, dict(choices or {})

    @cached_property
    def module(self) -> Module:
        return parse(self.text)

    @cached_property
    def collectives(self) -> Sequence[Collective]:
        """Every array that a collective moves."""
        return self._reader.read()

    @cached_property
    def _reader(self) -> CollectiveReader:
        return CollectiveReader(self.module, self.mesh)

    @cached_property
    def repeats(self) -> Sequence[Repeat]:
        """What is moved again though it was there before."""
        return find_repeats(self.collectives, self.micro_batches)

    @cached_property
    def buffers(self) -> Sequence[Buffer]:
        """Every array that a kernel writes, the largest first.

        Views, loops' own tuples and the starts of asynchronous operations write nothing. Those that are never alive at
        the same time share memory, which only `memory.peak` tells.
        """
        found: dict[tuple[Shape, str], list[Instruction]] = {}
        for instruction in self.module.running():
            if instruction.opcode in _WRITE_NOTHING or instruction.opcode.endswith(("-start", "-update")):
                continue
            made_by = self._reader.made_by(instruction)
            for shape in dict.fromkeys(instruction.shapes):
                found.setdefault((shape, made_by), []).append(instruction)
        buffers = [Buffer(shape, len(makers), by, makers[0].name) for (shape, by), makers in found.items()]
        return sorted(buffers, key=lambda buffer: -buffer.shape.nbytes)

    def buffers_with(self, *sizes: int, dtype: str | None = None) -> list[Buffer]:
        """The buffers that have all these sizes among their dimensions, neighbours taken together or not.

        `buffers_with(8192, 8192)` finds `[2,32,8192,8192]`; `buffers_with(16384, 128256)` finds `[2,8192,128256]` too.
        """
        return [
            buffer
            for buffer in self.buffers
            if (dtype is None or buffer.shape.dtype == dtype) and _has_sizes(buffer.shape.dims, sizes)
        ]

    @cached_property
    def kernels(self) -> Mapping[str, int]:
        """Custom calls by target, and Triton kernels by name, with how often they run."""
        found: Counter[str] = Counter()
        for instruction in self.module.running():
            if instruction.opcode == "custom-call":
                found[_kernel_name(instruction)] += self.module.executions[instruction.computation]
        return dict(found.most_common())


_WRITE_NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"} | {
    "constant", "after-all", "opt-barrier", "partition-id", "replica-id",
}  # fmt: skip


def _has_sizes(dims: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether runs of neighbouring dimensions that don't overlap have these sizes, in any order."""
    if not sizes:
        return True
    return any(
        _has_sizes(dims[stop:], [*sizes[:place], *sizes[place + 1 :]])
        for start in range(len(dims))
        for stop in range(start + 1, len(dims) + 1)
        for place, size in enumerate(sizes)
        if math.prod(dims[start:stop]) == size
    )


def _kernel_name(instruction: Instruction) -> str:
    match = re.search(
        r'\bname = "([^"]+)"|"name":"([^"]+)"|kernel_name = "([^"]+)"', instruction.attributes.replace('\\"', '"')
    )
    name = next((part for part in match.groups() if part), "") if match else ""
    target = instruction.custom_call_target
    return f"{target}: {name}" if name else target


def compile_for(config: Config, cluster: ClusterConfig, devices: int) -> CompiledProgram:
    """The train step that `config` runs on so many GPUs of `cluster`, compiled with the flags of a real run.

    Needs JAX's CUDA packages but no GPU; nothing is allocated. No autotuning happens, so kernels of matrix products may
    be others than in a run; what is moved and what is stored are the same.

    Raises:
        ConfigError: no CUDA compiler here, or a config that doesn't fit so many devices.
    """
    return read_step(build(config, compile_only_devices(cluster, devices)), "cuda")


def read_step(program: Program, platform: str) -> CompiledProgram:
    """The program's train step, compiled for the platform of its devices (`cuda`, `cpu`) and read.

    Of a batch ramp, it is the step with the largest batch: that one decides the memory.
    """
    largest = max(program.config.batches.sizes)
    batch = program.batch_of(largest)
    arguments = (program.state, batch, program.abstract_inputs())
    lowered = program.train_step.trace(*arguments).lower(lowering_platforms=(platform,))
    options = compiler_options(runtime.xla_flags(program.config)) if platform == "cuda" else {}
    started = time.perf_counter()
    with without_compile_cache():
        compiled = lowered.compile(compiler_options=options)
    seconds = time.perf_counter() - started
    parts = {"params": program.state["params"], **program.state, "batch": batch, "inputs": arguments[2]}
    return CompiledProgram(
        compiled.as_text(),
        program.mesh.shape,
        read_memory(compiled, {name: _bytes_per_device(tree) for name, tree in parts.items()}),
        micro_batches=program.passes(largest),
        bounds=bounds_of(program),
        seconds=seconds,
        choices=program.layout.choices,
    )


def read_memory(compiled: Any, arguments: Mapping[str, int] | None = None) -> Memory:
    """What `memory_analysis()` of a compiled program says."""
    stats = compiled.memory_analysis()
    given, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    together = given + temporaries + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Memory(
        arguments=dict(arguments) if arguments else {"arguments": given},
        donated=stats.alias_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        temporaries=temporaries,
        peak=getattr(stats, "peak_memory_in_bytes", 0) or together,
    )


def _bytes_per_device(tree: Any) -> int:
    def local(leaf: Any) -> int:
        # A random key has no item size of its own; two words are what JAX's default ones take.
        width = 8 if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf.dtype.itemsize
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * int(width)

    return sum(local(leaf) for leaf in jax.tree.leaves(tree))


def compiler_options(flags: Sequence[str]) -> dict[str, bool | int | str]:
    """XLA flags as options of one compilation; what the user has set in XLA_FLAGS already stays.

    An option must have the type of its flag: `--xla_gpu_x=true` is a bool here, `=1024` a number.
    """
    present = {flag.partition("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    options: dict[str, bool | int | str] = {}
    for flag in flags:
        name, given, value = flag.partition("=")
        if name in present:
            continue
        if value in ("true", "false") or not given:
            options[name.lstrip("-")] = value != "false"
        else:
            options[name.lstrip("-")] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return options
