"""The data of a run: which rows there are, in which order, and the held-out ones."""

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import Config
from jaxtrain.data import Order, RowTable, Table, console_progress, ensure_python_stdlib, open_dataset


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on.

    Attributes:
        table: the rows of the training split.
        order: which row stands at which position.
        hash: of the data set's manifest; the same data give the same hash.
        held_out: the rows for evaluation, where the config asks for one.
    """

    where: Path
    table: Table
    order: Order
    hash: str
    held_out: Table | None

    @property
    def rows(self) -> int:
        """Rows of one epoch."""
        return len(self.table)


def open_data(config: Config) -> TrainingData:
    """The data that `config.data` describes, prepared first if they have a source and aren't there yet.

    Raises:
        ConfigError, DataError: the data set is missing, broken, or doesn't fit the model.
    """
    data = config.data
    if data.source == "python_stdlib":
        with console_progress() as report:
            dataset = ensure_python_stdlib(data.dir, config.data_vocab, data.held_out, report)
    else:
        dataset = open_dataset(data.dir)

    def table(split: str) -> RowTable:
        return RowTable(dataset, split, data.sequence, data.pack, config.model.vocab)

    training = table("train")
    order = Order(len(training), config.seed, data.shuffle, data.epochs)
    return TrainingData(
        data.dir, training, order, dataset.manifest_hash, table("held_out") if config.eval.every else None
    )
