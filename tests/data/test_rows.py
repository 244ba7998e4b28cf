import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from jaxtrain.data import FILLER, RowTable
from jaxtrain.errors import ConfigError, DataError
from tests.factories import digest, make_dataset, make_documents

LENGTHS = [3, 1, 9, 2, 14, 30, 5, 1, 2, 7]


class SignedDocuments:
    """A data set in memory that can hold what the stored one can't: a negative id."""

    def __init__(self, *documents: list[int]) -> None:
        self.documents = documents

    def lengths(self, split: str) -> npt.NDArray[np.int32]:
        return np.array([len(document) for document in self.documents], np.int32)

    def read(self, split: str, document: int) -> npt.NDArray[np.int64]:
        return np.array(self.documents[document])

    def where(self, split: str, document: int) -> str:
        return f"memory: split {split}, document {document}"


def test_a_packed_row_is_what_it_should_be(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", [[10, 11, 12], [20, 21, 22, 23], [30, 31]])
    batch = RowTable(dataset, "train", 4, packed=True, vocab=256).assemble(np.array([1, FILLER, 0]))
    assert batch["tokens"].tolist() == [[22, 30, 0, 0], [0] * 4, [10, 11, 20, 21]]
    assert batch["targets"].tolist() == [[23, 31, 0, 0], [0] * 4, [11, 12, 21, 22]]
    assert batch["segments"].tolist() == [[1, 2, 0, 0], [0] * 4, [1, 1, 2, 2]]
    assert batch["positions"].tolist() == [[0, 0, 0, 0], [0] * 4, [0, 1, 0, 1]]
    assert batch["weights"].tolist() == [[1, 1, 0, 0], [0] * 4, [1, 1, 1, 1]]
    assert {name: values.dtype for name, values in batch.items()} == {
        "tokens": np.int32,
        "targets": np.int32,
        "segments": np.int32,
        "positions": np.int32,
        "weights": np.float32,
    }


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("shard_tokens", [1, 20, 1000])
def test_segments_positions_and_targets_never_cross_documents(tmp_path: Path, packed: bool, shard_tokens: int) -> None:
    # Ids tell document and place: a target from elsewhere, or a position that runs on, shows.
    documents = [[100 * number + place for place in range(length)] for number, length in enumerate(LENGTHS)]
    dataset = make_dataset(tmp_path / "data", documents, vocab=1024, shard_tokens=shard_tokens)
    table = RowTable(dataset, "train", 8, packed=packed, vocab=1024)
    batch = table.assemble(np.arange(len(table)))
    seen = []
    for row in range(len(table)):
        tokens, targets, segments, positions = (
            batch[name][row] for name in ("tokens", "targets", "segments", "positions")
        )
        for segment in range(1, segments.max() + 1):
            piece = segments == segment
            assert len(set(tokens[piece] // 100)) == 1
            assert (targets[piece] == tokens[piece] + 1).all()
            assert positions[piece].tolist() == list(range(piece.sum()))
            seen += tokens[piece].tolist()
        assert (batch["weights"][row] == (segments > 0)).all()
    assert seen == [token for document in documents for token in document[:-1]]


def test_the_weights_of_all_rows_count_all_targets_and_fillers_add_none(tmp_path: Path) -> None:
    table = RowTable(make_dataset(tmp_path / "data", make_documents(LENGTHS)), "train", 8, packed=True, vocab=256)
    rows = np.arange(len(table))
    weight = table.assemble(np.append(rows, [FILLER] * 4))["weights"].sum()
    assert weight == table.plan.tokens == sum(LENGTHS) - len(LENGTHS)


def test_an_id_beyond_the_models_vocabulary_is_an_error_that_names_it(tmp_path: Path) -> None:
    documents = make_documents([9] * 6)
    documents[4][5] = 300
    dataset = make_dataset(tmp_path / "data", documents, vocab=512, claimed_vocab=256, shard_tokens=18)
    table = RowTable(dataset, "train", 8, packed=True, vocab=256)
    table.assemble(np.array([0, 1, 2, 3, 5]))
    with pytest.raises(DataError) as error:
        table.assemble(np.array([4]))
    message = str(error.value)
    assert "token id 300" in message
    assert "model.vocab 256" in message
    assert "train-00002-of-00003.arrayrecord: split train, document 4 (record 0)" in message


def test_an_id_that_is_only_a_target_is_checked_too(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", [[1, 2, 300]], vocab=512, claimed_vocab=256)
    with pytest.raises(DataError, match="token id 300"):
        RowTable(dataset, "train", 8, packed=True, vocab=256).assemble(np.array([0]))


def test_a_negative_id_is_an_error_that_names_it() -> None:
    table = RowTable(SignedDocuments([1, 2, 3], [4, -1, 5]), "train", 2, packed=True, vocab=256)
    table.assemble(np.array([0]))
    with pytest.raises(DataError, match=r"document 1 holds token id -1, outside model.vocab 256"):
        table.assemble(np.array([1]))


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", [[1, 2, 3]], vocab=260)
    with pytest.raises(ConfigError, match=r"model.vocab: 256, but the tokenizer of .* has 260 entries"):
        RowTable(dataset, "train", 8, packed=True, vocab=256)
    assert len(RowTable(dataset, "train", 8, packed=True, vocab=264)) == 1


def test_a_split_without_anything_to_predict_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", [[1], [2], []], held_out=[])
    for split in ("train", "held_out"):
        with pytest.raises(DataError, match=f"split {split} has no document of two or more tokens"):
            RowTable(dataset, split, 8, packed=True, vocab=256)
    with pytest.raises(ConfigError, match="no split 'validation', only train, held_out"):
        RowTable(dataset, "validation", 8, packed=True, vocab=256)


def test_a_document_shorter_than_its_stored_length_is_an_error(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", [[1, 2, 3], [4, 5, 6, 7]])
    np.save(dataset.directory / "train-lengths.npy", np.array([4, 3], np.int32))
    table = RowTable(dataset, "train", 8, packed=False, vocab=256)
    with pytest.raises(DataError, match=r"split train, document 0 \(record 0\): shorter than the stored length"):
        table.assemble(np.array([0]))


def test_an_unknown_row_is_an_error(tmp_path: Path) -> None:
    table = RowTable(make_dataset(tmp_path / "data", [[1, 2, 3]]), "train", 8, packed=True, vocab=256)
    for row in (1, -2):
        with pytest.raises(IndexError, match=f"row {row} of 1"):
            table.assemble(np.array([row]))


def test_a_pickled_copy_and_many_threads_read_the_same_rows(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", make_documents([50] * 40), shard_tokens=200)
    table = RowTable(dataset, "train", 8, packed=True, vocab=256)
    rows = [np.arange(start, len(table), 40) for start in range(40)]
    expected = [digest([table.assemble(ids)]) for ids in rows]
    copy = pickle.loads(pickle.dumps(table))
    with ThreadPoolExecutor(8) as threads:
        assert [digest([batch]) for batch in threads.map(copy.assemble, rows)] == expected
