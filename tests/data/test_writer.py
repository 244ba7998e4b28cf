from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxtrain.data import open_dataset, write_dataset
from jaxtrain.errors import ConfigError, DataError
from tests.factories import byte_tokenizer, make_dataset


@pytest.mark.parametrize("token", [-1, 256, 70_000])
def test_an_id_outside_the_tokenizers_is_refused(tmp_path: Path, token: int) -> None:
    with pytest.raises(DataError, match=f"split train, document 1: token id {token} is outside the tokenizer's 256"):
        make_dataset(tmp_path / "data", [[1, 2], [3, token]])
    assert not list(tmp_path.glob("data")) + list(tmp_path.glob("*.partial"))


def test_ids_that_are_not_whole_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="document 0: token ids must be whole numbers, not float64"):
        make_dataset(tmp_path / "data", [[1, 2.5]])  # type: ignore[list-item]


@pytest.mark.parametrize("document", [[1, 2], []])
def test_a_document_must_end_with_the_end_of_document_id(tmp_path: Path, document: list[int]) -> None:
    def write(documents: list[list[int]]) -> None:
        write_dataset(tmp_path / "data", {"train": documents}, byte_tokenizer(), 0, source={})

    with pytest.raises(DataError, match="document 1: must end with the end-of-document id 0"):
        write([[1, 0], document])
    write([[1, 0]])
    assert open_dataset(tmp_path / "data").manifest.tokenizer.end_of_document == 0


def test_the_stored_tokenizer_is_the_one_that_was_given(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", [[1, 2]], vocab=300)
    tokenizer = type(byte_tokenizer()).from_file(str(dataset.directory / dataset.manifest.tokenizer.file))
    assert tokenizer.encode("a é").ids == list("a é".encode())
    assert tokenizer.decode(list("a é".encode())) == "a é"
    assert dataset.manifest.tokenizer.vocab_size == tokenizer.get_vocab_size() == 300


def test_a_data_set_is_never_overwritten(tmp_path: Path) -> None:
    before = make_dataset(tmp_path / "data", [[1, 2]])
    with pytest.raises(ConfigError, match="data: there is a data set already"):
        make_dataset(tmp_path / "data", [[3, 4]])
    assert open_dataset(tmp_path / "data").manifest_hash == before.manifest_hash


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="data: not empty and not a data set"):
        make_dataset(tmp_path / "data", [[1, 2]])
    assert (tmp_path / "data" / "thesis.tex").read_text() == "mine"


def test_an_empty_directory_is_filled(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert make_dataset(tmp_path / "data", [[1, 2]]).read("train", 0).tolist() == [1, 2]


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "data.partial").mkdir()
    (tmp_path / "data.partial" / "train-00007").write_text("half")
    dataset = make_dataset(tmp_path / "data", [[1, 2]])
    dataset.verify()
    named = {"manifest.json", *(record.file for record in dataset.manifest.files())}
    assert {path.name for path in (tmp_path / "data").iterdir()} == named
    assert not (tmp_path / "data.partial").exists()


def test_an_error_half_way_leaves_nothing_behind(tmp_path: Path) -> None:
    def documents() -> Iterator[list[int]]:
        yield [1, 2]
        assert (tmp_path / "data.partial").is_dir()
        raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        make_dataset(tmp_path / "data", documents())  # type: ignore[arg-type]
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "data.partial").exists()


def test_a_shard_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    def documents() -> Iterator[list[int]]:
        (tmp_path / "data.partial").rename(tmp_path / "moved")  # so that no shard can be made
        yield [1, 2]

    with pytest.raises(ConfigError, match=r"data.partial/train-00000: can't be written: .*No such file"):
        make_dataset(tmp_path / "data", documents())  # type: ignore[arg-type]
