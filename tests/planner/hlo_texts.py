"""Compiled programs as XLA prints them, cut down to what a test is about."""

HEADER = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->()}\n\n"


def entry(*lines: str) -> str:
    """A program whose only computation has these lines."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"{HEADER}ENTRY %main (p: f32[4]) -> f32[4] {{\n{body}\n}}\n"


NESTED_LOOPS = (
    HEADER
    + """\
%inner_body (p.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %x.1 = f32[8]{0} get-tuple-element(%p.1), index=1
  %psum = f32[8]{0} all-reduce(%x.1), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%i.1, %psum)
}

%inner_condition (p.2: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less.2 = pred[] constant(true)
}

%outer_body (p.3: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.3 = (s32[], f32[8]{0}) parameter(0)
  ROOT %while.3 = (s32[], f32[8]{0}) while(%p.3), condition=%inner_condition, body=%inner_body, \
backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0","step":"1"}}
}

%outer_condition (p.4: (s32[], f32[8])) -> pred[] {
  %p.4 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less.4 = pred[] constant(true)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]{0}) tuple(%zero, %x)
  %while.5 = (s32[], f32[8]{0}) while(%start), condition=%outer_condition, body=%outer_body, \
backend_config={"known_trip_count":{"n":"3"}}
  ROOT %result = f32[8]{0} get-tuple-element(%while.5), index=1
}
"""
)
"""An all-reduce of 8 floats in a loop of 5 in a loop of 3."""

OVERLAP = (
    HEADER
    + """\
%product (l: bf16[8,8], r: bf16[8,8]) -> bf16[8,8] {
  %l = bf16[8,8]{1,0} parameter(0)
  %r = bf16[8,8]{1,0} parameter(1)
  ROOT %dot = bf16[8,8]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%addition (l.1: bf16[8,8], r.1: bf16[8,8]) -> bf16[8,8] {
  %l.1 = bf16[8,8]{1,0} parameter(0)
  %r.1 = bf16[8,8]{1,0} parameter(1)
  ROOT %add = bf16[8,8]{1,0} add(%l.1, %r.1)
}

ENTRY %main (a: bf16[8,8], w: bf16[4,8]) -> bf16[8,8] {
  %a = bf16[8,8]{1,0} parameter(0), metadata={op_name="batch[\\'a\\']"}
  %w = bf16[4,8]{1,0} parameter(1), metadata={op_name="state[\\'params\\'][\\'w\\']"}
  %hidden = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}
  %fusion.1 = bf16[8,8]{1,0} fusion(%a, %a), kind=kCustom, calls=%product
  %hidden.done = bf16[8,8]{1,0} all-gather-done(%hidden)
  %bare = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}
  %fusion.2 = bf16[8,8]{1,0} fusion(%a, %a), kind=kLoop, calls=%addition
  %bare.done = bf16[8,8]{1,0} all-gather-done(%bare)
  %sync = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}, \
backend_config={"collective_backend_config":{"is_sync":true}}
  %fusion.3 = bf16[8,8]{1,0} fusion(%a, %a), kind=kCustom, calls=%product
  %sync.done = bf16[8,8]{1,0} all-gather-done(%sync)
  %library = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}
  %gemm = (bf16[8,8]{1,0}, s8[4194304]{0}) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul"
  %library.done = bf16[8,8]{1,0} all-gather-done(%library)
  ROOT %plain = bf16[8,8]{1,0} all-gather(%w), replica_groups={{0,1}}, dimensions={0}
}
"""
)
"""One weight gathered five times: behind a product, behind an addition, not asynchronously, behind cuBLAS, plainly."""

COMBINED = (
    HEADER
    + """\
ENTRY %main (q: bf16[4,8], k: bf16[2,8]) -> bf16[8,8] {
  %q = bf16[4,8]{1,0} parameter(0), metadata={op_name="state[\\'params\\'][\\'q\\']"}
  %k = f32[2,8]{1,0} parameter(1), metadata={op_name="state[\\'params\\'][\\'k\\']"}
  %small = bf16[2,8]{1,0} convert(%k)
  %start = ((bf16[4,8]{1,0}, bf16[2,8]{1,0}), (bf16[8,8]{1,0}, bf16[4,8]{1,0})) all-gather-start(%q, %small), \
replica_groups=[1,2]<=[2], dimensions={0}
  %done = (bf16[8,8]{1,0}, bf16[4,8]{1,0}) all-gather-done(%start)
  ROOT %first = bf16[8,8]{1,0} get-tuple-element(%done), index=0
}
"""
)
"""Two weights gathered by one instruction."""

ASYNC_WRAPPED = (
    HEADER
    + """\
%wrapped (w.1: f32[4]) -> f32[8] {
  %w.1 = f32[4]{0} parameter(0)
  ROOT %inner = f32[8]{0} all-gather(%w.1), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (w: f32[4]) -> f32[8] {
  %w = f32[4]{0} parameter(0), metadata={op_name="state[\\'params\\'][\\'w\\']"}
  %start = ((f32[4]{0}), f32[8]{0}) async-start(%w), calls=%wrapped
  ROOT %done = f32[8]{0} async-done(%start), calls=%wrapped
}
"""
)
"""A collective wrapped in a computation of its own, as some versions of XLA print asynchronous ones."""
