import pickle

import numpy as np
import pytest

from jaxtrain.data import FILLER, Order


def epoch(order: Order, number: int, rows: int) -> list[int]:
    return [order.row(number * rows + place) for place in range(rows)]


@pytest.mark.parametrize("rows", [1, 2, 3, 20, 257, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_epoch_holds_each_row_once(rows: int, shuffle: bool) -> None:
    order = Order(rows, seed=3, shuffle=shuffle, epochs=None)
    for number in (0, 1, 2, 10**9):
        assert sorted(epoch(order, number, rows)) == list(range(rows))


def test_each_epoch_has_an_order_of_its_own_and_each_seed_too() -> None:
    orders = {seed: [epoch(Order(20, seed, True, 4), number, 20) for number in range(4)] for seed in (0, 1, 2)}
    distinct = {tuple(rows) for seed in orders for rows in orders[seed]}
    # Also: no seed's second epoch is the next seed's first.
    assert len(distinct) == 12
    assert orders[1] == [epoch(Order(20, 1, True, 4), number, 20) for number in range(4)]


def test_the_order_does_not_depend_on_what_was_asked_before() -> None:
    order = Order(20, seed=0, shuffle=True, epochs=3)
    straight = [order.row(position) for position in range(60)]
    backwards = [Order(20, 0, True, 3).row(position) for position in reversed(range(60))]
    assert straight == backwards[::-1]


def test_without_shuffle_rows_come_in_their_own_order() -> None:
    order = Order(3, seed=0, shuffle=False, epochs=2)
    assert [order.row(position) for position in range(6)] == [0, 1, 2, 0, 1, 2]


def test_beyond_the_end_there_are_only_fillers() -> None:
    order = Order(20, seed=0, shuffle=True, epochs=2)
    assert order.total == 40
    assert order.row(39) != FILLER
    assert [order.row(position) for position in (40, 41, 10**12)] == [FILLER] * 3
    assert Order(20, seed=0, shuffle=True, epochs=None).row(40) != FILLER


def test_rows_of_many_positions_are_those_of_each() -> None:
    order = Order(20, seed=0, shuffle=True, epochs=1)
    positions = np.array([[3, 19], [20, 0]])
    assert order.rows_at(positions).tolist() == [[order.row(3), order.row(19)], [FILLER, order.row(0)]]


def test_an_order_survives_pickling() -> None:
    order = Order(20, seed=5, shuffle=True, epochs=2)
    copy = pickle.loads(pickle.dumps(order))
    assert [copy.row(position) for position in range(41)] == [order.row(position) for position in range(41)]


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be"):
        Order(0, 0, True, None)
    with pytest.raises(ValueError, match="epochs must be"):
        Order(1, 0, True, 0)
    with pytest.raises(IndexError, match="position -1"):
        Order(4, 0, True, None).row(-1)
