from collections import Counter

import numpy as np
import pytest

from jaxtrain.data import Piece, RowPlan

LENGTHS = [
    [5],
    [1, 1, 4, 0, 2, 1],
    [0, 9, 1, 1, 9, 0, 0],
    [33, 2, 3, 64, 17, 1, 2],
    np.random.default_rng(0).integers(0, 40, 200).tolist(),
]


def positions_of(plan: RowPlan) -> list[tuple[int, int]]:
    return [
        (document, offset + step)
        for row in range(len(plan))
        for document, offset, length in plan.pieces(row)
        for step in range(length)
    ]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("sequence", [1, 4, 16, 1000])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_every_token_with_a_successor_is_an_input_exactly_once(lengths: list[int], sequence: int, packed: bool) -> None:
    plan = RowPlan(lengths, sequence, packed)
    expected = [(document, place) for document, length in enumerate(lengths) for place in range(length - 1)]
    assert positions_of(plan) == expected
    assert plan.tokens == len(expected)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_rows_are_full_but_the_last(lengths: list[int]) -> None:
    plan = RowPlan(lengths, 4, packed=True)
    filled = [sum(piece.length for piece in plan.pieces(row)) for row in range(len(plan))]
    assert filled[:-1] == [4] * (len(plan) - 1)
    assert 0 < filled[-1] <= 4


@pytest.mark.parametrize("lengths", LENGTHS)
def test_unpacked_rows_hold_one_document_each(lengths: list[int]) -> None:
    plan = RowPlan(lengths, 4, packed=False)
    assert all(len(plan.pieces(row)) == 1 for row in range(len(plan)))
    rows = Counter(plan.pieces(row)[0].document for row in range(len(plan)))
    assert rows == {document: -(-(n - 1) // 4) for document, n in enumerate(lengths) if n > 1}


def test_a_row_lists_its_pieces_in_order() -> None:
    plan = RowPlan([3, 1, 6, 4], 4, packed=True)
    rows = [plan.pieces(row) for row in range(len(plan))]
    assert rows == [[Piece(0, 0, 2), Piece(2, 0, 2)], [Piece(2, 2, 3), Piece(3, 0, 1)], [Piece(3, 1, 2)]]


def test_documents_of_fewer_than_two_tokens_give_no_row() -> None:
    for packed in (True, False):
        assert len(RowPlan([1, 0, 1], 8, packed)) == 0
        assert RowPlan([1, 0, 1], 8, packed).tokens == 0


def test_sums_beyond_32_bits_are_right() -> None:
    plan = RowPlan(np.full(3, 2**31 - 1, np.int32), 8192, packed=True)
    assert plan.tokens == 3 * (2**31 - 2)
    assert len(plan) == -(-plan.tokens // 8192)
    assert plan.pieces(len(plan) - 1)[-1].document == 2


@pytest.mark.parametrize("row", [-1, 3])
def test_a_row_outside_the_plan_is_an_error(row: int) -> None:
    with pytest.raises(IndexError, match=f"row {row} of 3"):
        RowPlan([3, 1, 6, 4], 4, packed=True).pieces(row)
