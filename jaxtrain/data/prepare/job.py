"""From files of text to a data set: planned, tokenised, shuffled and written, once, whatever is killed in between.

    DIRECTORY.lock               held by the process that prepares
    DIRECTORY.unfinished/        removed at the end
        tokenizer.json           trained or given, and of which work it is
        units/                   the first pass (runs.py)
        dataset/                 the second pass (shards.py), and at last the manifest; it becomes DIRECTORY

A killed preparation goes on where it stopped: a unit or a shard counts as done if its marker was made by the same work
and its files have the checksums that it names. Nothing of the result depends on the number of processes or units.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jaxtrain.data.dataset import Dataset, open_dataset, sha256_of
from jaxtrain.data.lock import exclusive
from jaxtrain.data.manifest import TOKENIZER_FILE, has_manifest
from jaxtrain.data.prepare.runs import SPLITS, Counts, Rules, TokeniseUnits, training_texts
from jaxtrain.data.prepare.shards import ShardPlan, WriteShards, join_lengths, plan_shards
from jaxtrain.data.prepare.sources import SourceFile, plan_units
from jaxtrain.data.prepare.tokenizer import (
    END_OF_DOCUMENT,
    LARGEST_VOCAB,
    SMALLEST_VOCAB,
    LoadedTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from jaxtrain.data.worker import Part, Workers
from jaxtrain.data.writer import SHARD_TOKENS, put_in_place, refuse_occupied, token_dtype, write_manifest
from jaxtrain.errors import ConfigError, JaxtrainError, refusing_os_errors
from jaxtrain.files import replace_file

Report = Callable[[str, int, int], None]
"""Told of progress: what is being done, how much of it is done, and out of how much (0: nobody knows)."""

TRAINING_BYTES = 1 << 27
"""Of text that a tokenizer is trained on."""

_MEGABYTE = 10**6
T = TypeVar("T")


@dataclass(frozen=True)
class Recipe:
    """What decides the bytes of a data set, beside its files.

    Attributes:
        rules: how documents are read, split and shuffled.
        vocab: entries of the tokenizer that is trained; fewer where the text doesn't hold enough repetitions.
        tokenizer: the one that is there instead: a `tokenizer.json` or a folder that holds one.
        end_of_document: its token that ends a document, where its folder doesn't tell.
        name: of the source, for the manifest.
        about: more for the manifest.
        shard_tokens: a new shard begins when the last one holds at least so many tokens.
    """

    rules: Rules
    vocab: int | None = None
    tokenizer: Path | None = None
    end_of_document: str | None = None
    name: str = "files"
    about: Mapping[str, Any] = field(default_factory=dict)
    shard_tokens: int = SHARD_TOKENS

    def __post_init__(self) -> None:
        if (self.vocab is None) == (self.tokenizer is None):
            raise ValueError("either a tokenizer is trained or one is there")
        if self.vocab is not None and self.vocab < SMALLEST_VOCAB:
            raise ConfigError(
                f"a vocabulary of {self.vocab} is too small: all bytes and {END_OF_DOCUMENT} need {SMALLEST_VOCAB}"
            )
        if self.vocab is not None and self.vocab > LARGEST_VOCAB:
            raise ConfigError(f"a vocabulary of {self.vocab} is too large: at most {LARGEST_VOCAB} entries are trained")
        if not 0 <= self.rules.held_out < 1:
            raise ConfigError(
                f"held_out {self.rules.held_out} is no share of the documents: choose 0 or more and less than 1"
            )

    def describe(self, files: Sequence[SourceFile]) -> dict[str, Any]:
        """What the manifest says of the source: two data sets with the same description are equal."""
        listing = json.dumps([[file.name, file.bytes] for file in files])
        tokenizer = self.tokenizer and (self.tokenizer / TOKENIZER_FILE if self.tokenizer.is_dir() else self.tokenizer)
        return {
            "name": self.name,
            **asdict(self.rules),
            "vocab": self.vocab,
            "tokenizer": tokenizer and sha256_of(tokenizer),
            "end_of_document": self.end_of_document,
            "shard_tokens": self.shard_tokens,
            "files": len(files),
            "bytes": sum(file.bytes for file in files),
            "listing": hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest(),
            **self.about,
        }


def prepare(
    directory: Path | str,
    files: Sequence[SourceFile],
    recipe: Recipe,
    workers: int = 1,
    report: Report | None = None,
    unit_bytes: int | None = None,
) -> Dataset:
    """Makes a data set, or goes on making it; one that is there already and was made the same way is opened.

    Any number of processes may call this at once: one prepares, the others wait for it.

    Args:
        workers: processes; 1 is this one. A program that uses more must guard its own start with
            `if __name__ == "__main__":`, since each worker imports it.
        unit_bytes: about how much is done before it is kept; see `plan_units`.

    Raises:
        ConfigError: the directory holds something else or can't be written, or the files can't be used.
        DataError: the data set in `directory` is damaged.
    """
    directory = Path(directory).absolute()
    tell = report or (lambda what, done, total: None)
    if recipe.tokenizer is not None:
        load_tokenizer(recipe.tokenizer, recipe.end_of_document)
    asked = recipe.describe(files)
    if not has_manifest(directory):
        with (
            refusing_os_errors(str(directory), "choose a directory that can be written and has space"),
            exclusive(directory, waiting=lambda: tell(f"waiting for the process that prepares {directory}", 0, 0)),
        ):
            if not has_manifest(directory):  # it may have come while we waited
                refuse_occupied(directory)
                _Preparation(directory, files, recipe, asked, workers, tell, unit_bytes).run()
    dataset = open_dataset(directory)
    refuse_other(dataset, asked)
    return dataset


def refuse_other(dataset: Dataset, asked: Mapping[str, Any]) -> None:
    """Raises ConfigError where a data set was made of other files or in another way; names what differs."""
    made = dataset.manifest.source
    differing = [f"{key} {made.get(key)}, not {value}" for key, value in asked.items() if made.get(key) != value]
    if differing:
        raise ConfigError(
            f"{dataset.directory}: holds a data set that was made with {'; '.join(differing)}: "
            "choose another directory or delete this one"
        )


class _Preparation:
    """One data set on its way; the caller holds the directory's lock."""

    def __init__(
        self,
        directory: Path,
        files: Sequence[SourceFile],
        recipe: Recipe,
        asked: Mapping[str, Any],
        workers: int,
        tell: Report,
        unit_bytes: int | None,
    ) -> None:
        self.directory = directory
        self.recipe = recipe
        self.asked = asked
        self.workers = workers
        self.tell = tell
        self.work = directory.with_name(directory.name + ".unfinished")
        self.units = plan_units(files, recipe.rules.text_key, unit_bytes)
        self.dataset = self.work / "dataset"

    def run(self) -> None:
        """From wherever an earlier one stopped to the end."""
        for folder in (self.work / "units", self.dataset):
            folder.mkdir(parents=True, exist_ok=True)
        tokenizer = self._tokenizer()
        counts = self._tokenise(tokenizer)
        plans = plan_shards(self.work / "units", self.recipe.shard_tokens)
        self._refuse_empty(plans, counts)
        records = self._write_shards(plans, token_dtype(tokenizer.vocab_size))
        splits = join_lengths(plans, records, self.work / "units", self.dataset)
        replace_file(self.dataset / TOKENIZER_FILE, tokenizer.tokenizer.to_str())
        named = {TOKENIZER_FILE, *(record.file for record in records), *(each.lengths.file for each in splits.values())}
        _keep_only(self.dataset, named)
        source = {**self.asked, **vars(counts)}
        write_manifest(self.dataset, tokenizer.vocab_size, tokenizer.end_id, splits, source)
        put_in_place(self.dataset, self.directory)
        shutil.rmtree(self.work, ignore_errors=True)

    def _tokenizer(self) -> LoadedTokenizer:
        """The tokenizer that is given, or the one that is trained here and kept for when this is killed."""
        if self.recipe.tokenizer is not None:
            tokenizer = load_tokenizer(self.recipe.tokenizer, self.recipe.end_of_document)
            replace_file(self.work / TOKENIZER_FILE, tokenizer.tokenizer.to_str())
            return tokenizer
        assert self.recipe.vocab is not None
        marker = self.work / "tokenizer.made-by"
        made_by = fingerprint([unit.identity for unit in self.units], asdict(self.recipe.rules), self.recipe.vocab)
        if marker.exists() and marker.read_text() == f"{made_by} {sha256_of(self.work / TOKENIZER_FILE)}":
            return load_tokenizer(self.work / TOKENIZER_FILE, END_OF_DOCUMENT)
        tokenizer = train_tokenizer(self._training_texts(), self.recipe.vocab)
        replace_file(self.work / TOKENIZER_FILE, tokenizer.tokenizer.to_str())
        replace_file(marker, f"{made_by} {sha256_of(self.work / TOKENIZER_FILE)}")
        return tokenizer

    def _training_texts(self) -> Iterator[str]:
        what, most = "training the tokenizer, MB", min(sum(unit.bytes for unit in self.units), TRAINING_BYTES)
        total, done = max(most // _MEGABYTE, 1), 0
        self.tell(what, 0, total)
        for text in training_texts(self.units, self.recipe.rules, TRAINING_BYTES):
            yield text
            done += len(text)
            self.tell(what, min(done // _MEGABYTE, total - 1), total)
        self.tell(what, total, total)

    def _tokenise(self, tokenizer: LoadedTokenizer) -> Counts:
        folder = self.work / "units"
        made_by = fingerprint(sha256_of(self.work / TOKENIZER_FILE), tokenizer.end_of_document)
        task = TokeniseUnits(
            tuple(self.units),
            self.recipe.rules,
            self.work / TOKENIZER_FILE,
            tokenizer.end_id,
            token_dtype(tokenizer.vocab_size),
            folder,
            made_by,
        )
        what, total = "tokenising, MB", max(sum(unit.bytes for unit in self.units) // _MEGABYTE, 1)
        self.tell(what, 0, total)
        counts, done, wanted = Counts(), 0, set()
        for unit, record in zip(self.units, self._all(task, len(self.units)), strict=True):
            counts += record.counts
            wanted |= set(record.files)
            done += unit.bytes
            self.tell(what, total if unit is self.units[-1] else done // _MEGABYTE, total)
        _keep_only(folder, wanted)
        return counts

    def _write_shards(self, plans: list[ShardPlan], dtype: str) -> list[Any]:
        units = self.work / "units"
        made_by = fingerprint({path.name: sha256_of(path) for path in sorted(units.glob("*.json"))})
        task = WriteShards(tuple(plans), units, self.dataset, dtype, made_by)
        what = "writing shards"
        self.tell(what, 0, len(plans))
        records = []
        for record in self._all(task, len(plans)):
            records.append(record)
            self.tell(what, len(records), len(plans))
        return records

    def _refuse_empty(self, plans: list[ShardPlan], counts: Counts) -> None:
        for split, name in enumerate(SPLITS):
            if not any(plan.split == split for plan in plans) and (name == "train" or self.recipe.rules.held_out > 0):
                shutil.rmtree(self.work)
                raise ConfigError(
                    f"held_out {self.recipe.rules.held_out} leaves {name} without a document: choose another share, or "
                    f"other files (there are {counts.documents} documents, {counts.empty} empty and {counts.invalid} "
                    "invalid ones)"
                )

    def _all(self, task: Callable[[int, int], Iterator[T]], count: int) -> Iterator[T]:
        """The results of a task's parts in order, made by this process or by workers; see `worker.Part`."""
        if min(self.workers, count) < 2:
            yield from task(0, 1)
            return
        workers = Workers(_Telling(task), min(self.workers, count), "lower --workers")
        try:
            for _ in range(count):
                result = next(workers)
                if isinstance(result, Exception):
                    raise result
                yield result
        except RuntimeError as error:
            raise JaxtrainError(str(error)) from None
        finally:
            workers.close()


@dataclass(frozen=True)
class _Telling:
    """A task in a worker: an error that a person can mend is a result, so that it arrives with its words."""

    task: Part

    def __call__(self, index: int, count: int) -> Iterator[Any]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each worker has a core
        try:
            with refusing_os_errors("preparing", "choose a directory that can be written and has space"):
                yield from self.task(index, count)
        except JaxtrainError as error:
            yield error


def fingerprint(*parts: Any) -> str:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _keep_only(folder: Path, names: set[str]) -> None:
    """Removes what an earlier preparation with other files or settings left."""
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()
