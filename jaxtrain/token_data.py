"""Rows of tokens for a run: from one prepared data set, or from several by weight."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import Config, MixtureDataConfig, TokenDataConfig, TokenRowsConfig
from jaxtrain.data import (
    Dataset,
    MixtureOrder,
    MixtureTable,
    Order,
    RowOrder,
    RowTable,
    Stage,
    Table,
    Tables,
    console_progress,
    ensure_python_stdlib,
    open_dataset,
)
from jaxtrain.data.best_fit import VERSION as BEST_FIT_VERSION
from jaxtrain.data.manifest import TokenizerRecord, parse_manifest
from jaxtrain.errors import ConfigError, refusing_os_errors

TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class TokenData:
    """Rows of tokens, their order, and what a person should know of them, a line for each data set."""

    tables: Tables
    order: RowOrder
    summary: str


def open_tokens(data: TokenDataConfig, config: Config) -> TokenData:
    """The data set of `data.dir`, prepared first if it has a source and isn't there yet.

    Raises:
        ConfigError, DataError: it is missing, broken, or doesn't fit the model.
    """
    if data.source == "python_stdlib":
        assert config.data_vocab is not None, "checked by config: a source has a vocabulary"
        with refusing_os_errors(f"data.dir={data.dir}", "choose a directory that can be written and has space"):
            data.dir.parent.mkdir(parents=True, exist_ok=True)
        with console_progress() as report:
            dataset = ensure_python_stdlib(data.dir, config.data_vocab, data.held_out, report)
    else:
        dataset = _opened("data.dir", data.dir)
    train = _table(dataset, "train", data, config)
    held_out = _table(dataset, "held_out", data, config) if config.eval.every and _holds_out(dataset) else None
    order = Order(len(train), config.seed, data.shuffle, data.epochs)
    return TokenData(Tables(train, held_out, _identity(dataset, data)), order, f"data: {_rows(train)}")


def open_mixture(data: MixtureDataConfig, config: Config) -> TokenData:
    """The data sets of `data.mixture`.

    The hash covers the content of each under its name, the weights and the stages. Evaluation is on the held-out
    documents of all that have some, each counted once.

    Raises:
        ConfigError, DataError: one is missing, broken, or doesn't fit the model or the others.
    """
    datasets = {name: _opened(f"data.mixture.{name}.dir", component.dir) for name, component in data.mixture.items()}
    _refuse_other_tokenizers(datasets)
    train = {name: _table(dataset, "train", data, config) for name, dataset in datasets.items()}
    stages = [Stage(0, tuple(component.weight for component in data.mixture.values()))]
    stages += [Stage(stage.position, tuple(stage.weights[name] for name in data.mixture)) for stage in data.stages]
    orders = [Order(len(table), _seed(config.seed, name), data.shuffle, None) for name, table in train.items()]
    order = MixtureOrder(orders, [len(table) for table in train.values()], stages)
    held_out = {
        name: _table(dataset, "held_out", data, config)
        for name, dataset in datasets.items()
        if config.eval.every and _holds_out(dataset)
    }
    identities = {name: _identity(dataset, data) for name, dataset in datasets.items()}
    tables = Tables(MixtureTable(train), MixtureTable(held_out) if held_out else None, mixture_hash(identities, stages))
    return TokenData(tables, order, _mixture_summary(train, stages, order, config))


@dataclass(frozen=True)
class EvalSet:
    """More rows to evaluate on: a data set of `eval.sets`, or what somebody's own data name.

    Attributes:
        table: of a data set, its held-out documents, or all of one that holds none out.
        hash: of the content.
    """

    table: Table
    hash: str


def open_eval_sets(data: TokenRowsConfig, config: Config) -> dict[str, EvalSet]:
    """The data sets of `eval.sets`, by name, in rows as those that are trained on.

    Raises:
        ConfigError: one is missing, or was made with another tokenizer or end of document than the data.
        DataError: one is damaged, or holds nothing.
    """
    home = directories(data)[0]
    found = {}
    for name, directory in config.eval.sets.own_keys.items():
        dataset, own = _opened(f"eval.sets.{name}", directory), parse_manifest(home)[0].tokenizer
        if (differing := _tokenised_otherwise(dataset.manifest.tokenizer, own)) is not None:
            option = "" if differing == TOKENIZER else ", and the same --end-of-document"
            raise ConfigError(
                f"eval.sets.{name}={directory} was made with another {differing} than the data in {home}; "
                f"prepare it again with --tokenizer {home / own.file}{option}"
            )
        split = "held_out" if _holds_out(dataset) else "train"
        found[name] = EvalSet(_table(dataset, split, data, config), f"{_identity(dataset, data)} {split}")
    return found


def directories(data: TokenRowsConfig) -> list[Path]:
    """The prepared data sets that are trained on; all have one tokenizer."""
    if isinstance(data, MixtureDataConfig):
        return [component.dir for component in data.mixture.values()]
    assert isinstance(data, TokenDataConfig), "there is no other kind"
    return [data.dir]


def mixture_hash(identities: dict[str, str], stages: list[Stage]) -> str:
    """A hash in hex of all, and after it `NAME=HASH` of each data set, so that a difference can be named."""
    content = json.dumps([list(identities.items()), [[stage.start, stage.weights] for stage in stages]])
    parts = [f"{name}={identity[:12]}" for name, identity in identities.items()]
    return " ".join([hashlib.sha256(content.encode()).hexdigest(), *parts])


def differing_parts(saved: str, now: str) -> list[str]:
    """The names of data sets whose content differs between two `mixture_hash`es, or that only one has."""
    before, after = (dict(part.rpartition("=")[::2] for part in text.split(" ")[1:]) for text in (saved, now))
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


def _opened(key: str, directory: Path) -> Dataset:
    """The data set that a key names, which an error says where there is none."""
    try:
        return open_dataset(directory)
    except ConfigError as error:
        raise ConfigError(f"{key}={directory}: {error}") from None


def _table(dataset: Dataset, split: str, data: TokenRowsConfig, config: Config) -> RowTable:
    vocab = config.model_vocab or dataset.manifest.tokenizer.vocab_size
    return RowTable(dataset, split, data.sequence, data.pack, vocab)


def _identity(dataset: Dataset, data: TokenRowsConfig) -> str:
    """A hash of the rows: of the data set, and of the algorithm where its rows are placed by one."""
    if data.pack != "best_fit":
        return dataset.manifest_hash
    return hashlib.sha256(f"{dataset.manifest_hash} best-fit {BEST_FIT_VERSION}".encode()).hexdigest()


def _holds_out(dataset: Dataset) -> bool:
    return "held_out" in dataset.manifest.splits and bool((dataset.lengths("held_out") > 1).any())


def _seed(seed: int, name: str) -> int:
    """A seed for a data set of a mixture, so that no two have one shuffle."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "big")


def _refuse_other_tokenizers(datasets: dict[str, Dataset]) -> None:
    (first, reference), *others = datasets.items()
    for name, dataset in others:
        one, other = reference.manifest.tokenizer, dataset.manifest.tokenizer
        differing = _tokenised_otherwise(one, other)
        what = f"data.mixture: {first} ({reference.directory}) and {name} ({dataset.directory}) were"
        if differing == TOKENIZER:
            raise ConfigError(
                f"{what} tokenised by different tokenizers, with {one.vocab_size} and {other.vocab_size} entries: "
                "prepare one of them again with --tokenizer and the other's tokenizer.json"
            )
        if differing is not None:
            raise ConfigError(
                f"{what} made with another {differing}: prepare one of them again with --tokenizer, "
                "the other's tokenizer.json and the same --end-of-document"
            )


def _tokenised_otherwise(one: TokenizerRecord, other: TokenizerRecord) -> str | None:
    """What differs between how two data sets were made into tokens; None where a model may read both."""
    if one.sha256 != other.sha256:
        return TOKENIZER
    if one.end_of_document != other.end_of_document:
        return f"end of document (id {one.end_of_document}, not {other.end_of_document})"
    return None


def _rows(table: RowTable) -> str:
    return f"{len(table):,} rows of {table.plan.sequence} tokens, {table.fill:.2%} full"


def _mixture_summary(tables: dict[str, RowTable], stages: list[Stage], order: MixtureOrder, config: Config) -> str:
    end = None if config.steps is None else config.batches.rows_of(config.steps)
    drawn = [None] * len(tables) if end is None else order.drawn(end)
    lines = []
    for component, ((name, table), count) in enumerate(zip(tables.items(), drawn, strict=True)):
        shares = [f"{stages[0].weights[component] / sum(stages[0].weights):.2%}"]
        shares += [
            f"{stage.weights[component] / sum(stage.weights):.2%} from row {stage.start:,}" for stage in stages[1:]
        ]
        epochs = "" if count is None else f"; {count / len(table):.2f} epochs in this run"
        lines.append(f"data: {name}: {_rows(table)}; weight {', '.join(shares)}{epochs}")
    late = [stage.start for stage in stages if end is not None and stage.start >= end]
    if late:
        lines.append(f"data: the run ends with row {end:,}, before the weights change at {', '.join(map(str, late))}")
    return "\n".join(lines)
