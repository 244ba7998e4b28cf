from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.planner import Collective, by_axes, find_repeats, hidden_share, total
from jaxtrain.planner.collectives import CollectiveReader, readable
from jaxtrain.planner.groups import MeshShape
from jaxtrain.planner.hlo import Shape, parse
from tests.planner.hlo_texts import ASYNC_WRAPPED, COMBINED, NESTED_LOOPS, OVERLAP
from tests.planner.programs import PLATFORMS, read, totals

KIB = 1024


def collectives(text: str, **mesh: int) -> dict[str, Collective]:
    return {f"{c.instruction} {c.moved}".strip(): c for c in CollectiveReader(parse(text), MeshShape(mesh)).read()}


def gathered(x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, "fsdp", axis=0, tiled=True)


ONE_COLLECTIVE: dict[str, tuple[Callable[[Any], Any], P, P, tuple[str, tuple[str, ...]], int]] = {
    # name: function, in_spec, out_spec of x f32[64, 256], (kind, axes), bytes: the larger of operand and result
    "all-gather": (gathered, P("fsdp"), P(), ("all-gather", ("fsdp",)), 64 * KIB),
    "all-reduce": (lambda x: jax.lax.psum(x, "data"), P("data"), P(), ("all-reduce", ("data",)), 32 * KIB),
    "all-reduce over both axes": (
        lambda x: jax.lax.psum(x, ("data", "fsdp")),
        P(("data", "fsdp")), P(), ("all-reduce", ("data", "fsdp")), 8 * KIB,
    ),
    "reduce-scatter": (
        lambda x: jax.lax.psum_scatter(x, "fsdp", scatter_dimension=1, tiled=True),
        P("data"), P("data", "fsdp"), ("reduce-scatter", ("fsdp",)), 32 * KIB,
    ),
    "all-to-all": (
        lambda x: jax.lax.all_to_all(x, "fsdp", split_axis=1, concat_axis=0, tiled=True),
        P("fsdp"), P(None, "fsdp"), ("all-to-all", ("fsdp",)), 16 * KIB,
    ),
    "a ring": (
        lambda x: jax.lax.ppermute(x, "fsdp", [(i, (i + 1) % 4) for i in range(4)]),
        P("fsdp"), P("fsdp"), ("collective-permute", ("fsdp",)), 16 * KIB,
    ),
}  # fmt: skip


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("case", ONE_COLLECTIVE)
def test_one_collective_is_found_with_kind_axes_and_bytes(case: str, platform: str) -> None:
    function, in_spec, out_spec, key, nbytes = ONE_COLLECTIVE[case]
    program = read(platform, function, [in_spec], out_spec, x=(64, 256))
    assert totals(program) == {key: nbytes}
    (collective,) = program.collectives
    assert collective.moved == "x"
    assert collective.devices == (2 if case in ("a ring", "all-reduce") else 4 if "fsdp" in key[1][0] else 8)


def layers_of_weights(x: jax.Array, w: jax.Array) -> jax.Array:
    """Five layers, three times over: each gathers its slice of the stacked weights."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ gathered(w)), None

    def sweep(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.psum(jax.lax.scan(layer, x, w)[0], "data"), None

    return jax.lax.scan(sweep, x, None, length=3)[0]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_nested_loops_multiply_and_slices_of_a_stack_are_traced_to_it(platform: str) -> None:
    program = read(platform, layers_of_weights, [P("data"), P(None, "fsdp")], P("data"), x=(64, 256), w=(5, 256, 256))
    assert totals(program) == {
        ("all-gather", ("fsdp",)): 15 * 256 * KIB,
        ("all-reduce", ("data",)): 3 * 32 * KIB,
    }
    (gather,) = (c for c in program.collectives if c.kind == "all-gather")
    assert (gather.moved, gather.executions, gather.times) == ("w", 15, 3.0)
    assert (gather.operand, gather.result) == (Shape("f32", (64, 256)), Shape("f32", (256, 256)))
    (repeat,) = program.repeats
    assert (repeat.moved, repeat.times, repeat.nbytes) == ("w", 3.0, 10 * 256 * KIB)
    assert find_repeats(program.collectives, needed=3) == []
    assert {axes: total(members) for axes, members in by_axes(program.collectives).items()} == {
        ("fsdp",): 15 * 256 * KIB,
        ("data",): 3 * 32 * KIB,
    }


def gathered_in_every_turn(x: jax.Array, head: jax.Array) -> jax.Array:
    def chunk(total: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        # The barrier stands for what keeps a compiler from moving the gather out of the loop.
        tied, x = jax.lax.optimization_barrier((head, x))
        return total + (x @ gathered(tied)).sum(), None

    return jax.lax.scan(chunk, jnp.zeros(()), x.reshape(4, -1, 256))[0]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_value_that_a_loop_never_changes_is_gathered_again_in_every_turn(platform: str) -> None:
    program = read(platform, gathered_in_every_turn, [P(), P("fsdp")], P(), x=(64, 256), head=(256, 256))
    (repeat,) = program.repeats
    assert (repeat.moved, repeat.kind, repeat.times, repeat.needed) == ("head", "all-gather", 4.0, 1)
    assert repeat.nbytes == 3 * 256 * KIB


def gathered_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    first = jnp.tanh(x @ gathered(w).astype(jnp.bfloat16))
    again, first = jax.lax.optimization_barrier((w, first))
    return first @ gathered(again.astype(jnp.bfloat16)).T


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_weight_gathered_in_two_types_is_the_same_weight_twice(platform: str) -> None:
    program = read(platform, gathered_twice, [P("data"), P("fsdp")], P("data"), x=(64, 256), w=(256, 256))
    assert {c.moved for c in program.collectives} == {"w"}
    assert [(repeat.moved, repeat.times) for repeat in program.repeats] == [("w", 2.0)]


def test_a_collective_that_is_wrapped_in_a_computation_is_read_in_it() -> None:
    (gather,) = collectives(ASYNC_WRAPPED, fsdp=2).values()
    assert (gather.kind, gather.axes, gather.moved, gather.nbytes) == ("all-gather", ("fsdp",), "params.w", 32)
    assert gather.is_async


def test_a_combined_collective_gives_one_for_each_array() -> None:
    found = collectives(COMBINED, fsdp=2)
    assert {name: (c.operand, c.result, c.nbytes) for name, c in found.items()} == {
        "start params.q": (Shape("bf16", (4, 8)), Shape("bf16", (8, 8)), 128),
        "start params.k": (Shape("bf16", (2, 8)), Shape("bf16", (4, 8)), 64),
    }


def test_only_a_matrix_product_between_start_and_end_hides_a_collective() -> None:
    found = collectives(OVERLAP, fsdp=2)
    assert {name.partition(" ")[0]: (c.is_async, c.behind) for name, c in found.items()} == {
        "hidden": (True, "fusion.1"),
        "bare": (True, ""),
        "sync": (False, ""),
        "library": (True, "gemm"),
        "plain": (False, ""),
    }
    assert hidden_share(list(found.values())) == pytest.approx(2 / 5)


def test_the_same_value_moved_five_times_is_four_times_too_often() -> None:
    (repeat,) = find_repeats(list(collectives(OVERLAP, fsdp=2).values()))
    assert (repeat.moved, repeat.times, repeat.nbytes, len(repeat.instructions)) == ("params.w", 5.0, 4 * 128, 5)


def test_the_passes_of_a_step_are_told_apart_by_the_names_of_what_is_differentiated() -> None:
    def passes(*names: str) -> Sequence[str]:
        text = OVERLAP
        for instruction, name in zip(("hidden", "bare", "library"), names, strict=True):
            start, end = f"%{instruction} = ", "dimensions={0}"
            head, _, tail = text.partition(start)
            text = head + start + tail.replace(end, f'{end}, metadata={{op_name="{name}"}}', 1)
        return [c.part_of for c in collectives(text, fsdp=2).values()][:4]

    forward, backward = "jit(step)/jvp()/while/body/all_gather", "jit(step)/transpose(jvp())/while/body/all_gather"
    assert passes(forward, backward, "jit(step)/all_gather") == ["forward", "backward", "update", "update"]


def test_a_collective_without_a_name_belongs_to_the_pass_of_the_loop_that_it_is_in() -> None:
    loop = '"known_trip_count":{"n":"3"}}'
    text = NESTED_LOOPS.replace(loop, f'{loop}, metadata={{op_name="jit(step)/transpose(jvp())/while"}}')
    (collective,) = collectives(text, data=4).values()
    assert (collective.part_of, collective.executions, collective.nbytes) == ("backward", 15, 15 * 32)


def test_a_value_that_a_loop_changes_is_not_traced_out_of_it() -> None:
    (collective,) = collectives(NESTED_LOOPS, data=4).values()
    assert collective.moved == "carried by a loop"
    assert collective.times == 1.0


def test_a_device_alone_moves_nothing() -> None:
    assert collectives(NESTED_LOOPS.replace("{{0,1,2,3}}", "{{0},{1},{2},{3}}"), data=4) == {}


def test_names_of_the_state_are_shown_as_paths() -> None:
    assert readable("state['optimizer']['adam'].mu['embed']['table']") == "optimizer.adam.mu.embed.table"
    assert readable("state['params']['layers'][0]['w']") == "params.layers.0.w"
    assert readable("batch['tokens']") == "batch.tokens"
