import pytest

from jaxtrain.planner.hlo import HloError, Shape, parse, read_shapes
from tests.planner.hlo_texts import HEADER, NESTED_LOOPS, OVERLAP, entry

SHAPES = {
    "a scalar": ("f32[]", [Shape("f32", ())], 4),
    "an array with its layout": ("bf16[2,8192,4096]{2,1,0}", [Shape("bf16", (2, 8192, 4096))], 2 * 2 * 8192 * 4096),
    "a layout with tiles and a memory space": ("f32[8,3]{1,0:T(8,128)S(5)}", [Shape("f32", (8, 3))], 96),
    "nested tuples": (
        "((f32[2]{0}, pred[4]{0}), (s32[], u8[0]{0}))",
        [Shape("f32", (2,)), Shape("pred", (4,)), Shape("s32", ()), Shape("u8", (0,))],
        8 + 4 + 4 + 0,
    ),
    "four bits": ("s4[3]{0}", [Shape("s4", (3,))], 2),
    "eight-bit floats": ("f8e4m3fn[10]{0}", [Shape("f8e4m3fn", (10,))], 10),
    "a token": ("token[]", [Shape("token", ())], 0),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_are_read_with_their_bytes(case: str) -> None:
    text, shapes, nbytes = SHAPES[case]
    assert list(read_shapes(text)) == shapes
    assert sum(shape.nbytes for shape in shapes) == nbytes


def test_an_instruction_is_read_with_all_that_stands_in_its_line() -> None:
    text = entry(
        "%p = f32[4]{0} parameter(0)",
        r"""%call = (f32[4]{0}, /*index=1*/s8[16]{0}) custom-call(%p, f32[4]{0} %p), custom_call_target="a(b", """
        r"""metadata={op_name="state[\'params\'][\'w\']/a, b)" stack_frame_id=7}""",
        "%taken = s8[16]{0} get-tuple-element(%call), index=1",
        'ROOT %text = f32[4]{0} constant({1, 2, 3, ")"})',
    )
    module = parse(text)
    call, taken = (module.entry.by_name[name] for name in ("call", "taken"))
    assert (call.opcode, call.operands, call.widths) == ("custom-call", ("p", "p"), (1, 1))
    assert call.shapes == (Shape("f32", (4,)), Shape("s8", (16,)))
    assert call.custom_call_target == "a(b"
    assert call.op_name == "state['params']['w']/a, b)"
    assert call.stack_frame == 7
    assert (taken.index, taken.operands) == (1, ("call",))
    assert module.entry.root.name == "text"
    assert (module.entry.root.operands, module.entry.root.literal) == ((), '{1, 2, 3, ")"}')


def test_the_first_leaf_of_an_element_counts_the_leaves_before_it() -> None:
    text = entry('ROOT %t = ((f32[2]{0}, f32[3]{0}), f32[4]{0}) custom-call(), custom_call_target="x"')
    root = parse(text).entry.root
    assert [root.first_leaf(element) for element in range(2)] == [0, 2]


def test_loops_multiply_what_runs_inside_them() -> None:
    module = parse(NESTED_LOOPS)
    assert dict(module.executions) == {
        "main": 1, "outer_body": 3, "outer_condition": 4, "inner_body": 15, "inner_condition": 18, "sum": 15,
    }  # fmt: skip
    assert module.unknown_loops == []


def test_a_loop_of_unknown_length_counts_once_and_is_named() -> None:
    module = parse(NESTED_LOOPS.replace('"known_trip_count":{"n":"5"},', ""))
    assert module.executions["inner_body"] == 3
    assert module.unknown_loops == ["while.3"]


def test_each_branch_of_a_conditional_counts() -> None:
    branch = "%{0} (x.{0}: f32[4]) -> f32[4] {{\n  ROOT %x.{0} = f32[4]{{0}} parameter(0)\n}}\n\n"
    main = entry(
        "%p = f32[4]{0} parameter(0)",
        "%i = s32[] constant(0)",
        "ROOT %c = f32[4]{0} conditional(%i, %p, %p, %p), branch_computations={%b0, %b1, %b1}",
    )
    module = parse(HEADER + branch.format("b0") + branch.format("b1") + main.removeprefix(HEADER))
    assert (module.executions["b0"], module.executions["b1"]) == (1, 1)
    assert {computation.name for computation in module.scheduled} == {"main", "b0", "b1"}


def test_what_is_inside_a_fusion_is_not_scheduled() -> None:
    assert [computation.name for computation in parse(OVERLAP).scheduled] == ["main"]


def test_donated_outputs_are_known() -> None:
    text = entry("ROOT %p = f32[4]{0} parameter(0)").replace(
        "is_scheduled=true",
        "is_scheduled=true, input_output_alias={ {0}: (3, {}, may-alias), {1}: (0, {}, must-alias) }",
    )
    assert parse(text).aliases == {0: 3, 1: 0}
    alone = entry("ROOT %p = f32[4]{0} parameter(0)").replace(
        "is_scheduled=true", "is_scheduled=true, input_output_alias={ {}: (2, {}, may-alias) }"
    )
    assert parse(alone).aliases == {0: 2}


FRAMES = """\
FileNames
1 "/x/models/decoder.py"
2 "/x/sharding/layout.py"

FunctionNames
1 "MLP.__call__"
2 "constrain"

FileLocations
1 {file_name_id=1 function_name_id=1 line=11 end_line=11 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=22 end_line=22 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


"""


def test_an_instruction_names_the_python_function_that_it_comes_from() -> None:
    text = entry("ROOT %p = f32[4]{0} negate(%p), metadata={stack_frame_id=2}").replace("ENTRY", FRAMES + "ENTRY")
    module = parse(text)
    assert module.function(module.entry.root) == "constrain"
    assert module.function(module.entry.root, passed_over=["/sharding/"]) == "MLP.__call__"
    assert module.function(module.entry.root, passed_over=["/x/"]) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "doesn't begin with HloModule"),
        ("module @jit_step {}", "doesn't begin with HloModule"),
        (HEADER, "no complete ENTRY"),
        (entry("ROOT %p = f32[4]{0} parameter(0)").removesuffix("}\n"), "no complete ENTRY"),
        (entry("what is this"), "line 4 .* can't be read: what is this"),
        (entry("%p = nothing(0)"), "line 4 .* has no shape"),
        (entry("%p = f32[4]{0} 17"), "line 4 .* has no operation"),
        (entry("%p = f32[4]{0} add(%a"), "never closed"),
    ],
)
def test_what_is_no_compiled_program_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(HloError, match=message):
        parse(text)
