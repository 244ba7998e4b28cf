"""Intervals and blocks against the square of what is visible, written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.visibility import Visit, intervals, key_blocks, query_blocks

LENGTH = 64
SEGMENTS = {
    "one document": [LENGTH],
    "edges on blocks": [16, 32, 16],
    "edges inside blocks": [7, 1, 30, 9, 17],
    "documents of one token": [1] * LENGTH,
}


def square(lengths: list[int], window: int | None) -> np.ndarray:
    """[queries, keys]: which query sees which key."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :]
    return (document[:, None] == document[None, :]) & (distance >= 0) & (distance < (window or LENGTH))


def segments(lengths: list[int]) -> jnp.ndarray:
    """One row of documents numbered from 1, the last of them padding."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(np.where(ids == len(lengths), 0, ids))[None]


def visited(visit: Visit, block: int, blocks: int, masked: bool) -> list[int]:
    """The blocks that block number `block` visits, with or without a mask."""
    begin, whole_begin, whole_end, end = (int(each[0, block]) for each in visit)
    assert 0 <= begin <= whole_begin <= whole_end <= end <= blocks
    return [i for i in range(begin, end) if (not whole_begin <= i < whole_end) == masked]


@pytest.mark.parametrize("window", [None, 1, 11, 1000])
@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
def test_intervals_are_what_is_visible(lengths: list[int], window: int | None) -> None:
    first_key, last_query = intervals(segments(lengths), window)
    position, want = np.arange(LENGTH), square(lengths, window)
    np.testing.assert_array_equal((position >= first_key[0][:, None]) & (position <= position[:, None]), want)
    np.testing.assert_array_equal((position >= position[:, None]) & (position <= last_query[0][:, None]), want.T)


@pytest.mark.parametrize(("queries", "keys"), [(16, 16), (16, 8), (8, 32)])
@pytest.mark.parametrize("window", [None, 11, 16])
@pytest.mark.parametrize("lengths", SEGMENTS.values(), ids=SEGMENTS)
def test_exactly_the_blocks_with_something_visible_are_visited(
    lengths: list[int], window: int | None, queries: int, keys: int
) -> None:
    spans = intervals(segments(lengths), window)
    seen = square(lengths, window).reshape(LENGTH // queries, queries, LENGTH // keys, keys)
    some, whole = seen.any((1, 3)), seen.all((1, 3))
    of_queries = key_blocks(spans.first_key, queries, keys)
    of_keys = query_blocks(spans.last_query, keys, queries)
    for visit, without_mask, with_mask in (
        (of_queries, whole, some & ~whole),
        (of_keys, whole.T, (some & ~whole).T),
    ):
        for block in range(len(without_mask)):
            others = without_mask.shape[1]
            assert visited(visit, block, others, masked=False) == np.flatnonzero(without_mask[block]).tolist()
            assert visited(visit, block, others, masked=True) == np.flatnonzero(with_mask[block]).tolist()


def test_cost_follows_the_squares_of_the_documents_lengths() -> None:
    def visits(lengths: list[int]) -> int:
        visit = key_blocks(intervals(segments(lengths), None).first_key, 4, 4)
        return int((visit.end - visit.begin).sum())

    assert visits([64]) == 16 * 17 // 2
    assert visits([32, 32]) == 2 * 8 * 9 // 2
    assert visits([16] * 4) == 4 * 4 * 5 // 2
