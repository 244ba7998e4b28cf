"""The ramp as arithmetic: which size stands where."""

from jaxtrain.config import BatchPlan

RAMP = BatchPlan.of([(3, 2), (2, 4)], 8)


def test_phases_follow_each_other_without_a_gap() -> None:
    assert [(phase.size, phase.start, phase.end, phase.before) for phase in RAMP.phases] == [
        (2, 0, 6, 0),
        (4, 6, 14, 3),
        (8, 14, None, 5),
    ]
    assert [RAMP.phase_at(position).size for position in (0, 4, 6, 10, 14, 22, 10**12)] == [2, 2, 4, 4, 8, 8, 8]


def test_the_steps_to_so_many_rows_are_the_batches_that_hold_them() -> None:
    ends = [2, 4, 6, 10, 14, 22, 30]
    for rows in range(31):
        assert RAMP.steps_to(rows) == next((i + 1 for i, end in enumerate(ends) if rows <= end)) if rows else True
    assert RAMP.steps_to(0) == 0


def test_a_size_that_comes_twice_is_one_size() -> None:
    assert BatchPlan.of([(1, 8), (1, 2)], 8).sizes == (8, 2)
    assert BatchPlan.of([], 8).sizes == (8,)


def test_the_rows_of_so_many_batches_are_where_the_next_one_begins() -> None:
    starts = [0, 2, 4, 6, 10, 14, 22, 30]
    assert [RAMP.rows_of(batches) for batches in range(8)] == starts
    assert [RAMP.steps_to(start) for start in starts] == list(range(8))
