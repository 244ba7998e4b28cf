"""A mixture: exact counts anywhere, every component in epochs of its own, nothing but the position as state."""

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config.data import whole_weights
from jaxtrain.data import FILLER, MixtureOrder, MixtureTable, Order, RowTable, Stage, host_batches
from tests.factories import IdTable, digest, make_dataset, make_documents

ROWS = [7, 20, 3]


def mixture(*stages: Stage, rows: list[int] = ROWS, shuffle: bool = False) -> MixtureOrder:
    orders = [Order(count, seed, shuffle, None) for seed, count in enumerate(rows)]
    return MixtureOrder(orders, rows, stages)


def components(order: MixtureOrder, count: int, start: int = 0) -> np.ndarray:
    ids = order.rows_at(np.arange(start, start + count))
    return np.searchsorted(np.cumsum(ROWS), ids, side="right")


WEIGHTS = [
    (0.5, 0.3, 0.2),
    (1, 1, 1),
    (0.123, 0.4567, 0.9),
    (0.98, 0.01, 0.01),
    (0.0, 2, 1),
    (3, 0, 0),
    (1e-3, 0.5, 0.499),
    (0.1, 0.1, 0.1),
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_at_every_position_each_component_has_had_its_share_within_one_row(weights: tuple[float, ...]) -> None:
    drawn = components(mixture(Stage(0, weights)), 2500)
    share = np.array(weights) / sum(weights)
    counts = np.cumsum(drawn[:, None] == np.arange(3), axis=0)
    expected = np.arange(1, 2501)[:, None] * share
    assert np.abs(counts - expected).max() < 1
    assert (counts[-1][share == 0] == 0).all()


def test_many_components_too_have_their_share_within_one_row() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        weights = random.integers(0, 100, 12).tolist()
        rows = [5] * 12
        order = mixture(Stage(0, tuple(weights)), rows=rows)
        drawn = order.rows_at(np.arange(2000)) // 5
        counts = np.cumsum(drawn[:, None] == np.arange(12), axis=0)
        assert np.abs(counts - np.arange(1, 2001)[:, None] * np.array(weights) / sum(weights)).max() < 1


def test_weights_are_the_decimals_that_were_written() -> None:
    assert whole_weights((0.1, 0.2, 0.7)) == [1, 2, 7]
    assert whole_weights((1, 1, 1.0)) == [1, 1, 1]
    assert whole_weights((0.3, 0.6, 0)) == [1, 2, 0]
    assert whole_weights((1e-5, 1)) == [1, 100_000]


def test_weights_change_at_the_stated_position_and_not_before() -> None:
    stages = (Stage(0, (1, 0, 0)), Stage(13, (0.5, 0.5, 0)), Stage(1000, (0, 0, 1)))
    order = mixture(*stages)
    assert (components(order, 13) == 0).all()
    assert Counter(components(order, 20, start=13).tolist()) == {0: 10, 1: 10}
    assert (components(order, 100, start=1000) == 2).all()
    for position in (0, 1, 13, 14, 500, 1000, 1234):
        drawn = Counter(components(order, position).tolist()) if position else Counter()
        assert order.drawn(position) == [drawn[0], drawn[1], drawn[2]]


def test_each_component_is_walked_in_shuffled_epochs_of_its_own_over_stages() -> None:
    sizes = [40, 20, 60]
    order = mixture(Stage(0, (0.5, 0.3, 0.2)), Stage(33, (0.2, 0.2, 0.6)), rows=sizes, shuffle=True)
    ids = order.rows_at(np.arange(400))
    starts = np.cumsum([0, *sizes])
    for component, rows in enumerate(sizes):
        own = ids[(ids >= starts[component]) & (ids < starts[component + 1])] - starts[component]
        assert own.tolist() == Order(rows, component, True, None).rows_at(np.arange(len(own))).tolist()
        epochs = [own[start : start + rows].tolist() for start in range(0, len(own) - rows, rows)]
        assert len(epochs) > 1
        assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_any_position_is_found_without_those_before() -> None:
    order = mixture(Stage(0, (0.5, 0.3, 0.2)), Stage(33, (0.2, 0.2, 0.6)), shuffle=True)
    straight = order.rows_at(np.arange(60)).tolist()
    copy = pickle.loads(pickle.dumps(order))
    assert [int(copy.rows_at(np.array([position]))[0]) for position in reversed(range(60))] == straight[::-1]
    assert order.rows_at(np.arange(12).reshape(3, 4)).tolist() == np.reshape(straight[:12], (3, 4)).tolist()
    far = 10**15
    assert order.rows_at(np.array([far, far + 1])).shape == (2,)
    assert order.total is None


@pytest.mark.parametrize(
    "stages",
    [
        [Stage(1, (1, 1, 1))],
        [Stage(0, (1, 1, 1)), Stage(5, (1, 1, 1)), Stage(5, (1, 1, 1))],
        [Stage(0, (1, 1))],
        [Stage(0, (0, 0, 0))],
        [],
    ],
)
def test_stages_that_make_no_sense_are_refused(stages: list[Stage]) -> None:
    with pytest.raises(ValueError, match="stage"):
        mixture(*stages)


def test_weights_of_too_many_digits_and_finite_components_are_refused() -> None:
    with pytest.raises(ValueError, match="a pattern of 1000001 rows"):
        mixture(Stage(0, (1e-6, 1, 0)))
    with pytest.raises(ValueError, match="must have no end"):
        MixtureOrder([Order(3, 0, True, 2)], [3], [Stage(0, (1,))])
    with pytest.raises(IndexError, match="position -1"):
        mixture(Stage(0, (1, 1, 1))).rows_at(np.array([-1]))


def test_a_row_is_that_of_its_component_and_says_which() -> None:
    tables = {"code": IdTable(7), "web": IdTable(20), "books": IdTable(3)}
    table = MixtureTable(tables)
    ids = np.array([29, 0, FILLER, 7, 6, 26])
    assert len(table) == 30
    assert table.assemble(ids)["value"].tolist() == [20, 0, 0, 0, 60, 190]
    assert table.describe_rows(ids) == ["books:2", "code:0", -1, "web:0", "code:6", "web:19"]
    with pytest.raises(IndexError, match="row 30 of 30"):
        table.assemble(np.array([30]))


def test_a_batch_of_fillers_alone_weighs_nothing(tmp_path: Path) -> None:
    table = MixtureTable({"a": RowTable(make_dataset(tmp_path / "a", [[1, 2, 3]]), "train", 8, True, 256)})
    batch = table.assemble(np.array([FILLER, FILLER]))
    assert batch["weights"].shape == (2, 8)
    assert not batch["weights"].any()


@pytest.mark.slow
def test_stopped_at_any_batch_the_rest_is_that_of_the_straight_walk(tmp_path: Path) -> None:
    """Every stop from 1 to 20, over a change of weights and ends of components, each with its own iterator."""
    sets = {name: make_dataset(tmp_path / name, make_documents([17] * rows, seed=rows)) for name, rows in
            zip("abc", [30, 50, 20], strict=True)}  # fmt: skip
    stages = (Stage(0, (0.5, 0.3, 0.2)), Stage(33, (0.2, 0.2, 0.6)))

    def batches(start: int, count: int, local: range = range(4), workers: int = 0) -> list[dict[str, np.ndarray]]:
        table = MixtureTable({name: RowTable(each, "train", 16, "best_fit", 256) for name, each in sets.items()})
        rows = [len(each) for each in table.tables.values()]
        source = host_batches(table, mixture(*stages, rows=rows, shuffle=True), 4, list(local), start, workers)
        try:
            return [next(source) for _ in range(count)]
        finally:
            source.close()

    straight = batches(0, 25)
    for stop in range(1, 21):
        assert digest(batches(4 * stop, 25 - stop)) == digest(straight[stop:]), stop
    assert digest(batches(28, 18, workers=2)) == digest(straight[7:]), "two workers make the same batches"
    halves = [batches(0, 25, range(2)), batches(0, 25, range(2, 4))]
    together = [np.concatenate([left["row_ids"], right["row_ids"]]) for left, right in zip(*halves, strict=True)]
    assert [ids.tolist() for ids in together] == [batch["row_ids"].tolist() for batch in straight]
