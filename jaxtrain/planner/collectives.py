"""Every collective of a compiled program: what it moves, along which mesh axes, how much, and behind what.

Bytes are those of one device in one call of the program: the larger of operand and result, times how often it runs.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from jaxtrain.planner.groups import MeshShape, read_groups
from jaxtrain.planner.hlo import Computation, Instruction, Module, Shape
from jaxtrain.planner.tracing import Tracer, Value

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
Pass = Literal["forward", "backward", "update"]

MATRIX_KERNELS = re.compile(r"cublas|cudnn|matmul|gemm|conv(?!ert)|triton", re.IGNORECASE)
"""Targets of custom calls that multiply matrices; a Triton kernel is taken for one, since attention is."""

LIBRARIES = ("/sharding/", "/jax/", "/flax/", "/optax/")
"""Python files whose functions say nothing of what is computed; their caller does."""

HELPERS = (*LIBRARIES, "/ops/")
"""The same for what is moved: operations know how, the model that calls them knows what."""


@dataclass(frozen=True)
class Collective:
    """One array that a collective moves; a combined collective gives one for each array.

    Attributes:
        instruction: the name in the program; combined ones share it.
        axes: the mesh axes along which the devices of a group differ, outermost first.
        devices: the size of a group.
        moved: what it is: `params.layers.mlp.up`, `gradient of params.…`, or the function that computed it.
        part_of: the pass that it belongs to.
        operand, result: shapes on one device.
        executions: how often it runs in one call of the program.
        is_async: something else may run while it does.
        behind: the matrix product that runs while it does, by name; empty if none.
        origin: a name for the value that is moved, the same for equal values.
        times: how often the whole of that value is moved by it: 32 slices of a stack in 32 turns are once.
    """

    instruction: str
    kind: str
    axes: tuple[str, ...]
    devices: int
    moved: str
    part_of: Pass
    operand: Shape
    result: Shape
    executions: int
    is_async: bool
    behind: str
    origin: str
    times: float
    op_name: str

    @property
    def bytes_each(self) -> int:
        """Bytes of one execution: the larger of operand and result."""
        return max(self.operand.nbytes, self.result.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all executions."""
        return self.bytes_each * self.executions

    @property
    def is_hidden(self) -> bool:
        """Whether a matrix product runs while it does."""
        return bool(self.behind)


@dataclass(frozen=True)
class Repeat:
    """One value that is moved in the same way more often than once in a pass (and micro-batch).

    Attributes:
        times: how often the whole value is moved.
        nbytes: bytes of what goes beyond `needed` times.
    """

    moved: str
    kind: str
    axes: tuple[str, ...]
    part_of: Pass
    times: float
    needed: int
    nbytes: int
    instructions: tuple[str, ...]


def find_repeats(collectives: Sequence[Collective], needed: int = 1) -> list[Repeat]:
    """What is moved again: the same value by the same kind along the same axes, more than `needed` times in a pass.

    The same value: equal up to casts, slices, copies and layout. A weight that is gathered once for the forward and
    once for the backward pass is no repeat; gathered twice in one of them, or in every turn of a loop that doesn't
    change it, it is.
    `needed` is the number of micro-batches, where weights are gathered for each.
    """
    groups: dict[tuple[str, str, tuple[str, ...], Pass], list[Collective]] = defaultdict(list)
    for collective in collectives:
        groups[collective.origin, collective.kind, collective.axes, collective.part_of].append(collective)
    repeats = []
    for (_, kind, axes, part_of), members in groups.items():
        times = sum(member.times for member in members)
        if times > needed + 0.01:
            nbytes = round(sum(member.nbytes for member in members) * (1 - needed / times))
            names = tuple(member.instruction for member in members)
            repeats.append(Repeat(members[0].moved, kind, axes, part_of, times, needed, nbytes, names))
    return sorted(repeats, key=lambda repeat: -repeat.nbytes)


class CollectiveReader:
    """Reads the collectives of one module that runs on one mesh."""

    def __init__(self, module: Module, mesh: MeshShape) -> None:
        self.module, self.mesh = module, mesh
        self.tracer = Tracer(module)

    def read(self) -> list[Collective]:
        """All collectives that move something, in the order in which they stand."""
        found: list[Collective] = []
        for computation in self.module.scheduled:
            for instruction in computation.instructions:
                kind = self._kind(instruction)
                if kind is not None and self.module.executions[computation.name]:
                    found += self._collectives(computation, instruction, kind)
        return found

    def _kind(self, instruction: Instruction) -> str | None:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "async":
            inner = (i.opcode for i in self.module.computations[instruction.calls["calls"]].instructions)
            return next((opcode for opcode in inner if opcode in KINDS), None)
        return opcode if opcode in KINDS else None

    def _collectives(self, computation: Computation, start: Instruction, kind: str) -> Iterator[Collective]:
        done = self._done(computation, start)
        inner = start
        if start.opcode == "async-start":
            inner = next(i for i in self.module.computations[start.calls["calls"]].instructions if i.opcode == kind)
        groups = read_groups(inner.attributes, self.mesh.devices)
        if groups.shape[1] == 1:  # a device alone: nothing is moved
            return
        is_async = done is not start and '"is_sync":true' not in start.attributes
        behind = self._matrix_product_between(computation, start, done) if is_async else ""
        part_of = self._pass(start)
        parts = self._parts(start, done, kind)
        for leaf, operand, result in parts:
            origin = self.tracer.source(operand)
            yield Collective(
                instruction=start.name,
                kind=kind,
                axes=self.mesh.axes_of(groups),
                devices=groups.shape[1],
                moved=self._moved(origin, Value(done, leaf), kind),
                part_of=part_of,
                operand=operand.shape,
                result=result,
                executions=self.module.executions[computation.name],
                is_async=is_async,
                behind=behind,
                origin="/".join(map(str, origin.key)),
                times=self._times(operand, origin),
                op_name=start.op_name,
            )

    def _parts(self, start: Instruction, done: Instruction, kind: str) -> list[tuple[int, Value, Shape]]:
        """(leaf of the result, operand, shape of the result) of each array that is moved.

        An all-to-all over a tuple has one operand for each device: together they are one array.
        """
        operands = [self.tracer.operand(start, number) for number in range(len(start.operands))]
        if kind == "collective-permute" and len(operands) > 1:  # in place: input, output, and two index tuples
            operands = operands[:1]
        results = list(done.shapes)
        if kind.endswith("all-to-all") and len(operands) > 1:
            whole = Shape(results[0].dtype, (len(results), *results[0].dims))
            return [(0, operands[0], whole)]
        if done is start and len(results) > len(operands):
            results = results[-len(operands) :]
        return [(leaf, operand, result) for leaf, (operand, result) in enumerate(zip(operands, results, strict=False))]

    def _done(self, computation: Computation, start: Instruction) -> Instruction:
        """What waits for the result; the instruction itself where it is not split in two."""
        if not start.opcode.endswith("-start"):
            return start
        waiting = (user for user in computation.users.get(start.name, ()) if user.opcode.endswith(("-done", "-update")))
        done = next(waiting, start)
        while done.opcode.endswith("-update"):
            done = computation.users[done.name][0]
        return done

    def _matrix_product_between(self, computation: Computation, start: Instruction, done: Instruction) -> str:
        """The first matrix product in the schedule between the two, by name; empty if there is none."""
        first, last = computation.position[start.name], computation.position[done.name]
        between = computation.instructions[first + 1 : last]
        return next((i.name for i in between if self._multiplies(i)), "")

    def _multiplies(self, instruction: Instruction) -> bool:
        return _is_matrix_product(instruction) or any(name in self.multiplying for name in instruction.calls.values())

    @cached_property
    def multiplying(self) -> set[str]:
        """The computations in which, or below which, matrices are multiplied."""
        found: set[str] = set()
        waiting = [
            name
            for name, computation in self.module.computations.items()
            if any(_is_matrix_product(instruction) for instruction in computation.instructions)
        ]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += [caller.computation for caller in self.module.callers.get(name, ())]
        return found

    def _pass(self, instruction: Instruction) -> Pass:
        """Which pass an instruction belongs to: by its own name, or else by that of the loop that it is in."""
        name = instruction.op_name
        callers = self.module.callers.get(instruction.computation, ())
        while "jvp(" not in name and callers:
            name = callers[0].op_name
            callers = self.module.callers.get(callers[0].computation, ())
        return "backward" if "transpose(" in name else "forward" if "jvp(" in name else "update"

    def _times(self, operand: Value, origin: Value) -> float:
        """How often the whole of `origin`, as it lies on a device, is moved by all executions together."""
        turns = self.module.executions[operand.instruction.computation]
        made = max(self.module.executions[origin.instruction.computation], 1)
        whole = max(origin.shape.elements, 1) * self.tracer.growth(operand)
        return operand.shape.elements * turns / (whole * made)

    def _moved(self, origin: Value, result: Value, kind: str) -> str:
        if origin.instruction.opcode == "parameter" and origin.instruction.computation == self.module.entry.name:
            return readable(origin.instruction.op_name)
        if kind in ("reduce-scatter", "all-reduce"):
            names = {self._output_name(number) for number in self.tracer.outputs(result)} - {""}
            leaves = {self._leaf(name) for name in names}
            if len(leaves) == 1 and len(names) > 1:
                return f"gradient of {leaves.pop()}"
        return self._computed_by(origin.instruction)

    @cached_property
    def _parameters(self) -> list[str]:
        """The paths of all parameters, such as `layers.mlp.up`, the longest first."""
        names = (readable(parameter.op_name) for parameter in self.module.entry.parameters.values())
        paths = [name.removeprefix("params.") for name in names if name.startswith("params.")]
        return sorted(paths, key=len, reverse=True)

    def _leaf(self, name: str) -> str:
        """The parameter that a leaf of the state belongs to: `embed.table` of `optimizer.adam.mu.embed.table`."""
        return next((path for path in self._parameters if f".{name}".endswith(f".{path}")), name)

    def _computed_by(self, instruction: Instruction) -> str:
        """A name for what the program computes itself: the function and operation that wrote it."""
        callers = self.module.callers.get(instruction.computation, ())
        loop = callers[0] if instruction.opcode == "parameter" and callers else instruction
        if loop.opcode == "while":
            function = self.module.function(loop, HELPERS)
            return f"{function}: carried by a loop" if function else "carried by a loop"
        return self.made_by(self._named(instruction), HELPERS)

    def _named(self, instruction: Instruction) -> Instruction:
        """The first instruction with a name: itself, the last step inside of it, or what it reads first."""
        seen: set[str] = set()
        computation = self.module.computations[instruction.computation]
        while not instruction.op_name and instruction.name not in seen:
            seen.add(instruction.name)
            inside = self.module.computations.get(instruction.calls.get("calls", ""))
            steps = reversed(inside.instructions) if inside is not None else ()
            if step := next((step for step in steps if step.op_name), None):
                return step
            if instruction.operands:
                instruction = computation.by_name[instruction.operands[0]]
        return instruction

    def made_by(self, instruction: Instruction, passed_over: Sequence[str] = LIBRARIES) -> str:
        """The Python function and operation that an instruction comes from, without the functions of helpers."""
        function = self.module.function(instruction, passed_over).replace(".<locals>", "")
        operation = instruction.op_name.rpartition("/")[2] or instruction.opcode
        return f"{function}: {operation}" if function else operation

    def _output_name(self, number: int) -> str:
        parameter = self.module.entry.parameters.get(self.module.aliases.get(number, -1))
        return readable(parameter.op_name) if parameter else ""


def _is_matrix_product(instruction: Instruction) -> bool:
    if instruction.opcode == "custom-call":
        return bool(MATRIX_KERNELS.search(instruction.custom_call_target))
    return instruction.opcode in ("dot", "convolution")


def readable(name: str) -> str:
    """`state['optimizer']['adam'].mu['embed']['table']` as `optimizer.adam.mu.embed.table`."""
    return re.sub(r"\['?([^']*?)'?\]", r".\1", name).removeprefix("state.")


def total(collectives: Sequence[Collective]) -> int:
    """Bytes of all of them."""
    return sum(collective.nbytes for collective in collectives)


def hidden_share(collectives: Sequence[Collective]) -> float:
    """The share of bytes that move behind a matrix product; 1 where nothing moves."""
    everything = total(collectives)
    return total([c for c in collectives if c.is_hidden]) / everything if everything else 1.0


def by_axes(collectives: Sequence[Collective]) -> Mapping[tuple[str, ...], list[Collective]]:
    """The collectives of each set of mesh axes, the largest total first."""
    found: dict[tuple[str, ...], list[Collective]] = defaultdict(list)
    for collective in collectives:
        found[collective.axes].append(collective)
    return dict(sorted(found.items(), key=lambda item: -total(item[1])))
