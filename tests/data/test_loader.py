import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jaxtrain.data import FILLER, Batch, Order, RowTable, Table, host_batches
from jaxtrain.errors import DataError
from tests.factories import FailingTable, IdTable, digest, make_dataset, make_documents


def load(
    order: Order,
    global_batch: int,
    local_rows: npt.ArrayLike | None = None,
    start: int = 0,
    count: int | None = None,
    table: Table | None = None,
    prefetch: int = 2,
) -> list[Batch]:
    """The first `count` batches, or all."""
    places = np.arange(global_batch) if local_rows is None else local_rows
    batches = host_batches(table or IdTable(1000), order, global_batch, places, start, prefetch=prefetch)
    try:
        return [next(batches) for _ in range(count)] if count is not None else list(batches)
    finally:
        batches.close()


def ids(batches: list[Batch]) -> list[list[int]]:
    return [batch["row_ids"].tolist() for batch in batches]


def flat(batches: list[Batch]) -> list[int]:
    return [row for batch in ids(batches) for row in batch]


def test_a_batch_holds_the_rows_of_its_positions_and_says_which() -> None:
    order = Order(20, seed=0, shuffle=True, epochs=None)
    batches = load(order, 8, local_rows=[6, 1, 3], start=5, count=3)
    assert ids(batches) == [[order.row(5 + 8 * k + place) for place in (6, 1, 3)] for k in range(3)]
    for batch in batches:
        assert batch["value"].tolist() == (batch["row_ids"] * 10).tolist()
        assert batch["row_ids"].dtype == np.int64


@pytest.mark.parametrize("prefetch", [0, 1, 2, 16])
def test_prefetch_does_not_change_the_batches(prefetch: int) -> None:
    order = Order(20, seed=0, shuffle=True, epochs=3)
    assert ids(load(order, 8, prefetch=prefetch)) == [
        [order.row(8 * k + place) for place in range(8)] for k in range(8)
    ]


@pytest.mark.parametrize("step", [7, 12])
def test_resuming_in_a_later_epoch_goes_on_in_that_epochs_order(step: int) -> None:
    def order() -> Order:
        return Order(20, seed=0, shuffle=True, epochs=3)

    straight = ids(load(order(), 4))
    stopped = ids(load(order(), 4, count=step))
    resumed = ids(load(order(), 4, start=4 * step))
    assert len(straight) == 15
    assert stopped + resumed == straight


def test_the_start_costs_the_same_wherever_it_is() -> None:
    for start in (0, 8 * 10**12):
        table = IdTable(1000)
        load(Order(1000, seed=0, shuffle=True, epochs=None), 8, start=start, count=1, table=table, prefetch=0)
        assert table.assembled == 8


@pytest.mark.parametrize(
    "places", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]], [[7], [0, 1, 2], [3, 4, 5, 6]]]
)
def test_any_split_of_a_batch_over_processes_gives_each_row_once_an_epoch(places: list[list[int]]) -> None:
    order = Order(24, seed=0, shuffle=True, epochs=2)
    processes = [load(order, 8, local_rows=own) for own in places]
    assert [len(batches) for batches in processes] == [6] * len(places)
    for epoch in (0, 1):
        rows = [row for batches in processes for row in flat(batches[3 * epoch : 3 * epoch + 3])]
        assert sorted(rows) == list(range(24))


def test_stopping_with_two_processes_and_going_on_with_one_loses_and_repeats_nothing() -> None:
    order = Order(40, seed=0, shuffle=True, epochs=1)
    halves = [np.arange(4), np.arange(4, 8)]
    before = [load(order, 8, local_rows=half, count=3) for half in halves]
    after = load(order, 8, start=24)
    assert sorted(flat(before[0]) + flat(before[1]) + flat(after)) == list(range(40))
    before_alone = load(order, 8, count=3)
    after_apart = [load(order, 8, local_rows=half, start=24) for half in halves]
    assert sorted(flat(before_alone) + flat(after_apart[0]) + flat(after_apart[1])) == list(range(40))


def test_finite_data_end_after_the_last_row_completed_by_fillers() -> None:
    order = Order(20, seed=0, shuffle=True, epochs=1)
    batches = load(order, 8)
    assert len(batches) == 3
    assert sorted(flat(batches)[:20]) == list(range(20))
    assert ids(batches)[2][4:] == [FILLER] * 4


def test_two_epochs_hold_every_row_twice_and_no_filler_between_them() -> None:
    rows = flat(load(Order(20, seed=0, shuffle=True, epochs=2), 8))
    assert Counter(rows) == dict.fromkeys(range(20), 2)
    rows = flat(load(Order(20, seed=0, shuffle=True, epochs=2), 16))
    assert Counter(rows) == {**dict.fromkeys(range(20), 2), FILLER: 8}


@pytest.mark.parametrize("start", [40, 48, 1000])
def test_starting_at_or_beyond_the_end_gives_no_batch(start: int) -> None:
    assert load(Order(20, seed=0, shuffle=True, epochs=2), 8, start=start) == []


def test_processes_with_unequal_rows_end_after_the_same_number_of_batches() -> None:
    order = Order(15, seed=0, shuffle=True, epochs=1)
    first, second = (load(order, 16, local_rows=np.arange(8) + 8 * process) for process in (0, 1))
    assert [len(batch["row_ids"]) for batch in first] == [len(batch["row_ids"]) for batch in second] == [8]
    assert sorted(flat(first) + flat(second)) == [FILLER, *range(15)]


@pytest.mark.parametrize("shard_tokens", [30, 10**6])
def test_fewer_shards_than_processes_still_give_disjoint_complete_rows(tmp_path: Path, shard_tokens: int) -> None:
    dataset = make_dataset(tmp_path / "data", make_documents([30] * 4), shard_tokens=shard_tokens)
    table = RowTable(dataset, "train", 8, packed=True, vocab=256)
    order = Order(len(table), seed=0, shuffle=True, epochs=1)
    processes = [load(order, 6, local_rows=[place], table=table) for place in range(6)]
    rows = [row for batches in processes for row in flat(batches) if row != FILLER]
    assert sorted(rows) == list(range(len(table)))


def test_an_epochs_counted_targets_are_those_of_its_rows_however_it_is_batched(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", make_documents([33] * 12))
    table = RowTable(dataset, "train", 32, packed=True, vocab=256)
    assert len(table) == 12
    batches = load(Order(12, seed=0, shuffle=True, epochs=1), 8, table=table)
    assert sum(batch["weights"].sum() for batch in batches) == 12 * 32
    last = batches[-1]
    assert not any(last[name][4:].any() for name in ("tokens", "targets", "segments", "positions", "weights"))


def test_epochs_differ_and_seeds_differ_and_a_seed_repeats() -> None:
    def epochs(seed: int) -> list[list[int]]:
        rows = flat(load(Order(20, seed, shuffle=True, epochs=2), 4))
        return [rows[:20], rows[20:]]

    first = epochs(0)
    assert first[0] != first[1]
    assert sorted(first[0]) == sorted(first[1])
    assert epochs(0) == first
    assert not [order for order in epochs(1) if order in first]


def test_an_error_comes_in_the_place_of_its_batch_and_stays() -> None:
    order = Order(100, seed=0, shuffle=False, epochs=1)
    batches = host_batches(FailingTable(100, 35, DataError("id 300")), order, 8, np.arange(8), prefetch=16)
    assert [next(batches)["row_ids"][0] for _ in range(4)] == [0, 8, 16, 24]
    for _ in range(2):
        with pytest.raises(DataError, match=r"^id 300$"):
            next(batches)
    batches.close()


def test_reading_ahead_begins_before_the_first_batch_is_asked_for() -> None:
    class Announced(IdTable):
        begun = threading.Event()

        def assemble(self, row_ids: npt.NDArray[np.int64]) -> Batch:
            self.begun.set()
            return super().assemble(row_ids)

    batches = host_batches(Announced(100), Order(100, 0, True, None), 8, [0])
    assert Announced.begun.wait(timeout=30)
    batches.close()


def test_closed_batches_say_so() -> None:
    batches = host_batches(IdTable(100), Order(100, 0, True, None), 8, [0])
    next(batches)
    for _ in range(2):
        batches.close()
        with pytest.raises(ValueError, match="the batches are closed"):
            next(batches)


@pytest.mark.parametrize("end", [StopIteration, SystemExit])
def test_a_table_that_raises_what_ends_things_does_not_end_the_data(end: type[BaseException]) -> None:
    order = Order(100, seed=0, shuffle=False, epochs=1)
    with pytest.raises(RuntimeError, match=rf"in assemble\n.*\n{end.__name__}"):
        load(order, 8, table=FailingTable(100, 12, end()))


class Fields(IdTable):
    def __init__(self, **fields: Any) -> None:
        super().__init__(100)
        self.fields = fields

    def assemble(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        return self.fields


def test_a_table_with_a_wrong_number_of_rows_or_a_taken_name_is_refused() -> None:
    order = Order(100, seed=0, shuffle=False, epochs=1)
    with pytest.raises(DataError, match=r"field 'tokens' has shape \(7, 3\) for 8 rows"):
        load(order, 8, table=Fields(tokens=np.zeros((7, 3))))
    with pytest.raises(DataError, match="field named 'row_ids'"):
        load(order, 8, table=Fields(row_ids=np.zeros(8)))


@pytest.mark.parametrize(
    "change",
    [
        {"global_batch": 0, "local_rows": []},
        {"start": -1},
        {"workers": -1},
        {"prefetch": -1},
        {"local_rows": [8]},
        {"local_rows": [-1]},
        {"local_rows": [[0]]},
    ],
)
def test_arguments_out_of_range_are_refused(change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"global_batch": 8, "local_rows": [0], **change}
    with pytest.raises(ValueError, match=r"out of range|places from 0"):
        host_batches(IdTable(20), Order(20, 0, True, None), **arguments)


def test_held_out_rows_come_once_and_in_order(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", [[1, 2]], held_out=make_documents([10, 3, 20]))
    table = RowTable(dataset, "held_out", 8, packed=True, vocab=256)
    order = Order(len(table), seed=0, shuffle=False, epochs=1)
    first, second = load(order, 2, table=table), load(order, 2, table=table)
    assert flat(first) == [0, 1, 2, 3]
    assert digest(first) == digest(second)
