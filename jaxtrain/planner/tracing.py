"""Where a value of a compiled program comes from, and where it goes: through casts, slices, fusions and loops.

A value is one array: an instruction, and which of its leaves where it yields a tuple.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtrain.planner.hlo import Instruction, Module, Shape

SAME_VALUE = {
    "bitcast",
    "bitcast-convert",
    "convert",
    "copy",
    "dynamic-slice",
    "reduce-precision",
    "reshape",
    "slice",
    "transpose",
}
"""What only changes type, layout, place or extent of its first operand: the thing that is moved stays the same."""

_HANDED_ON = {"all-gather", "collective-permute", "copy-start"}
"""What yields its operands, moved, one by one."""

_SUMMED_ON = {"all-reduce", "all-reduce-start", "reduce-scatter", "reduce-scatter-start"}
"""A gradient that is summed over one mesh axis may be summed over another one next."""

_COMPUTED_ANEW = {"dot", "convolution", "custom-call", "gather", "scatter", "reduce", "reduce-window", "sort"}
_MOVED_TO_HOST = {"MoveToHost", "MoveToDevice", "annotate_device_placement"}


@dataclass(frozen=True)
class Value:
    """One array: leaf `leaf` of what `instruction` yields."""

    instruction: Instruction
    leaf: int = 0

    @property
    def shape(self) -> Shape:
        return self.instruction.shapes[self.leaf]

    @property
    def key(self) -> tuple[str, str, int]:
        """The same for equal values."""
        return self.instruction.computation, self.instruction.name, self.leaf


class Tracer:
    """Follows values through a module."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def operand(self, instruction: Instruction, number: int = 0) -> Value:
        """The value that an instruction reads as its operand `number`."""
        return Value(self._find(instruction.computation, instruction.operands[number]))

    def source(self, value: Value) -> Value:
        """The value that `value` is a cast, copy, slice, reordering or gathering of, as far back as that holds.

        Goes out of fusions and branches, into what loops carry unchanged, and ends at a parameter of the program, or
        where something is computed.
        """
        *_, source = self._way_back(value)
        return source

    def growth(self, value: Value) -> float:
        """How many times as many elements `value` has of its source as the source: gathers on the way add the rest."""
        way, grown = list(self._way_back(value)), 1.0
        for after, before in itertools.pairwise(way):
            if after.instruction.opcode.startswith("all-gather"):
                grown *= after.shape.elements / max(before.shape.elements, 1)
        return grown

    def _way_back(self, value: Value) -> Iterator[Value]:
        step: Value | None = value
        while step is not None:
            yield step
            step = self._before(step)

    def _before(self, value: Value) -> Value | None:
        instruction = value.instruction
        match instruction.opcode:
            case "parameter":
                return self._argument(value)
            case "get-tuple-element":
                operand = self._find(instruction.computation, instruction.operands[0])
                return Value(operand, operand.first_leaf(instruction.index) + value.leaf)
            case "tuple" | "opt-barrier":
                return self._element(instruction, value.leaf)
            case "fusion" | "call" | "async-done":
                return self._inside(value)
            case "while":
                return self._unchanged(instruction, value.leaf)
            case "all-gather-done" | "collective-permute-done" | "copy-done":
                return self.operand(self._find(instruction.computation, instruction.operands[0]), value.leaf)
            case opcode if opcode in _HANDED_ON:
                return self.operand(instruction, value.leaf)
            case opcode if opcode in SAME_VALUE:
                return self.operand(instruction)
            case "custom-call" if instruction.custom_call_target in _MOVED_TO_HOST:
                return self.operand(instruction)
            case _:
                return None

    def _element(self, instruction: Instruction, leaf: int) -> Value | None:
        """The operand that is leaf `leaf` of a tuple."""
        for name in instruction.operands:
            operand = self._find(instruction.computation, name)
            if leaf < len(operand.shapes):
                return Value(operand, leaf)
            leaf -= len(operand.shapes)
        return None

    def _inside(self, value: Value) -> Value | None:
        """What the called computation returns; only where that is again the same as one of the operands."""
        instruction = value.instruction
        if instruction.opcode == "async-done":
            instruction = self._find(instruction.computation, instruction.operands[0])
        name = instruction.calls.get("calls") or instruction.calls.get("to_apply")
        if name is None:
            return None
        root = self.module.computations[name].root
        inner = self._element(root, value.leaf) if root.opcode == "tuple" else Value(root, value.leaf)
        while inner is not None:
            if inner.instruction.opcode == "parameter":
                number = inner.instruction.index
                return Value(self._find(instruction.computation, instruction.operands[number]), inner.leaf)
            inner = self._before(inner)
        return None

    def _argument(self, value: Value) -> Value | None:
        """The value that is passed for a parameter, where it is always the same one."""
        computation = value.instruction.computation
        callers = self.module.callers.get(computation, ())
        if computation == self.module.entry.name or len(callers) != 1:
            return None
        (caller,) = callers
        if caller.opcode == "while":
            return self._unchanged(caller, value.leaf)
        if caller.opcode in ("fusion", "call", "async-start"):
            return Value(self._find(caller.computation, caller.operands[value.instruction.index]), value.leaf)
        if caller.opcode == "conditional":
            roles = [role for role, name in caller.calls.items() if name == computation]
            branch = {"true_computation": 0, "false_computation": 1}
            numbers = [branch.get(role, int(role.rpartition(" ")[2]) if role[-1].isdigit() else 0) for role in roles]
            return Value(self._find(caller.computation, caller.operands[1 + numbers[0]]), value.leaf)
        return None

    def _unchanged(self, loop: Instruction, leaf: int) -> Value | None:
        """The value that a loop is given as leaf `leaf`, where the loop only hands it on."""
        body = self.module.computations[loop.calls["body"]]
        returned = self._element(body.root, leaf) if body.root.opcode == "tuple" else None
        while returned is not None and returned.instruction.opcode in ("get-tuple-element", "copy", "bitcast"):
            if returned.instruction.opcode == "get-tuple-element":
                operand = self._find(body.name, returned.instruction.operands[0])
                if operand.opcode == "parameter":
                    given = Value(self._find(loop.computation, loop.operands[0]), leaf)
                    return given if operand.first_leaf(returned.instruction.index) + returned.leaf == leaf else None
            returned = Value(self._find(body.name, returned.instruction.operands[0]))
        return None

    def _find(self, computation: str, name: str) -> Instruction:
        return self.module.computations[computation].by_name[name]

    def outputs(self, value: Value) -> set[int]:
        """The numbers of the program's outputs that `value` flows into, element by element.

        Only arrays with as many elements as `value`, or which hold it as a slice (what a loop stacks), are followed:
        a norm or a sum that reaches every output says nothing of where the value itself goes.
        """
        found: set[int] = set()
        seen: set[tuple[str, str, int]] = set()
        waiting = [(value, value.shape.elements)]
        while waiting:
            current, elements = waiting.pop()
            if current.key in seen:
                continue
            seen.add(current.key)
            for user in self.module.computations[current.instruction.computation].users.get(
                current.instruction.name, ()
            ):
                if user.opcode == "tuple" and user.is_root and user.computation == self.module.entry.name:
                    found |= set(self._leaves_of(user, current))
                else:
                    waiting += self._after(user, current, elements)
        return found

    def _after(self, user: Instruction, value: Value, elements: int) -> Iterator[tuple[Value, int]]:
        """The values into which `value` goes by way of one of its users."""
        if user.opcode == "get-tuple-element":
            leaf = value.leaf - value.instruction.first_leaf(user.index)
            if 0 <= leaf < len(user.shapes):
                yield Value(user, leaf), elements
        elif user.opcode in ("tuple", "opt-barrier"):
            leaves = self._leaves_of(user, value)
            if user.is_root:
                for leaf in leaves:
                    yield from self._returned(user.computation, leaf, elements)
            for leaf in leaves:
                yield Value(user, leaf), elements
        elif user.opcode in ("fusion", "call", "while"):
            for number, operand in enumerate(user.operands):
                if operand == value.instruction.name:
                    yield from self._into(user, number, value.leaf, elements)
        elif user.opcode in _SUMMED_ON:
            waiting = self.module.computations[user.computation].users.get(user.name, ())
            result = waiting[0] if user.opcode.endswith("-start") and waiting else user
            for number, operand in enumerate(user.operands):
                if operand == value.instruction.name:
                    yield from self._result(Value(result, number), result.shapes[number].elements)
        elif user.opcode == "dynamic-update-slice":
            if user.operands[1] == value.instruction.name:
                yield from self._result(Value(user), user.shapes[0].elements)
            elif user.shapes[0].elements == elements:
                yield from self._result(Value(user), elements)
        elif user.opcode not in _COMPUTED_ANEW and user.shapes and user.shapes[0].elements == elements:
            yield from self._result(Value(user), elements)

    def _result(self, value: Value, elements: int) -> Iterator[tuple[Value, int]]:
        yield value, elements
        if value.instruction.is_root:
            yield from self._returned(value.instruction.computation, value.leaf, elements)

    def _into(self, user: Instruction, number: int, leaf: int, elements: int) -> Iterator[tuple[Value, int]]:
        roles = ("body",) if user.opcode == "while" else ("calls", "to_apply")
        for role in roles:
            if role in user.calls:
                parameter = self.module.computations[user.calls[role]].parameters.get(number)
                if parameter is not None:
                    yield Value(parameter, leaf), elements

    def _returned(self, computation: str, leaf: int, elements: int) -> Iterator[tuple[Value, int]]:
        """Where leaf `leaf` of what a computation returns goes on: to its callers, and round a loop."""
        for caller in self.module.callers.get(computation, ()):
            if caller.opcode in ("fusion", "call", "while") and caller.calls.get("condition") != computation:
                yield from self._result(Value(caller, leaf), elements)
                if caller.opcode == "while":
                    parameter = self.module.computations[computation].parameters[0]
                    yield Value(parameter, leaf), elements

    def _leaves_of(self, user: Instruction, value: Value) -> Sequence[int]:
        """Which leaves of a tuple are `value`."""
        leaves, start = [], 0
        for name in user.operands:
            operand = self._find(user.computation, name)
            if name == value.instruction.name:
                leaves.append(start + value.leaf)
            start += len(operand.shapes)
        return leaves
