"""Rows of tokens, assembled when they are asked for."""

from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from jaxtrain.data.best_fit import BestFitPlan, place_best_fit, stored_best_fit
from jaxtrain.data.dataset import Dataset
from jaxtrain.data.packing import Piece, RowPlan
from jaxtrain.errors import ConfigError, DataError

FILLER = -1
"""The id of a row that isn't there: it completes a batch and weighs nothing."""

Batch = dict[str, npt.NDArray[Any]]
Packed = bool | Literal["best_fit"]
"""How documents share rows: cut out of one stream (True), not at all (False), or placed so that few are cut."""


class Table(Protocol):
    """Anything whose rows can be trained on.

    Must pickle, since data workers get a copy, and `assemble` must be a pure function that several threads may call.
    """

    def __len__(self) -> int:
        """Rows."""

    def assemble(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        """The rows of these ids in this order: each field `[rows, …]`; `FILLER` gives a row of weight 0."""


class Documents(Protocol):
    """What `RowTable` needs of a data set; `Dataset` is one."""

    def lengths(self, split: str) -> npt.NDArray[np.int32]: ...

    def read(self, split: str, document: int) -> npt.NDArray[Any]: ...

    def where(self, split: str, document: int) -> str: ...


def _plan(dataset: Dataset | Documents, split: str, sequence: int, packed: Packed) -> RowPlan | BestFitPlan:
    lengths = dataset.lengths(split)
    if packed != "best_fit":
        return RowPlan(lengths, sequence, packed)
    if not isinstance(dataset, Dataset):
        return BestFitPlan(place_best_fit(lengths, sequence), sequence)
    checksum = dataset.lengths_checksum(split)
    return BestFitPlan(stored_best_fit(dataset.directory, split, lengths, checksum, sequence), sequence)


class RowTable:
    """The rows of one split, packed or not.

    Args:
        dataset: where the documents come from.
        split: `train` or `held_out`.
        sequence: positions in a row, T.
        packed: several documents in one row, or one; `best_fit`: see `best_fit.py`.
        vocab: the model's vocabulary size.

    Raises:
        ConfigError: the data set has no such split, or its tokenizer has more entries than `vocab`.
        DataError: the split has no document of two tokens or more.
    """

    def __init__(self, dataset: Dataset | Documents, split: str, sequence: int, packed: Packed, vocab: int) -> None:
        self.dataset = dataset
        self.split = split
        self.vocab = vocab
        if isinstance(dataset, Dataset) and (entries := dataset.manifest.tokenizer.vocab_size) > vocab:
            raise ConfigError(
                f"model.vocab: {vocab}, but the tokenizer of {dataset.directory} has {entries} entries: "
                f"set model.vocab to at least {entries} or choose another data set"
            )
        self.packed = packed
        self.plan = _plan(dataset, split, sequence, packed)
        if not len(self.plan):
            raise DataError(f"split {split} has no document of two or more tokens: there is nothing to predict")

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers make the plan again, or read it: that is quicker than sending it.
        return RowTable, (self.dataset, self.split, self.plan.sequence, self.packed, self.vocab)

    def __len__(self) -> int:
        return len(self.plan)

    @property
    def fill(self) -> float:
        """The share of all positions that are counted targets."""
        return self.plan.tokens / (len(self.plan) * self.plan.sequence)

    def assemble(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        """The rows of these ids; `FILLER` gives zeros.

        Returns:
            `tokens`, `targets`, `segments`, `positions`: int32 [rows, T]; `weights`: float32 [rows, T]. The pieces of
            a row are segments 1, 2, …; positions restart in each; padding is 0 everywhere.

        Raises:
            IndexError: an id is neither a row nor `FILLER`.
            DataError: a token id is outside the model's vocabulary, or a document can't be read.
        """
        shape = (len(row_ids), self.plan.sequence)
        batch: Batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments", "positions")}
        batch["weights"] = np.zeros(shape, np.float32)
        for index, row in enumerate(row_ids):
            if row == FILLER:
                continue
            start = 0
            for segment, piece in enumerate(self.plan.pieces(int(row)), start=1):
                place = (index, slice(start, start + piece.length))
                window = self._window(piece)
                batch["tokens"][place] = window[:-1]
                batch["targets"][place] = window[1:]
                batch["segments"][place] = segment
                batch["positions"][place] = np.arange(piece.length)
                batch["weights"][place] = 1.0
                start += piece.length
        return batch

    def _window(self, piece: Piece) -> npt.NDArray[Any]:
        """The tokens of a piece and the target of its last one: [length + 1]."""
        window = self.dataset.read(self.split, piece.document)[piece.offset : piece.offset + piece.length + 1]
        if len(window) != piece.length + 1:
            where = self.dataset.where(self.split, piece.document)
            raise DataError(f"{where}: shorter than the stored length: prepare the data set again")
        if window.min() < 0 or window.max() >= self.vocab:
            outside = window[(window < 0) | (window >= self.vocab)][0]
            raise DataError(
                f"{self.dataset.where(self.split, piece.document)} holds token id {outside}, outside model.vocab "
                f"{self.vocab} (ids 0 to {self.vocab - 1}): choose model.vocab for these data, or prepare them again"
            )
        return window
