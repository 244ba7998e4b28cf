import errno
import hashlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtrain.data import Dataset, open_dataset
from jaxtrain.errors import ConfigError, DataError
from tests.factories import edit_manifest, make_dataset, make_documents

LENGTHS = [5, 1, 0, 8, 3, 3]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "data", make_documents(LENGTHS), shard_tokens=6)


def test_documents_come_back_in_their_order_over_all_shards(dataset: Dataset) -> None:
    assert [shard.documents for shard in dataset.manifest.splits["train"].shards] == [2, 2, 2]
    read = [dataset.read("train", number).tolist() for number in range(len(LENGTHS))]
    assert read == make_documents(LENGTHS)
    assert dataset.lengths("train").tolist() == LENGTHS
    assert dataset.read("held_out", 0).tolist() == [1, 2, 3, 4]


def test_large_vocabularies_are_stored_in_four_bytes(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", [[1, 65_536, 65_599]], vocab=65_600)
    assert dataset.manifest.token_dtype == "uint32"
    assert dataset.read("train", 0).tolist() == [1, 65_536, 65_599]


@pytest.mark.parametrize("document", [-1, 6])
def test_a_document_outside_the_split_is_an_error(dataset: Dataset, document: int) -> None:
    with pytest.raises(IndexError, match=f"document {document} of split train, which has 6"):
        dataset.read("train", document)


def test_the_manifest_hash_is_of_the_manifests_bytes(dataset: Dataset) -> None:
    content = (dataset.directory / "manifest.json").read_bytes()
    assert dataset.manifest_hash == hashlib.sha256(content).hexdigest()
    assert open_dataset(dataset.directory).manifest_hash == dataset.manifest_hash


def test_a_pickled_copy_opens_files_of_its_own(dataset: Dataset) -> None:
    dataset.read("train", 3)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.read("train", 3).tolist() == dataset.read("train", 3).tolist()


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such directory.*name the right one"):
        open_dataset(tmp_path / "nowhere")


def test_a_manifest_that_can_not_be_read_is_named(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(ConfigError, match=r"manifest\.json: can't be read: Permission denied"):
        open_dataset(dataset.directory)


def test_a_directory_without_a_manifest_is_no_data_set(dataset: Dataset) -> None:
    (dataset.directory / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"not a prepared data set \(manifest.json is missing\)"):
        open_dataset(dataset.directory)


def test_another_format_version_is_named(dataset: Dataset) -> None:
    edit_manifest(dataset.directory, lambda manifest: manifest.update(version=7))
    with pytest.raises(DataError, match=r"manifest.json: format version 7, this jaxtrain reads version 1"):
        open_dataset(dataset.directory)


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 1}', "[" * 100_000], ids=["torn", "list", "short", "deep"])
def test_a_damaged_manifest_is_an_error(dataset: Dataset, content: str) -> None:
    (dataset.directory / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest.json: .*prepare it again"):
        open_dataset(dataset.directory)


@pytest.mark.parametrize("file", ["tokenizer.json", "train-lengths.npy", "train-00001-of-00003.arrayrecord"])
def test_a_missing_or_shortened_file_is_found_at_opening(dataset: Dataset, file: str) -> None:
    path = dataset.directory / file
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"{file}: {len(content) - 1} bytes, the manifest says {len(content)}"):
        open_dataset(dataset.directory)
    path.unlink()
    with pytest.raises(DataError, match=f"{file}: missing, though the manifest names it"):
        open_dataset(dataset.directory)


def more_documents(manifest: Any) -> None:
    manifest["splits"]["train"]["documents"] += 1


def tokens_elsewhere(manifest: Any) -> None:
    shards = manifest["splits"]["train"]["shards"]
    shards[0]["tokens"] -= 1
    shards[1]["tokens"] += 1


def fewer_tokens(manifest: Any) -> None:
    manifest["splits"]["train"]["tokens"] -= 1


@pytest.mark.parametrize("change", [more_documents, tokens_elsewhere, fewer_tokens])
def test_counts_that_disagree_are_found_at_opening(dataset: Dataset, change: Any) -> None:
    edit_manifest(dataset.directory, change)
    with pytest.raises(DataError, match=r"train-lengths.npy: the manifest counts other documents or tokens"):
        open_dataset(dataset.directory)


def flip_a_bit(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_verify_finds_a_changed_bit(dataset: Dataset) -> None:
    dataset.verify()
    flip_a_bit(dataset.directory / "train-00001-of-00003.arrayrecord", -1)
    with pytest.raises(DataError, match=r"train-00001-of-00003.arrayrecord: the checksum differs"):
        open_dataset(dataset.directory).verify()


def test_reading_a_damaged_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", make_documents([3000] * 3))
    path = tmp_path / "data" / "train-00000-of-00001.arrayrecord"
    flip_a_bit(path, 5000)
    damaged = []
    for number in range(3):
        try:
            assert dataset.read("train", number).tolist() == make_documents([3000] * 3)[number]
        except DataError as error:
            damaged.append(str(error))
    assert len(damaged) == 1
    assert "train-00000-of-00001.arrayrecord: record 1 can't be read" in damaged[0]


def test_a_lengths_file_that_numpy_cannot_read_is_an_error(dataset: Dataset) -> None:
    path = dataset.directory / "train-lengths.npy"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DataError, match=r"train-lengths.npy: can't be read"):
        open_dataset(dataset.directory)


def test_counts_are_taken_from_the_lengths(dataset: Dataset) -> None:
    train = dataset.manifest.splits["train"]
    assert (train.documents, train.tokens) == (len(LENGTHS), int(np.sum(LENGTHS)))
