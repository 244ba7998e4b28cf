"""The first pass: each unit's documents are tokenised and written as runs, sorted by the key that shuffles them.

    units/00012.json                what was found; written last, so a unit is done or has to be done again
    units/train-00012-000.tokens    token ids, little-endian, one document after the other
    units/train-00012-000.npy       uint64 [2, documents]: the key of each, rising, and where its tokens end

A document's key and split are hashes, so they depend neither on the units nor on who does them: merging all runs by key
gives the same shuffled order always.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxtrain.data.dataset import sha256_of
from jaxtrain.data.prepare.documents import Piece, read_unit
from jaxtrain.data.prepare.sources import Unit
from jaxtrain.data.writer import save_array, sync
from jaxtrain.files import replace_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPLITS = ("train", "held_out")
TRAIN, HELD_OUT = 0, 1
FORMAT = 1
"""Of the runs; another one is not gone on with."""
LONGEST_DOCUMENT = 1 << 20
"""Tokens; a longer document is stored as several, since a row reads the whole of each document that it needs."""

_RUN_TOKENS = 1 << 24
_CHARACTERS_AT_ONCE = 1 << 18
_PIECES_AT_ONCE = 256


@dataclass(frozen=True)
class Rules:
    """What decides where a document goes, and how it is read."""

    text_key: str
    skip_invalid: bool
    held_out: float
    seed: int

    def split(self, text: str) -> int:
        """`TRAIN` or `HELD_OUT`, by a hash of the beginning of the text, so that equal documents stay together."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return HELD_OUT if int.from_bytes(digest, "big") / 2**64 < self.held_out else TRAIN

    def key(self, file: str, position: int) -> int:
        """The document's place in the shuffled order, of 2⁶⁴."""
        digest = hashlib.blake2b(f"{self.seed}\0{file}\0{position}".encode("utf-8", "surrogateescape"), digest_size=8)
        return int.from_bytes(digest.digest(), "big")


@dataclass
class Counts:
    """What was found in some units."""

    documents: int = 0
    empty: int = 0
    invalid: int = 0

    def __iadd__(self, other: "Counts") -> "Counts":
        self.documents += other.documents
        self.empty += other.empty
        self.invalid += other.invalid
        return self


def training_texts(units: Sequence[Unit], rules: Rules, most: int) -> Iterator[str]:
    """Text to train a tokenizer on: what isn't held out, `most` bytes in all, of each unit its share from its start."""
    total = sum(unit.bytes for unit in units)
    for unit in units:
        left = most * unit.bytes // max(total, 1)
        split: int | None = None
        for piece in read_unit(unit, rules.text_key, rules.skip_invalid):
            if piece.text is not None:
                split = rules.split(piece.text) if split is None else split
                if split == TRAIN:
                    yield piece.text[:left]
                    left -= len(piece.text.encode())
            if piece.last:
                split = None
            if left <= 0:
                break


@dataclass(frozen=True)
class UnitRecord:
    """A finished unit: what was found in it, and its files."""

    counts: Counts
    files: tuple[str, ...]


@dataclass(frozen=True)
class TokeniseUnits:
    """The first pass, to be done by several processes.

    Attributes:
        end: the id that ends a document.
        dtype: of the stored ids.
        folder: where the runs go.
        made_by: the rest of what the runs depend on.
    """

    units: tuple[Unit, ...]
    rules: Rules
    tokenizer: Path
    end: int
    dtype: str
    folder: Path
    made_by: str

    def __call__(self, index: int, count: int) -> Iterator[UnitRecord]:
        """The records of the units index, index+count, …, each made now or found in order.

        Raises:
            ConfigError: a file can't be read or holds something invalid.
        """
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(self.tokenizer))
        tokenizer.encode_special_tokens = True  # text that spells `<|end|>` does not end a document
        for unit in self.units[index::count]:
            yield self._finished(unit) or self._tokenise(unit, tokenizer)

    def _finished(self, unit: Unit) -> UnitRecord | None:
        try:
            description = json.loads(self._marker(unit).read_text())
            counts, files = Counts(**description["counts"]), description["files"]
            if (
                description["made_by"] == self._identity(unit)
                and (self.rules.skip_invalid or not counts.invalid)
                and all(sha256_of(self.folder / name) == checksum for name, checksum in files.items())
            ):
                return UnitRecord(counts, (self._marker(unit).name, *files))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # never finished, or torn by a crash: it is done again
        return None

    def _tokenise(self, unit: Unit, tokenizer: "Tokenizer") -> UnitRecord:
        writer = _RunWriter(self.folder, unit.number, np.dtype(self.dtype).newbyteorder("<"))
        pieces = read_unit(unit, self.rules.text_key, self.rules.skip_invalid)
        counts = _tokenise(pieces, self.rules, tokenizer, self.end, writer)
        files = {name: sha256_of(self.folder / name) for name in writer.close()}
        description = {"made_by": self._identity(unit), "counts": vars(counts), "files": files}
        replace_file(self._marker(unit), json.dumps(description))
        return UnitRecord(counts, (self._marker(unit).name, *files))

    def _identity(self, unit: Unit) -> list[Any]:
        # Whether invalid documents are passed over matters only where there are some.
        rules = [self.rules.text_key, self.rules.held_out, self.rules.seed]
        return [FORMAT, self.made_by, rules, unit.identity]

    def _marker(self, unit: Unit) -> Path:
        return self.folder / f"{unit.number:05d}.json"


def _tokenise(pieces: Iterable[Piece], rules: Rules, tokenizer: "Tokenizer", end: int, writer: "_RunWriter") -> Counts:
    counts = Counts()
    current: _Document | None = None
    for batch in _batched(pieces):
        encodings = tokenizer.encode_batch_fast([piece.text or "" for piece in batch], add_special_tokens=False)
        for piece, encoding in zip(batch, encodings, strict=True):
            if piece.text is None:
                counts.invalid += 1
                continue
            if current is None:
                current = _Document(rules.key(piece.file, piece.position), rules.split(piece.text))
            current.blank &= not piece.text.strip()
            current.tokens = np.append(current.tokens, np.array(encoding.ids, np.int64))
            while len(current.tokens) >= LONGEST_DOCUMENT:
                writer.add(current.key, current.split, current.tokens[:LONGEST_DOCUMENT])
                current.tokens = current.tokens[LONGEST_DOCUMENT:]
            if piece.last:
                counts.documents += not current.blank
                counts.empty += current.blank
                if not current.blank:
                    writer.add(current.key, current.split, np.append(current.tokens, end))
                current = None
    return counts


@dataclass
class _Document:
    """A document of which more pieces may come."""

    key: int
    split: int
    tokens: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    blank: bool = True


def _batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Enough pieces at a time to keep the tokenizer busy, few enough to be held."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text or "")
        if characters >= _CHARACTERS_AT_ONCE or len(batch) == _PIECES_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _RunWriter:
    """Collects documents and writes a run when there are enough of them."""

    def __init__(self, folder: Path, unit: int, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self._unit = unit
        self._dtype = dtype
        self._tokens: list[npt.NDArray[Any]] = []
        self._index: list[tuple[int, int, int]] = []
        self._held = 0
        self._written = 0
        self._files: list[str] = []

    def add(self, key: int, split: int, tokens: npt.NDArray[np.int64]) -> None:
        """Takes a document, or a part of a long one: parts keep their order, since they have the same key."""
        self._tokens.append(tokens.astype(self._dtype))
        self._index.append((key, len(tokens), split))
        self._held += len(tokens)
        if self._held >= _RUN_TOKENS:
            self._write()

    def close(self) -> list[str]:
        """Writes what is left; returns the names of all files."""
        self._write()
        return self._files

    def _write(self) -> None:
        index = np.array(self._index, np.uint64).reshape(-1, 3)
        for split, split_name in enumerate(SPLITS):
            own = np.flatnonzero(index[:, 2] == split)
            if not len(own):
                continue
            own = own[np.argsort(index[own, 0], kind="stable")]
            name = f"{split_name}-{self._unit:05d}-{self._written:03d}"
            tokens, table = self._folder / f"{name}.tokens", self._folder / f"{name}.npy"
            tokens.write_bytes(np.concatenate([self._tokens[place] for place in own]).data)
            save_array(table, np.stack([index[own, 0], np.cumsum(index[own, 1])]))
            sync(tokens)
            sync(table)
            self._files += [tokens.name, table.name]
        self._written += bool(self._index)
        self._tokens, self._index, self._held = [], [], 0
