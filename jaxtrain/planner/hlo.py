"""The text of a compiled program (scheduled HLO), read: computations, instructions, shapes, who calls whom how often.

The grammar is the one that XLA prints: `name = shape opcode(operands), attributes`, one instruction a line. What is
read here is public (`compiled.as_text()`), so it holds for every backend; what a backend alone prints is optional.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxtrain.errors import JaxtrainError


class HloError(JaxtrainError):
    """The text isn't a compiled program as XLA prints it."""


@dataclass(frozen=True)
class Shape:
    """One array on one device: its element type as XLA writes it (`bf16`) and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes, packed types (s4) included."""
        return -(-self.elements * _bits(self.dtype) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def _bits(dtype: str) -> int:
    """The width of an element type; tokens and opaque values have none."""
    if dtype == "pred":
        return 8
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match[1]) if match else 0


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation.

    Attributes:
        shapes: what it yields: one array, or the leaves of a tuple from left to right.
        widths: of a tuple, how many leaves each of its elements has; empty for an array.
        operands: names of instructions in the same computation.
        attributes: everything after the operands, as printed.
        literal: what stands between the parentheses: a parameter's number, a constant's value.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    widths: tuple[int, ...]
    operands: tuple[str, ...]
    attributes: str
    literal: str
    computation: str
    is_root: bool

    @cached_property
    def op_name(self) -> str:
        """Where it comes from in the traced program, such as `jit(step)/while/body/dot_general`; empty if unknown."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", match[1]) if match else ""

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs; None where the compiler doesn't know."""
        match = re.search(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(match[1]) if match else None

    @property
    def share(self) -> tuple[int, int] | None:
        """Of a loop that stands for a condition: in how many of how many turns it holds, as its name tells.

        `jit(step)/while/body/forward_8_of_14/while` holds in 8 of the 14 turns of the loop around it.
        """
        match = re.search(r"_(\d+)_of_(\d+)/while$", self.op_name)
        return (int(match[1]), int(match[2])) if match and self.opcode == "while" else None

    @property
    def index(self) -> int:
        """Which element of its operand a `get-tuple-element` takes, or the number of a `parameter`."""
        match = re.search(r"\bindex=(\d+)", self.attributes)
        return int(self.literal) if self.opcode == "parameter" else int(match[1]) if match else 0

    def first_leaf(self, element: int) -> int:
        """The number of the first leaf of element `element` of the tuple that it yields."""
        return sum(self.widths[:element])

    @property
    def stack_frame(self) -> int | None:
        match = re.search(r"\bstack_frame_id=(\d+)", self.attributes)
        return int(match[1]) if match else None

    @property
    def custom_call_target(self) -> str:
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @cached_property
    def calls(self) -> Mapping[str, str]:
        """The computations it runs, by role: `body`, `condition`, `calls`, `to_apply`, `branch 0`, …"""
        roles = {match[1]: match[2] for match in _CALL.finditer(self.attributes)}
        if match := re.search(r"branch_computations=\{([^}]*)\}", self.attributes):
            names = [name.strip().lstrip("%") for name in match[1].split(",")]
            roles |= {f"branch {i}": name for i, name in enumerate(names)}
        return roles


_CALL = re.compile(r"\b(body|condition|calls|to_apply|true_computation|false_computation|async_wrapped)=%?([\w.\-]+)")


@dataclass(frozen=True, eq=False)
class Computation:
    """A named list of instructions, in the order in which they run where the module is scheduled."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Each instruction's place in the schedule."""
        return {instruction.name: place for place, instruction in enumerate(self.instructions)}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        return {i.index: i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        """The instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


@dataclass(frozen=True, eq=False)
class Module:
    """A compiled program.

    Attributes:
        aliases: output number -> parameter number whose memory it takes (donated buffers).
        unknown_loops: names of loops whose length the compiler doesn't know; they are counted once.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    aliases: Mapping[int, int]
    frames: Mapping[int, "Frame"] = field(default_factory=dict)

    @cached_property
    def callers(self) -> Mapping[str, Sequence[Instruction]]:
        """The instructions that run each computation."""
        found: dict[str, list[Instruction]] = {}
        for computation in self.computations.values():
            for instruction in computation.instructions:
                for name in dict.fromkeys(instruction.calls.values()):
                    found.setdefault(name, []).append(instruction)
        return found

    @cached_property
    def executions(self) -> Mapping[str, int]:
        """How often each computation runs in one call of the program; each branch of a conditional counts."""
        counts = {self.entry.name: 1}

        def count(name: str) -> int:
            if name not in counts:
                counts[name] = 0  # a computation never calls itself
                counts[name] = sum(
                    self._runs(caller, name, count(caller.computation)) for caller in self.callers.get(name, ())
                )
            return counts[name]

        for name in self.computations:
            count(name)
        return counts

    @staticmethod
    def _runs(caller: Instruction, name: str, turns: int) -> int:
        """How often a caller that is reached so many times runs a computation."""
        if caller.opcode != "while":
            return turns
        is_body = caller.calls.get("body") == name
        if caller.trip_count is None and caller.share is not None:
            held, of = caller.share
            return -(-turns * held // of) + (0 if is_body else turns)
        trips = 1 if caller.trip_count is None else caller.trip_count
        return turns * (trips if is_body else trips + 1)

    @cached_property
    def unknown_loops(self) -> Sequence[str]:
        """Loops that run, whose length the compiler doesn't know: they are counted once."""
        return [i.name for i in self.running() if i.opcode == "while" and i.trip_count is None and i.share is None]

    @cached_property
    def scheduled(self) -> Sequence[Computation]:
        """The computations whose instructions run one after the other: the entry, loop bodies, branches, calls.

        What a fusion, a reduction or a wrapped asynchronous operation holds inside is one kernel.
        """
        names: dict[str, None] = {}
        waiting = [self.entry.name]
        while waiting:
            name = waiting.pop()
            if name in names:
                continue
            names[name] = None
            for instruction in self.computations[name].instructions:
                if instruction.opcode in ("while", "conditional", "call"):
                    waiting += instruction.calls.values()
        return [self.computations[name] for name in names]

    def running(self) -> Iterator[Instruction]:
        """All instructions of the scheduled computations."""
        for computation in self.scheduled:
            yield from computation.instructions

    def function(self, instruction: Instruction, passed_over: Sequence[str] = ()) -> str:
        """The Python function that traced it, such as `GatedMLP.__call__`; empty if unknown.

        Functions in files whose path holds one of `passed_over` are helpers: their caller is named.
        """
        number, seen = instruction.stack_frame, set[int]()
        while number is not None and number in self.frames and number not in seen:
            seen.add(number)
            frame = self.frames[number]
            if not any(part in frame.file for part in passed_over):
                return frame.function
            number = frame.parent
        return ""


@dataclass(frozen=True)
class Frame:
    """A line of the Python program: a call in it, or the operation itself; `parent` called this function."""

    file: str
    function: str
    line: int
    parent: int


def parse(text: str) -> Module:
    """Reads what `compiled.as_text()` gives.

    Raises:
        HloError: no module, or a line that can't be read.
    """
    lines = text.splitlines()
    if not lines or not lines[0].startswith("HloModule"):
        raise HloError("this is no text of a compiled program: it doesn't begin with HloModule")
    computations: dict[str, Computation] = {}
    entry = None
    body: list[Instruction] = []
    name = ""
    for number, line in enumerate(lines[1:], start=2):
        if name and line.startswith("}"):
            computations[name], body, name = Computation(name, tuple(body)), [], ""
        elif name and line.strip():
            body.append(_instruction(line, name, number))
        elif match := _HEADER.match(line):
            name = match["name"]
            entry = name if match["entry"] else entry
    if entry is None or entry not in computations:
        raise HloError("the text of the compiled program has no complete ENTRY computation")
    return Module(computations, computations[entry], _aliases(lines[0]), _frames(lines))


_HEADER = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .*\{\s*$")
_COMMENT = re.compile(r"/\*.*?\*/")
_NAME = re.compile(r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<=?\s]*)\](?:\{[^{}]*\})?")
_OPCODE = re.compile(r"\s*(?P<opcode>[a-z][\w\-]*)\(")


def _instruction(line: str, computation: str, number: int) -> Instruction:
    line = _COMMENT.sub("", line)
    head = _NAME.match(line)
    if head is None:
        raise HloError(f"line {number} of the compiled program can't be read: {line.strip()[:100]}")
    shape_end = _closing(line, head.end()) + 1 if line[head.end()] == "(" else _array_end(line, head.end(), number)
    opcode = _OPCODE.match(line, shape_end)
    if opcode is None:
        raise HloError(f"line {number} of the compiled program has no operation: {line.strip()[:100]}")
    end = _closing(line, opcode.end() - 1)
    inside = line[opcode.end() : end]
    shape = line[head.end() : shape_end]
    is_leaf = opcode["opcode"] in ("parameter", "constant")
    return Instruction(
        name=head["name"],
        opcode=opcode["opcode"],
        shapes=read_shapes(shape),
        widths=tuple(len(read_shapes(part)) for part in _split(shape[1:-1])) if shape.startswith("(") else (),
        operands=() if is_leaf else tuple(_operand(part) for part in _split(inside) if part.strip()),
        attributes=line[end + 1 :],
        literal=inside if is_leaf else "",
        computation=computation,
        is_root=head["root"] is not None,
    )


def read_shapes(text: str) -> tuple[Shape, ...]:
    """The arrays in a printed shape, from left to right, tuples flattened: `(f32[2]{0}, bf16[3,4]{1,0})`."""
    return tuple(Shape(match["dtype"], _dims(match["dims"])) for match in _ARRAY.finditer(text))


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size.strip(" <=?")) for size in text.split(",") if size.strip())


def _array_end(line: str, start: int, number: int) -> int:
    match = _ARRAY.match(line, start)
    if match is None:
        raise HloError(f"line {number} of the compiled program has no shape: {line.strip()[:100]}")
    return match.end()


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` is closed; quoted text doesn't count."""
    depth, quoted, place = 0, False, start
    while place < len(text):
        character = text[place]
        if quoted:
            place += character == "\\"
            quoted = character != '"'
        elif character == '"':
            quoted = True
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0:
                return place
        place += 1
    raise HloError(f"a bracket is never closed in the compiled program: {text.strip()[:100]}")


def _split(text: str) -> Iterator[str]:
    """The parts between commas that stand in no bracket."""
    depth, start = 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            yield text[start:place]
            start = place + 1
    yield text[start:]


def _operand(text: str) -> str:
    """The name in an operand, which may be printed with its shape before it."""
    return text.split()[-1].lstrip("%")


def _aliases(header: str) -> Mapping[int, int]:
    found = re.search(r"input_output_alias=\{(.*?\)) \}", header)
    pairs = re.findall(r"\{(\d*)\}: \((\d+),", found[1]) if found else []
    return {int(output or 0): int(parameter) for output, parameter in pairs}


def _frames(lines: Sequence[str]) -> Mapping[int, Frame]:
    """The tables in front of the computations that say which Python line an instruction comes from."""
    tables: dict[str, dict[int, str]] = {}
    table: dict[int, str] = {}
    for line in lines[1:]:
        if _HEADER.match(line):
            break
        if match := re.fullmatch(r"(FileNames|FunctionNames|FileLocations|StackFrames)", line.strip()):
            table = tables.setdefault(match[1], {})
        elif match := re.match(r"(\d+) (.*)", line):
            table[int(match[1])] = match[2].strip().strip('"')
    found = {}
    for number, text in tables.get("StackFrames", {}).items():
        frame = _numbers(text)
        place = _numbers(tables.get("FileLocations", {}).get(frame.get("file_location_id", 0), ""))
        file = tables.get("FileNames", {}).get(place.get("file_name_id", 0), "")
        function = tables.get("FunctionNames", {}).get(place.get("function_name_id", 0), "")
        # XLA prints the parent's number plus one: a frame that nobody called has 1.
        found[number] = Frame(file, function, place.get("line", 0), frame.get("parent_frame_id", 1) - 1)
    return found


def _numbers(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}
