"""From text to a data set: a tokenizer is trained, documents are split, shuffled, tokenised and written, once."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxtrain.data.dataset import Dataset, open_dataset
from jaxtrain.data.lock import exclusive
from jaxtrain.data.manifest import has_manifest
from jaxtrain.data.writer import write_locked
from jaxtrain.errors import ConfigError, refusing_os_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|end|>"
SMALLEST_VOCAB = 257
"""All 256 bytes and the end of a document."""

Report = Callable[[str, int, int], None]
"""Told of progress: what is being done, how much of it is done, and out of how much (0: nobody knows)."""

_SHUFFLE_SEED = 0
# Small enough that the quickstart's few megabytes fill several shards, as real data do.
_SHARD_TOKENS = 1_000_000
_TOKENISED_AT_ONCE = 32


class Text(NamedTuple):
    """One document. Its name decides whether it is held out, so it must not change between preparations."""

    name: str
    content: str


@dataclass(frozen=True)
class TextSource:
    """Where documents come from: `description` goes into the manifest, `documents` gives them in a fixed order."""

    name: str
    description: Mapping[str, Any]
    documents: Callable[[], Sequence[Text]]


def ensure_text_dataset(
    directory: Path | str, source: TextSource, vocab: int, held_out: float, report: Report | None = None
) -> Dataset:
    """Opens the data set of this source in `directory`, after preparing it if there is none.

    Any number of processes may call this at once: one prepares, the others wait for it. What a killed one left
    behind is removed.

    Args:
        directory: of the data set.
        source: the documents.
        vocab: entries that the tokenizer should have; it has fewer where the text doesn't hold enough repetitions.
        held_out: share of the documents that are kept from training: 0 or more, less than 1.
        report: told of progress.

    Raises:
        ConfigError: `vocab` or `held_out` is out of its range, or the data set in `directory` was made with others.
        DataError: the data set in `directory` is damaged.
    """
    directory = Path(directory).absolute()
    tell = report or (lambda what, done, total: None)
    if vocab < SMALLEST_VOCAB:
        raise ConfigError(f"data.vocab: {vocab} is too small: all bytes and {END_OF_DOCUMENT} need {SMALLEST_VOCAB}")
    if not 0 <= held_out < 1:
        raise ConfigError(f"data.held_out: {held_out} is no share of the documents: choose 0 or more and less than 1")
    if not has_manifest(directory):
        with (
            refusing_os_errors(f"data.dir={directory}", "choose a directory that can be written and has space"),
            exclusive(directory, waiting=lambda: tell(f"waiting for the process that prepares {directory}", 0, 0)),
        ):
            if not has_manifest(directory):  # it may have come while we waited
                _prepare(directory, source, vocab, held_out, tell)
    dataset = open_dataset(directory)
    _check_fits(dataset, {"name": source.name, "vocab": vocab, "held_out": held_out})
    return dataset


def _check_fits(dataset: Dataset, asked: Mapping[str, Any]) -> None:
    made_with = dataset.manifest.source
    for key, value in asked.items():
        if made_with.get(key) != value:
            name = "data.source" if key == "name" else f"data.{key}"
            raise ConfigError(
                f"{name}: {value}, but the data set in {dataset.directory} was made with {made_with.get(key)}: "
                "choose another data.dir or delete this one"
            )


def _prepare(directory: Path, source: TextSource, vocab: int, held_out: float, tell: Report) -> None:
    tell("reading documents", 0, 0)
    split = split_documents(source.documents(), held_out)
    for name, documents in split.items():
        if not documents and (name == "train" or held_out > 0):
            raise ConfigError(f"data.held_out: {held_out} leaves {name} without a document: choose another share")
    tokenizer = train_tokenizer([text.content for text in split["train"]], vocab, tell)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end is not None
    total = sum(map(len, split.values()))
    write_locked(
        directory,
        {
            "train": _tokenise(split["train"], tokenizer, end, 0, total, tell),
            "held_out": _tokenise(split["held_out"], tokenizer, end, len(split["train"]), total, tell),
        },
        tokenizer,
        end,
        {"name": source.name, "vocab": vocab, "held_out": held_out, **source.description},
        _SHARD_TOKENS,
    )


def split_documents(documents: Sequence[Text], held_out: float) -> dict[str, list[Text]]:
    """`train` and `held_out`, each in a shuffled order that is always the same.

    A document goes where the hash of its name says, so that adding others moves none.
    """
    split: dict[str, list[Text]] = {"train": [], "held_out": []}
    for text in documents:
        digest = hashlib.sha256(text.name.encode()).digest()
        share = int.from_bytes(digest[:8], "big") / 2**64
        split["held_out" if share < held_out else "train"].append(text)
    random = np.random.default_rng(_SHUFFLE_SEED)
    return {name: [texts[i] for i in random.permutation(len(texts))] for name, texts in split.items()}


def train_tokenizer(contents: Sequence[str], vocab: int, report: Report | None = None) -> "Tokenizer":
    """Byte-level BPE with at most `vocab` entries and the special token `<|end|>`; no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_counted(contents, "training the tokenizer", report), trainer, length=len(contents))
    return tokenizer


def _counted(contents: Sequence[str], what: str, report: Report | None) -> Iterator[str]:
    for number, content in enumerate(contents, start=1):
        yield content
        if report is not None:
            report(what, number, len(contents))


def _tokenise(
    documents: Sequence[Text], tokenizer: "Tokenizer", end: int, done: int, total: int, tell: Report
) -> Iterator[npt.NDArray[np.int64]]:
    for start in range(0, len(documents), _TOKENISED_AT_ONCE):
        batch = documents[start : start + _TOKENISED_AT_ONCE]
        for encoding in tokenizer.encode_batch([text.content for text in batch], add_special_tokens=False):
            yield np.array([*encoding.ids, end], np.int64)
        tell("writing documents", done + start + len(batch), total)
