import itertools
import subprocess
import sys

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.pipeline.schedule import (
    KINDS,
    Schedule,
    Tick,
    Work,
    check_schedule,
    make_schedule,
)
from tests.pipeline.tables import NAMES, TABLES, make


@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_every_table_does_everything_once_and_nothing_too_early(table):
    for microbatches in range(1, 18):
        check_schedule(make(table, microbatches))


def ticks_of(schedule, side):
    """(stage, chunk, micro-batch) to tick."""
    return {
        (stage, work.chunk, work.microbatch): tick
        for tick, row in enumerate(schedule.ticks)
        for stage, both in enumerate(row)
        if (work := getattr(both, side)) is not None
    }


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 16])
def test_1f1b_is_paired(stages, microbatches):
    schedule = make_schedule("1f1b", stages, microbatches)
    places = list(itertools.product(range(stages), [0], range(microbatches)))
    assert ticks_of(schedule, "forward") == {(s, c, i): i + s for s, c, i in places}
    assert ticks_of(schedule, "backward") == {(s, c, i): i + 2 * (stages - 1) - s for s, c, i in places}
    assert len(schedule.ticks) == microbatches + 2 * (stages - 1)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (8, 16, 2)])
def test_interleaved_1f1b_passes_groups_of_as_many_microbatches_as_stages(p, m, v):
    schedule = make_schedule("interleaved_1f1b", p, m, v)
    places = list(itertools.product(range(p), range(v), range(m)))
    assert ticks_of(schedule, "forward") == {(s, c, i): s + c * p + i % p + i // p * p * v for s, c, i in places}
    assert ticks_of(schedule, "backward") == {
        (s, c, i): v * p - 1 + (p - 1 - s) + (v - 1 - c) * p + i % p + i // p * p * v for s, c, i in places
    }


@pytest.mark.parametrize("stages", [1, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 6])
def test_interleaved_1f1b_with_one_chunk_is_1f1b(stages, microbatches):
    interleaved, plain = (make_schedule(kind, stages, microbatches) for kind in ("interleaved_1f1b", "1f1b"))
    assert interleaved.ticks == plain.ticks


def test_gpipe_does_no_forward_after_a_backward():
    schedule = make_schedule("gpipe", 4, 6)
    forwards, backwards = ticks_of(schedule, "forward"), ticks_of(schedule, "backward")
    for stage in range(4):
        assert max(forwards[stage, 0, i] for i in range(6)) <= min(backwards[stage, 0, i] for i in range(6))


def test_all_kinds_add_up_gradients_in_the_order_of_microbatches():
    """So a schedule changes no bit of a gradient."""
    for kind, chunks in [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]:
        backwards = ticks_of(make_schedule(kind, 4, 7, chunks), "backward")
        for stage, chunk in itertools.product(range(4), range(chunks)):
            assert sorted(range(7), key=lambda i: backwards[stage, chunk, i]) == list(range(7))


def changed(schedule, *changes):
    """The table with the ticks of some (tick, stage) replaced."""
    rows = [list(row) for row in schedule.ticks]
    for tick, stage, new in changes:
        rows[tick][stage] = new
    return Schedule(schedule.kind, schedule.stages, schedule.chunks, schedule.microbatches, tuple(map(tuple, rows)))


F0, F1, B0, B1 = Tick(Work(0, 0), None), Tick(Work(0, 1), None), Tick(None, Work(0, 0)), Tick(None, Work(0, 1))
IDLE = Tick(None, None)
# 1f1b on two stages with two micro-batches:
#   stage 0: F0  F1    B0    B1
#   stage 1: -   F0B0  F1B1  -
VIOLATIONS = {
    "a forward before its carry": (
        [(0, 1, F0), (1, 1, B0)],
        "tick 0, stage 1: the forward of micro-batch 0 on chunk 0 comes before the output of virtual stage 0",
    ),
    "a backward before its gradient": (
        [(1, 0, Tick(Work(0, 1), Work(0, 0))), (2, 0, IDLE)],
        "tick 1, stage 0: the backward of micro-batch 0 on chunk 0 comes before the gradient of virtual stage 1",
    ),
    "a backward before its own forward": (
        [(1, 1, Tick(Work(0, 0), Work(0, 1))), (2, 1, Tick(Work(0, 1), Work(0, 0)))],
        "tick 1, stage 1: the backward of micro-batch 1 on chunk 0 comes before its own forward",
    ),
    "a forward twice": (
        [(3, 1, F0)],
        "tick 3, stage 1: the forward of micro-batch 0 on chunk 0 was done in tick 1 already",
    ),
    "a backward twice": (
        [(3, 1, B1)],
        "tick 3, stage 1: the backward of micro-batch 1 on chunk 0 was done in tick 2 already",
    ),
    "a backward left out": ([(3, 0, IDLE)], "the backward of micro-batch 1 on virtual stage 0 is missing"),
    "a forward of nobody's micro-batch": ([(3, 1, Tick(Work(0, 2), None))], "1 chunks and 2 micro-batches"),
    "a chunk that isn't there": ([(3, 1, Tick(None, Work(1, 0)))], "1 chunks and 2 micro-batches"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_wrong_table_is_refused_with_its_first_violation(name):
    changes, message = VIOLATIONS[name]
    schedule = make_schedule("1f1b", 2, 2)
    check_schedule(schedule)
    with pytest.raises(ValueError, match=message):
        check_schedule(changed(schedule, *changes))


def test_a_gradient_from_the_next_chunk_takes_a_tick_too():
    schedule = make_schedule("interleaved_1f1b", 2, 1, 2)
    assert schedule.ticks[4:6] == ((Tick(None, Work(1, 0)), IDLE), (IDLE, B0))
    with pytest.raises(ValueError, match="tick 4, stage 1: the backward of micro-batch 0 on chunk 0 comes before"):
        check_schedule(changed(schedule, (4, 1, B0), (5, 1, IDLE)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1fb1", 4, 8), ["pipeline.schedule=1fb1", "did you mean 1f1b", *KINDS]),
        (("1f1b", 0, 8), ["mesh.pipeline=0", "1"]),
        (("1f1b", 4, 8, 2), ["pipeline.chunks=2", "pipeline.schedule=1f1b", "interleaved_1f1b"]),
        (("gpipe", 4, 8, 2), ["pipeline.chunks=2", "pipeline.schedule=gpipe"]),
        (("interleaved_1f1b", 4, 8, 0), ["pipeline.chunks=0", "1"]),
        (("1f1b", 4, 0), ["micro-batch", "0"]),
    ],
)
def test_what_is_impossible_is_refused_by_its_key(arguments, words):
    with pytest.raises(ConfigError) as refusal:
        make_schedule(*arguments)
    for word in words:
        assert word in str(refusal.value)


def test_schedules_need_no_jax():
    modules = ", ".join(f"jaxtrain.pipeline.{name}" for name in ("schedule", "buffers", "split"))
    program = f"import sys, {modules}; sys.exit('jax' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
