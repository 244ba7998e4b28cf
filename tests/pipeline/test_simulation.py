import math

import pytest

from jaxtrain.pipeline.buffers import plan_buffers
from jaxtrain.pipeline.schedule import Schedule, Tick, Work, make_schedule
from jaxtrain.pipeline.simulation import Span, microbatches_in_flight, simulate
from jaxtrain.pipeline.split import split_layers
from tests.pipeline.tables import NAMES, TABLES, make


@pytest.mark.parametrize("table", TABLES, ids=NAMES[: len(TABLES)])
@pytest.mark.parametrize(("forward", "backward"), [(1.0, 2.0), (1.0, 3.0), (1.0, 1.0), (2.0, 1.0)])
def test_every_schedule_takes_the_ideal_time(table, forward, backward):
    """So the bubble is (p-1)/v of (m + (p-1)/v), whatever a backward costs, and also where p doesn't divide m."""
    _, p, v = table
    for m in range(p, 3 * p + 3):
        timeline = simulate(make(table, m), forward / v, backward / v)
        assert timeline.total == pytest.approx((m + (p - 1) / v) * (forward + backward), rel=1e-9)
        assert timeline.ideal == pytest.approx(timeline.total)
        assert timeline.bubble == pytest.approx((p - 1) / v / (m + (p - 1) / v), abs=1e-9)


@pytest.mark.parametrize("table", TABLES, ids=NAMES[: len(TABLES)])
def test_few_microbatches_take_no_longer_than_one_and_a_chunk_for_each_more(table):
    """The first one's way through all virtual stages and back, which nothing can shorten."""
    _, p, v = table
    for m in range(1, p):
        timeline = simulate(make(table, m), 1 / v, 2 / v)
        assert timeline.total == pytest.approx((p + (m - 1) / v) * 3)
        assert timeline.ideal == pytest.approx(timeline.total)


def test_the_time_of_each_work_can_be_followed_by_hand():
    timeline = simulate(make_schedule("1f1b", 2, 2), [1.0, 2.0], [4.0, 8.0], link=0.5)
    first, second = Work(0, 0), Work(0, 1)
    assert timeline.spans == (
        Span(0, first, False, 0.0, 1.0),
        Span(0, second, False, 1.5, 2.5), Span(1, first, False, 1.5, 3.5), Span(1, first, True, 3.5, 11.5),
        Span(0, first, True, 12.0, 16.0), Span(1, second, False, 12.0, 14.0), Span(1, second, True, 14.0, 22.0),
        Span(0, second, True, 22.5, 26.5),
    )  # fmt: skip
    assert timeline.total == 27.0
    assert timeline.ideal == (2 + 1) * (1 + 2 + 4 + 8) / 2
    assert timeline.bubble == pytest.approx(1 - 2 * (1 + 2 + 4 + 8) / (2 * 27.0))


def test_each_tick_pays_for_its_exchange():
    for kind, chunks in [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]:
        schedule = make_schedule(kind, 4, 8, chunks)
        free, linked = simulate(schedule, 1.0, 2.0), simulate(schedule, 1.0, 2.0, link=0.25)
        assert linked.total == pytest.approx(free.total + 0.25 * len(schedule.ticks))
        assert linked.bubble > free.bubble


def test_interleaving_takes_less_time_until_its_exchanges_take_more():
    plain, interleaved = make_schedule("1f1b", 4, 8), make_schedule("interleaved_1f1b", 4, 8, 2)

    def gain(link):
        return simulate(plain, 1.0, 2.0, link).total - simulate(interleaved, 0.5, 1.0, link).total

    assert gain(0.0) == pytest.approx(4.5)
    assert gain(0.3) > 0 > gain(0.5)


def test_the_slowest_stage_sets_the_pace():
    """A head of 4 and 8 on the last of four stages: each micro-batch more costs what that one does."""
    costs = [1.0, 1.0, 1.0, 5.0], [2.0, 2.0, 2.0, 10.0]
    few, many = (simulate(make_schedule("1f1b", 4, m), *costs) for m in (16, 32))
    assert many.total - few.total == pytest.approx(16 * 15)
    assert many.total == pytest.approx(32 * 15 + 3 * (1 + 2))
    assert many.ideal == pytest.approx((32 + 3) * (3 + 3 + 3 + 15) / 4)
    assert many.bubble > 1 - 24 / 60


def test_interleaved_1f1b_pays_for_an_uneven_chunk_in_each_of_its_ticks():
    """A head of 1 and 2 beside chunks of 0.5 and 1: it pays it once a micro-batch, as plain 1f1b does."""
    costs = [0.5] * 7 + [1.5], [1.0] * 7 + [3.0]
    few, many = (simulate(make_schedule("interleaved_1f1b", 4, m, 2), *costs) for m in (16, 32))
    assert many.total - few.total == pytest.approx(16 * (3 + 3))
    # Uneven layers over one stage's chunks cost as much, though the sum over the stage is that of the others.
    costs = [0.75, *[0.5] * 3, 0.25, *[0.5] * 3], [1.0] * 8
    few, many = (simulate(make_schedule("interleaved_1f1b", 4, m, 2), *costs) for m in (16, 32))
    assert many.total - few.total > 16 * 3


def test_counting_embedding_and_head_as_load_takes_less_time():
    """126 layers on 8 stages, a head that weighs 3 layers, 32 micro-batches."""
    schedule = make_schedule("1f1b", 8, 32)

    def total(split):
        loads = [float(counts[0]) for counts in split]
        loads[0], loads[-1] = loads[0] + 0.2, loads[-1] + 3.0
        return simulate(schedule, loads, [2 * load for load in loads]).total

    counted = total(split_layers(126, 8, 1, 1.0, 0.2, 3.0))
    even = total(split_layers(126, 8, 1, 1.0, 0.0, 0.0))
    assert counted < 0.95 * even
    assert counted <= (32 + 7) * 3 * math.ceil((126 + 3.2) / 8)


@pytest.mark.parametrize("table", TABLES, ids=NAMES[: len(TABLES)])
def test_microbatches_in_flight_are_those_that_the_stash_has_room_for(table):
    for microbatches in (1, 4, 9, 17):
        schedule = make(table, microbatches)
        assert microbatches_in_flight(schedule) * schedule.chunks == plan_buffers(schedule).stash_slots


@pytest.mark.parametrize(
    ("costs", "words"),
    [
        (([1.0, 2.0], 1.0), ["forward", "2", "4"]),
        ((1.0, [1.0] * 5), ["backward", "5", "4"]),
        ((-1.0, 1.0), ["forward=-1.0"]),
        ((1.0, float("nan")), ["backward=nan"]),
        ((1.0, 1.0, -0.1), ["link=-0.1"]),
        ((0.0, 0.0), ["all 0"]),
    ],
)
def test_times_that_are_none_are_refused(costs, words):
    with pytest.raises(ValueError, match="time") as refusal:
        simulate(make_schedule("1f1b", 4, 8), *costs)
    for word in words:
        assert word in str(refusal.value)


def test_a_tick_in_which_nobody_works_costs_its_exchange_alone():
    idle = (Tick(None, None),)
    row = (Tick(Work(0, 0), Work(0, 0)),)
    timeline = simulate(Schedule("made by hand", 1, 1, 1, (idle, row, idle)), 1.0, 2.0, link=0.5)
    assert timeline.total == 4.5
    assert timeline.spans[0].start == 0.5
