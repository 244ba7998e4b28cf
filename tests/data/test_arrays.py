"""Rows in memory: filler rows weigh nothing, other content has another hash, and what is no table is refused."""

import pickle

import numpy as np
import pytest
from sklearn.datasets import load_digits as load_them

from jaxtrain.data import FILLER, ArrayTable, Order, Tables, host_batches, load_digits
from jaxtrain.errors import ConfigError
from tests.factories import IdTable, digest


def fields() -> dict[str, np.ndarray]:
    return {"x": np.arange(12, dtype=np.float32).reshape(6, 2), "label": np.arange(6, dtype=np.int8) + 10}


def test_rows_come_in_the_order_of_their_ids_and_fillers_are_zeros_of_weight_0() -> None:
    batch = ArrayTable(fields()).assemble(np.array([4, FILLER, 0, 4]))
    assert batch["x"].tolist() == [[8, 9], [0, 0], [0, 1], [8, 9]]
    assert batch["label"].tolist() == [14, 0, 10, 14]
    assert batch["weights"].tolist() == [1, 0, 1, 1]
    assert [batch[name].dtype for name in ("x", "label", "weights")] == [np.float32, np.int8, np.float32]


def test_given_weights_are_kept_but_for_fillers() -> None:
    table = ArrayTable({**fields(), "weights": np.full(6, 0.5, np.float32)})
    assert table.assemble(np.array([1, FILLER]))["weights"].tolist() == [0.5, 0]


def test_assembling_leaves_the_arrays_alone() -> None:
    table = ArrayTable(fields())
    before = table.hash
    table.assemble(np.array([FILLER, 0]))["x"][:] = 7
    assert ArrayTable(table.fields).hash == before


@pytest.mark.parametrize("row", [6, -2])
def test_an_id_that_is_no_row_is_refused(row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of 6"):
        ArrayTable(fields()).assemble(np.array([0, row]))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({}, "needs arrays with at least one row, not none"),
        ({"x": np.zeros((0, 2))}, "not x with 0"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "as many rows each, not x with 3, y with 4"),
        ({"x": np.array(["a", "b"])}, "field 'x' of an ArrayTable has dtype <U1; give it as numbers"),
        ({"x": np.float32(3)}, "not x with 0"),
    ],
)
def test_arrays_that_are_no_table_are_refused(wrong: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ArrayTable(wrong)
    assert words in str(caught.value)


def test_other_content_has_another_hash() -> None:
    same = {ArrayTable(fields()).hash, ArrayTable(dict(reversed(fields().items()))).hash}
    assert len(same) == 1
    changed = fields()
    changed["x"][3, 1] += 1
    renamed = {"y": fields()["x"], "label": fields()["label"]}
    reshaped = {**fields(), "x": fields()["x"].reshape(6, 2, 1)}
    retyped = {**fields(), "label": fields()["label"].astype(np.uint8)}
    assert len(same | {ArrayTable(other).hash for other in (changed, renamed, reshaped, retyped)}) == 5


def test_a_data_set_in_memory_knows_its_hash_which_the_held_out_rows_are_part_of() -> None:
    train = ArrayTable(fields())
    hashes = {Tables(train).hash, Tables(train, train).hash, Tables(train, ArrayTable({"x": np.ones(3)})).hash}
    hashes |= {Tables(train, sets={name: train}).hash for name in ("a", "b")}
    assert len(hashes) == 5
    other = ArrayTable({"x": np.ones(3)})
    assert Tables(train, sets={"train": other}).hash != Tables(other, sets={"train": other}).hash
    assert Tables(train, hash="abc").hash == "abc"
    with pytest.raises(ConfigError, match="IdTable doesn't know a hash of its content"):
        Tables(IdTable(3))


def test_workers_get_the_same_rows() -> None:
    table = ArrayTable(fields())
    assert pickle.loads(pickle.dumps(table)).hash == table.hash
    order = Order(6, seed=0, shuffle=True, epochs=2)
    here, there = (list(host_batches(table, order, 4, range(4), workers=workers)) for workers in (0, 2))
    assert len(here) == 3
    assert digest(here) == digest(there)


def test_the_digits_are_the_real_ones_each_once() -> None:
    tables = load_digits(0.2)
    assert tables.held_out is not None
    assert (len(tables.train), len(tables.held_out)) == (1438, 359)
    parts = [table.assemble(np.arange(len(table))) for table in (tables.train, tables.held_out)]
    ours = np.concatenate([np.c_[part["image"].reshape(-1, 64) * 16, part["label"]] for part in parts])
    pixels, digits = load_them(return_X_y=True)
    theirs = np.c_[pixels, digits]
    assert sorted(map(tuple, ours)) == sorted(map(tuple, theirs))
    first = tables.train.assemble(np.array([0]))
    assert (first["image"].shape, first["image"].dtype, first["label"].dtype) == ((1, 8, 8, 1), np.float32, np.int32)
    assert load_digits(0.0).held_out is None
    assert load_digits(0.3).hash != tables.hash == load_digits(0.2).hash
