import pytest

from jaxtrain.planner.collectives import CollectiveReader
from jaxtrain.planner.groups import MeshShape
from jaxtrain.planner.hlo import parse
from jaxtrain.planner.tracing import Tracer, Value
from tests.planner.hlo_texts import HEADER, entry

COMPUTATIONS = """\
%sliced (stack: f32[5,8], i: s32[]) -> bf16[8] {
  %stack = f32[5,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,8}
  %small = bf16[1,8]{1,0} convert(%slice)
  ROOT %flat = bf16[8]{0} bitcast(%small)
}

%two_results (a: f32[8], b: f32[8]) -> (f32[8], f32[8]) {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %negative = f32[8]{0} negate(%a)
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%negative, %b)
}

%same (c: f32[8]) -> f32[8] {
  ROOT %c = f32[8]{0} parameter(0)
}

%swapping_body (s: (f32[8], f32[8], f32[8])) -> (f32[8], f32[8], f32[8]) {
  %s = (f32[8]{0}, f32[8]{0}, f32[8]{0}) parameter(0)
  %s.0 = f32[8]{0} get-tuple-element(%s), index=0
  %s.1 = f32[8]{0} get-tuple-element(%s), index=1
  %s.2 = f32[8]{0} get-tuple-element(%s), index=2
  %kept = f32[8]{0} copy(%s.2)
  ROOT %swapped = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%s.1, %s.0, %kept)
}

%forever (f: (f32[8], f32[8], f32[8])) -> pred[] {
  %f = (f32[8]{0}, f32[8]{0}, f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

"""

SOURCES = {
    "a cast slice in a fusion": ("%x = bf16[8]{0} fusion(%stacked, %turn), kind=kLoop, calls=%sliced", "stacked"),
    "what a fusion only hands on": (
        "%f = (f32[8]{0}, f32[8]{0}) fusion(%v, %w), kind=kLoop, calls=%two_results\n"
        "  %x = f32[8]{0} get-tuple-element(%f), index=1", "w",
    ),
    "what a fusion computes": (
        "%f = (f32[8]{0}, f32[8]{0}) fusion(%v, %w), kind=kLoop, calls=%two_results\n"
        "  %x = f32[8]{0} get-tuple-element(%f), index=0", "f",
    ),
    "through a call": ("%x = f32[8]{0} call(%w), to_apply=%same", "w"),
    "through a barrier": (
        "%both = (f32[8]{0}, f32[8]{0}) tuple(%v, %w)\n"
        "  %tied = (f32[8]{0}, f32[8]{0}) opt-barrier(%both)\n"
        "  %x = f32[8]{0} get-tuple-element(%tied), index=1", "w",
    ),
    "through nested tuples": (
        "%pair = (f32[8]{0}, f32[8]{0}) tuple(%v, %v)\n"
        "  %nested = ((f32[8]{0}, f32[8]{0}), f32[8]{0}) tuple(%pair, %w)\n"
        "  %x = f32[8]{0} get-tuple-element(%nested), index=1", "w",
    ),
    "an element of an element": (
        "%pair = (f32[8]{0}, f32[8]{0}) tuple(%v, %w)\n"
        "  %nested = (f32[8]{0}, (f32[8]{0}, f32[8]{0})) tuple(%v, %pair)\n"
        "  %inner = (f32[8]{0}, f32[8]{0}) get-tuple-element(%nested), index=1\n"
        "  %x = f32[8]{0} get-tuple-element(%inner), index=1", "w",
    ),
    "what a loop copies and keeps": (
        "%given = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%v, %v, %w)\n"
        "  %loop = (f32[8]{0}, f32[8]{0}, f32[8]{0}) while(%given), condition=%forever, body=%swapping_body\n"
        "  %x = f32[8]{0} get-tuple-element(%loop), index=2", "w",
    ),
    "what a loop swaps": (
        "%given = (f32[8]{0}, f32[8]{0}, f32[8]{0}) tuple(%v, %w, %w)\n"
        "  %loop = (f32[8]{0}, f32[8]{0}, f32[8]{0}) while(%given), condition=%forever, body=%swapping_body\n"
        "  %x = f32[8]{0} get-tuple-element(%loop), index=1", "loop",
    ),
    "moved to the host and back": (
        '%out = f32[8]{0} custom-call(%w), custom_call_target="MoveToHost"\n'
        '  %x = f32[8]{0} custom-call(%out), custom_call_target="MoveToDevice"', "w",
    ),
    "copied asynchronously": (
        "%start = (f32[8]{0}, f32[8]{0}, u32[]) copy-start(%w)\n  %x = f32[8]{0} copy-done(%start)", "w",
    ),
    "gathered": ("%x = f32[16]{0} all-gather(%w), replica_groups={{0,1}}, dimensions={0}", "w"),
    "summed": ("%x = f32[8]{0} all-reduce(%w), replica_groups={{0,1}}, to_apply=%same", "x"),
    "the sum of two": ("%x = f32[8]{0} add(%v, %w)", "x"),
}  # fmt: skip


def program(lines: str) -> str:
    text = entry(
        "%v = f32[8]{0} parameter(0)",
        "%w = f32[8]{0} parameter(1)",
        "%stacked = f32[5,8]{1,0} parameter(2)",
        "%turn = s32[] parameter(3)",
        lines,
        "ROOT %root = f32[8]{0} copy(%x)",
    )
    return HEADER + COMPUTATIONS + text.removeprefix(HEADER)


@pytest.mark.parametrize("case", SOURCES)
def test_a_value_is_traced_to_where_it_is_computed(case: str) -> None:
    lines, source = SOURCES[case]
    module = parse(program(lines))
    assert Tracer(module).source(Value(module.entry.by_name["x"])).instruction.name == source


def test_inside_a_branch_the_operands_of_the_conditional_are_seen() -> None:
    branch = (
        "%{0} ({1}: f32[8]) -> f32[8] {{\n  %{1} = f32[8]{{0}} parameter(0)\n"
        "  ROOT %n{1} = f32[8]{{0}} negate(%{1})\n}}\n"
    )
    text = program("%x = f32[8]{0} conditional(%turn, %v, %w), branch_computations={%left, %right}")
    module = parse(HEADER + branch.format("left", "l") + branch.format("right", "r") + text.removeprefix(HEADER))
    for computation, parameter, source in (("left", "l", "v"), ("right", "r", "w")):
        value = Value(module.computations[computation].by_name[parameter])
        assert Tracer(module).source(value).instruction.name == source


STEP = (
    HEADER.replace(
        "is_scheduled=true",
        "is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }",
    )
    + """\
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%stacking (all: f32[5,4], one: f32[4], j: s32[]) -> f32[5,4] {
  %all = f32[5,4]{1,0} parameter(0)
  %one = f32[4]{0} parameter(1)
  %j = s32[] parameter(2)
  %o = s32[] constant(0)
  %row = f32[1,4]{1,0} bitcast(%one)
  ROOT %updated = f32[5,4]{1,0} dynamic-update-slice(%all, %row, %j, %o)
}

%body (p: (s32[], f32[5,4], f32[8])) -> (s32[], f32[5,4], f32[8]) {
  %p = (s32[], f32[5,4]{1,0}, f32[8]{0}) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %all.1 = f32[5,4]{1,0} get-tuple-element(%p), index=1
  %x = f32[8]{0} get-tuple-element(%p), index=2
  %scatter = f32[4]{0} reduce-scatter(%x), replica_groups={{0,1},{2,3}}, dimensions={0}, to_apply=%sum
  %across = f32[4]{0} all-reduce(%scatter), replica_groups={{0,2},{1,3}}, to_apply=%sum
  %stacked = f32[5,4]{1,0} fusion(%all.1, %across, %n), kind=kLoop, calls=%stacking
  ROOT %next = (s32[], f32[5,4]{1,0}, f32[8]{0}) tuple(%n, %stacked, %x)
}

%condition (q: (s32[], f32[5,4], f32[8])) -> pred[] {
  %q = (s32[], f32[5,4]{1,0}, f32[8]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%update (w: f32[5,4], m: f32[5,4], g: f32[5,4], s: f32[]) -> (f32[5,4], f32[5,4]) {
  %w = f32[5,4]{1,0} parameter(0)
  %m = f32[5,4]{1,0} parameter(1)
  %g = f32[5,4]{1,0} parameter(2)
  %s = f32[] parameter(3)
  %scale = f32[5,4]{1,0} broadcast(%s), dimensions={}
  %clipped = f32[5,4]{1,0} multiply(%g, %scale)
  %moment = f32[5,4]{1,0} add(%m, %clipped)
  %weight = f32[5,4]{1,0} subtract(%w, %moment)
  ROOT %new = (f32[5,4]{1,0}, f32[5,4]{1,0}) tuple(%weight, %moment)
}

%norm (h: f32[5,4]) -> f32[] {
  %h = f32[5,4]{1,0} parameter(0)
  %none = f32[] constant(0)
  ROOT %length = f32[] reduce(%h, %none), dimensions={0,1}, to_apply=%sum
}

ENTRY %main (w: f32[5,4], m: f32[5,4], other: f32[8]) -> (f32[5,4], f32[5,4], f32[]) {
  %w = f32[5,4]{1,0} parameter(0), metadata={op_name="state[\\'params\\'][\\'layers\\'][\\'w\\']"}
  %m = f32[5,4]{1,0} parameter(1), metadata={op_name="state[\\'optimizer\\'][\\'adam\\'].mu[\\'layers\\'][\\'w\\']"}
  %other = f32[8]{0} parameter(2)
  %product = f32[8]{0} negate(%other)
  %zero = s32[] constant(0)
  %zeros = f32[5,4]{1,0} broadcast(%zero), dimensions={}
  %begin = (s32[], f32[5,4]{1,0}, f32[8]{0}) tuple(%zero, %zeros, %product)
  %loop = (s32[], f32[5,4]{1,0}, f32[8]{0}) while(%begin), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %gradient = f32[5,4]{1,0} get-tuple-element(%loop), index=1
  %size = f32[] fusion(%gradient), kind=kInput, calls=%norm
  %updated = (f32[5,4]{1,0}, f32[5,4]{1,0}) fusion(%w, %m, %gradient, %size), kind=kLoop, calls=%update
  %weights = f32[5,4]{1,0} get-tuple-element(%updated), index=0
  %moments = f32[5,4]{1,0} get-tuple-element(%updated), index=1
  ROOT %result = (f32[5,4]{1,0}, f32[5,4]{1,0}, f32[]) tuple(%weights, %moments, %size)
}
"""
)
"""Gradients scattered and summed in a loop that stacks them, then a norm, then an update of weight and moment."""


def test_a_gradient_is_followed_through_sums_stacks_and_updates_to_the_parameter_that_it_changes() -> None:
    module = parse(STEP)
    scatter = module.computations["body"].by_name["scatter"]
    assert Tracer(module).outputs(Value(scatter)) == {0, 1}, "the norm, output 2, is no longer the gradient"
    collectives = CollectiveReader(module, MeshShape({"data": 2, "fsdp": 2})).read()
    assert [(c.kind, c.axes, c.moved) for c in collectives] == [
        ("reduce-scatter", ("fsdp",), "gradient of layers.w"),
        ("all-reduce", ("data",), "gradient of layers.w"),
    ]


def test_without_a_moment_beside_it_an_output_is_no_gradient() -> None:
    """A value that becomes one output alone may be anything, such as a running mean."""
    alone = STEP.replace("{0}: (0, {}, may-alias), ", "")
    collectives = CollectiveReader(parse(alone), MeshShape({"data": 2, "fsdp": 2})).read()
    assert not any("gradient" in collective.moved for collective in collectives)
