"""Best-fit rows: each position once, few documents cut, the same from the file as computed."""

import logging
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from jaxtrain.data import BestFitPlan, RowPlan, RowTable, open_dataset, place_best_fit
from jaxtrain.data import rows as rows_module
from jaxtrain.errors import DataError
from tests.data.test_packing import LENGTHS, positions_of
from tests.factories import digest, make_dataset, make_documents


def one_by_one(lengths: npt.ArrayLike, sequence: int) -> list[int]:
    """The free room of each row, rising, when each piece is placed by itself as the definition says."""
    pieces = []
    for length in np.asarray(lengths).tolist():
        left = max(length - 1, 0)
        while left:
            pieces.append(min(left, sequence))
            left -= pieces[-1]
    rooms: list[int] = []
    for piece in sorted(pieces, reverse=True):
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else sequence) - piece)
    return sorted(rooms)


def free_rooms(plan: BestFitPlan) -> list[int]:
    return sorted(plan.sequence - sum(piece.length for piece in plan.pieces(row)) for row in range(len(plan)))


@pytest.mark.parametrize("sequence", [1, 4, 16, 1000])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_token_with_a_successor_is_an_input_exactly_once(lengths: list[int], sequence: int) -> None:
    plan = BestFitPlan(place_best_fit(lengths, sequence), sequence)
    expected = [(document, place) for document, length in enumerate(lengths) for place in range(length - 1)]
    assert sorted(positions_of(plan)) == expected
    assert plan.tokens == len(expected)
    assert all(0 < sum(piece.length for piece in plan.pieces(row)) <= sequence for row in range(len(plan)))


@pytest.mark.parametrize("sequence", [1, 2, 3, 7, 16, 50])
def test_placing_all_pieces_of_a_length_at_once_is_best_fit_decreasing(sequence: int) -> None:
    random = np.random.default_rng(sequence)
    for _ in range(40):
        lengths = random.integers(0, random.integers(2, 3 * sequence + 3), random.integers(0, 80))
        assert free_rooms(BestFitPlan(place_best_fit(lengths, sequence), sequence)) == one_by_one(lengths, sequence)


def test_only_documents_longer_than_a_row_are_cut_and_rows_are_nearly_full() -> None:
    lengths = np.random.default_rng(0).integers(2, 300, 5000)
    plan = BestFitPlan(place_best_fit(lengths, 128), 128)
    pieces = [piece for row in range(len(plan)) for piece in plan.pieces(row)]
    for piece in pieces:
        if lengths[piece.document] - 1 <= 128:
            assert (piece.offset, piece.length) == (0, lengths[piece.document] - 1)
        else:
            assert piece.offset % 128 == 0
    assert plan.tokens / (len(plan) * 128) > 0.99
    stream = RowPlan(lengths, 128, packed=True)
    cut = len([piece for row in range(len(stream)) for piece in stream.pieces(row)]) - len(lengths)
    assert len(pieces) - len(lengths) < 0.65 * cut, "fewer truncations than one stream has"


def test_rows_follow_the_documents() -> None:
    plan = BestFitPlan(place_best_fit([9, 3, 9, 3, 9, 3], 8), 8)
    first = [plan.pieces(row)[0].document for row in range(len(plan))]
    assert first == sorted(first) == [0, 1, 2, 4]
    assert [piece.document for piece in plan.pieces(1)] == [1, 3, 5]


def test_no_document_of_two_tokens_gives_no_row() -> None:
    plan = BestFitPlan(place_best_fit([1, 0, 1], 8), 8)
    assert (len(plan), plan.tokens) == (0, 0)


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_outside_the_plan_is_an_error(row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of 4"):
        BestFitPlan(place_best_fit([9, 3, 9, 3, 9, 3], 8), 8).pieces(row)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_dataset(tmp_path / "data", make_documents([3, 30, 9, 2, 14, 55, 5, 1, 2, 7])).directory


def table(data: Path, sequence: int = 16) -> RowTable:
    return RowTable(open_dataset(data), "train", sequence, packed="best_fit", vocab=256)


def assembled(rows: RowTable) -> str:
    return digest([rows.assemble(np.arange(len(rows)))])


def plans(data: Path) -> list[Path]:
    return sorted(data.glob("*.plan"))


def test_the_plan_is_computed_once_and_read_ever_after(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = assembled(table(data))
    assert [path.name.startswith("train-best-fit-") for path in plans(data)] == [True]
    monkeypatch.setattr("jaxtrain.data.best_fit.place_best_fit", lambda *_: pytest.fail("computed again"))
    assert assembled(table(data)) == first


def test_each_sequence_and_each_set_of_lengths_has_a_plan_of_its_own(data: Path, tmp_path: Path) -> None:
    other = make_dataset(tmp_path / "other", make_documents([4, 30, 9])).directory
    for sequence in (16, 17, 16):
        table(data, sequence)
    table(other)
    assert len(plans(data)) == 2
    assert not {path.name for path in plans(data)} & {path.name for path in plans(other)}


@pytest.mark.parametrize("damage", [lambda content: content[:-1], lambda content: b"", lambda c: b"?" + c[1:]])
def test_a_damaged_plan_is_computed_again(data: Path, damage, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    first = assembled(table(data))
    (path,) = plans(data)
    before = path.read_bytes()
    path.write_bytes(damage(before))
    assert assembled(table(data)) == first
    assert path.read_bytes() == before


def test_a_plan_is_not_made_of_lengths_that_are_not_those_that_were_written(data: Path) -> None:
    path = data / "train-lengths.npy"
    path.write_bytes(path.read_bytes()[:-8] + path.read_bytes()[-4:] + path.read_bytes()[-8:-4])  # the sums stay
    with pytest.raises(DataError, match=r"train-lengths\.npy: the checksum differs"):
        table(data)
    assert not plans(data)


def test_where_it_cannot_be_stored_it_is_computed_with_a_warning(
    data: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read_only(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("jaxtrain.data.best_fit.replace_bytes", read_only)
    with caplog.at_level(logging.WARNING):
        rows = table(data)
    assert "can't be stored (Read-only file system)" in caplog.text
    monkeypatch.undo()
    assert assembled(rows) == assembled(table(data))


def test_rows_hold_what_the_plan_says(data: Path) -> None:
    rows = table(data)
    batch = rows.assemble(np.arange(len(rows)))
    assert batch["weights"].sum() == rows.plan.tokens == 118
    assert rows.fill == 118 / (16 * len(rows))
    for row in range(len(rows)):
        pieces = rows.plan.pieces(row)
        assert batch["segments"][row].max() == len(pieces)
        expected = [
            open_dataset(data).read("train", piece.document)[piece.offset : piece.offset + piece.length]
            for piece in pieces
        ]
        assert batch["tokens"][row][batch["segments"][row] > 0].tolist() == np.concatenate(expected).tolist()


def test_a_copy_in_a_worker_has_the_same_rows(data: Path) -> None:
    import pickle

    rows = table(data)
    assert assembled(pickle.loads(pickle.dumps(rows))) == assembled(rows)
    assert isinstance(rows.plan, rows_module.BestFitPlan)


def test_millions_of_documents_take_few_steps() -> None:
    """The work goes with the lengths that occur, not with the documents: counted, not timed."""
    placed: list[int] = []

    class Counting(rows_counter()):  # type: ignore[misc]
        def place(self, length: int, count: int) -> npt.NDArray[np.int32]:
            placed.append(count)
            return super().place(length, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxtrain.data.best_fit._Rows", Counting)
        lengths = np.random.default_rng(0).integers(2, 130, 1_000_000)
        plan = BestFitPlan(place_best_fit(lengths, 128), 128)
    assert len(placed) <= 128
    assert sum(placed) == 1_000_000 + int((lengths > 129).sum())
    assert plan.tokens == int(lengths.sum()) - len(lengths)


def rows_counter() -> type:
    from jaxtrain.data.best_fit import _Rows

    return _Rows
