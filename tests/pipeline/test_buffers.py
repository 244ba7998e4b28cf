"""The buffers of a table, tried by running it with values that say what they are."""

import numpy as np
import pytest

from jaxtrain.pipeline.buffers import plan_buffers
from jaxtrain.pipeline.schedule import make_schedule
from tests.pipeline.tables import NAMES, TABLES, make


class Engine:
    """Runs a plan as the real engine does, knowing of the table only what the plan's arrays say.

    A value is a tuple of what made it, such as ("carry", virtual stage, micro-batch).
    """

    def __init__(self, plan, stages, chunks):
        self.plan, self.stages, self.last = plan, stages, stages * chunks - 1
        sizes = {"stash": plan.stash_slots, "carry": plan.carry_slots}
        sizes |= {"gradient": plan.gradient_slots, "output": plan.output_slots}
        self.buffers = [{name: [None] * size for name, size in sizes.items()} for _ in range(stages)]
        self.forwards, self.backwards_done = set(), set()
        self.carry_sent, self.gradient_sent = [None] * stages, [None] * stages

    def run(self):
        for tick in range(len(self.plan.tables.forward_chunk)):
            for stage, buffers in enumerate(self.buffers):
                self.arrive(
                    buffers["carry"], self.plan.tables.carry_arrival_slot[tick, stage], self.carry_sent[stage - 1]
                )
                after = self.gradient_sent[(stage + 1) % self.stages]
                self.arrive(buffers["gradient"], self.plan.tables.gradient_arrival_slot[tick, stage], after)
            self.carry_sent = [self.forward(tick, stage) for stage in range(self.stages)]
            self.gradient_sent = [self.backward(tick, stage) for stage in range(self.stages)]
        return self.forwards, self.backwards_done

    def arrive(self, buffer, slot, value):
        if slot >= 0:
            assert value is not None
            buffer[slot] = value

    def forward(self, tick, stage):
        at = {
            name: int(getattr(self.plan.tables, f"forward_{name}")[tick, stage])
            for name in ("chunk", "microbatch", "carry_slot", "stash_slot", "output_slot")
        }
        if at["chunk"] < 0:
            assert set(at.values()) == {-1}
            return None
        virtual, buffers = at["chunk"] * self.stages + stage, self.buffers[stage]
        assert (at["carry_slot"] < 0) == (virtual == 0)
        if virtual > 0:
            assert buffers["carry"][at["carry_slot"]] == ("carry", virtual - 1, at["microbatch"])
        buffers["stash"][at["stash_slot"]] = ("residuals", virtual, at["microbatch"])
        assert (at["output_slot"] >= 0) == (virtual == self.last)
        if virtual == self.last:
            buffers["output"][at["output_slot"]] = ("output", at["microbatch"])
        self.forwards.add((virtual, at["microbatch"]))
        return ("carry", virtual, at["microbatch"])

    def backward(self, tick, stage):
        at = {
            name: int(getattr(self.plan.tables, f"backward_{name}")[tick, stage])
            for name in ("chunk", "microbatch", "gradient_slot", "stash_slot", "output_slot")
        }
        if at["chunk"] < 0:
            assert set(at.values()) == {-1}
            return None
        virtual, buffers = at["chunk"] * self.stages + stage, self.buffers[stage]
        assert (at["gradient_slot"] < 0) == (at["output_slot"] >= 0) == (virtual == self.last)
        if virtual == self.last:
            assert buffers["output"][at["output_slot"]] == ("output", at["microbatch"])
        else:
            assert buffers["gradient"][at["gradient_slot"]] == ("gradient", virtual + 1, at["microbatch"])
        assert buffers["stash"][at["stash_slot"]] == ("residuals", virtual, at["microbatch"])
        self.backwards_done.add((virtual, at["microbatch"]))
        return ("gradient", virtual, at["microbatch"])


@pytest.mark.parametrize("table", TABLES, ids=NAMES)
def test_every_work_reads_what_its_neighbour_sent(table):
    _, stages, chunks = table
    for microbatches in range(1, 18):
        engine = Engine(plan_buffers(make(table, microbatches)), stages, chunks)
        forwards, backwards = engine.run()
        everything = {(virtual, i) for virtual in range(stages * chunks) for i in range(microbatches)}
        assert forwards == backwards == everything


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 8, 17, 64])
def test_1f1b_needs_no_more_memory_for_more_microbatches(stages, microbatches):
    plan = plan_buffers(make_schedule("1f1b", stages, microbatches))
    assert (plan.carry_slots, plan.gradient_slots, plan.output_slots) == (1, 1, 1)
    assert plan.stash_slots == min(microbatches, 2 * stages - 1)


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved_1f1b_needs_no_more_memory_for_more_groups(stages, chunks):
    few, many = (plan_buffers(make_schedule("interleaved_1f1b", stages, m * stages, chunks)) for m in (4, 16))
    for plan in (few, many):
        assert (plan.carry_slots, plan.gradient_slots, plan.output_slots) == (1, 1, 1)
        assert plan.stash_slots == (chunks + 1) * stages - 1


def test_gpipe_stashes_every_microbatch():
    plan = plan_buffers(make_schedule("gpipe", 4, 13))
    assert (plan.stash_slots, plan.output_slots) == (13, 13)


def test_a_buffer_that_a_table_does_not_use_still_has_a_slot():
    """An engine can't hold an array of no rows where it indexes one."""
    plan = plan_buffers(make_schedule("1f1b", 1, 3))
    assert (plan.stash_slots, plan.carry_slots, plan.gradient_slots, plan.output_slots) == (1, 1, 1, 1)
    assert (plan.tables.forward_carry_slot == -1).all()


def test_tables_are_small_integers_by_tick_and_stage():
    schedule = make_schedule("interleaved_1f1b", 4, 8, 2)
    tables = plan_buffers(schedule).tables
    assert len(tables) == 12
    for table in tables:
        assert table.dtype == np.int32
        assert table.shape == (len(schedule.ticks), 4)
