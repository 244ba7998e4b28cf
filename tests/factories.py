"""Small data sets and tables for tests of every part."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxtrain.data import Batch, Dataset, open_dataset, write_dataset
from jaxtrain.data.manifest import MANIFEST_FILE


def make_dataset(
    directory: Path,
    train: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]] = ((1, 2, 3, 4),),
    vocab: int = 256,
    claimed_vocab: int | None = None,
    shard_tokens: int = 1_000_000,
) -> Dataset:
    """A prepared data set of exactly these token lists: no end-of-document id is added.

    `claimed_vocab` makes the manifest state another vocabulary size than the ids were checked against.
    """
    write_dataset(
        directory,
        {"train": train, "held_out": held_out},
        byte_tokenizer(vocab),
        end_of_document=None,
        source={"name": "test"},
        shard_tokens=shard_tokens,
    )
    if claimed_vocab is not None:
        edit_manifest(directory, lambda manifest: manifest["tokenizer"].update(vocab_size=claimed_vocab))
    return open_dataset(directory)


def make_documents(lengths: Sequence[int], vocab: int = 256, seed: int = 0) -> list[list[int]]:
    """Random documents of these lengths, ids from 1 to vocab-1."""
    random = np.random.default_rng(seed)
    return [random.integers(1, vocab, length).tolist() for length in lengths]


def byte_tokenizer(vocab: int = 256) -> Tokenizer:
    """One token a byte, whose id is the byte; ids from 256 on are names of their own."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in spelled)
    spelled.update({byte: chr(0x100 + count) for count, byte in enumerate(others)})
    entries = {spelled.get(number, f"<{number}>"): number for number in range(vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def edit_manifest(directory: Path, change: Any) -> None:
    """Lets `change` work on the manifest's values in place."""
    path = directory / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def digest(batches: Sequence[Batch]) -> str:
    """One number for all bytes, shapes and names of these batches."""
    total = hashlib.sha256()
    for batch in batches:
        for name in sorted(batch):
            total.update(f"{name} {batch[name].dtype} {batch[name].shape}".encode())
            total.update(np.ascontiguousarray(batch[name]).tobytes())
    return total.hexdigest()


class IdTable:
    """A table without data: each row holds its own id. Counts what is asked of it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.assembled = 0

    def __len__(self) -> int:
        return self.rows

    def assemble(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        self.assembled += len(row_ids)
        return {"value": row_ids * 10}


class FailingTable(IdTable):
    """Raises `error` where row `at` is asked for."""

    def __init__(self, rows: int, at: int, error: BaseException) -> None:
        super().__init__(rows)
        self.at = at
        self.error = error

    def assemble(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        if self.at in row_ids:
            raise self.error
        return super().assemble(row_ids)
