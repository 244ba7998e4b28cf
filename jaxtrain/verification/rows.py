"""Batches for a trial: random ones where a config's data lie in files, ragged in any case.

Some targets aren't counted, and in the last rows of a batch none is, as in the tail of finite data: what divides by a
number of its own micro-batch or shard, in place of the whole batch's, gives other numbers.
"""

import itertools
from collections.abc import Mapping

import jax
import numpy as np

from jaxtrain.config import Config, OwnModelConfig, TokenRowsConfig, VitConfig
from jaxtrain.data import Batch, host_batches
from jaxtrain.errors import ConfigError
from jaxtrain.models.parameters import describe, named_leaves
from jaxtrain.models.task import ArraySpec, Task
from jaxtrain.training_data import TrainingData

WEIGHTS = "weights"
TOKEN_FIELDS = ("tokens", "targets", "segments", "positions", WEIGHTS)
_COUNTED = 0.9
_NEW_DOCUMENT = 0.06
_FEW_IDS = 256
"""Token ids that any vocabulary is taken to have."""


def reads_own_data(config: Config) -> bool:
    """Whether the trial is on the config's data: those of a task of somebody's own, if they aren't tokens in files."""
    return isinstance(config.model, OwnModelConfig) and not isinstance(config.data, TokenRowsConfig)


def rows_of(data: TrainingData, rows: int, count: int) -> list[Batch]:
    """The first batches of some data."""
    batches = host_batches(data.table, data.order, rows, np.arange(rows), prefetch=0)
    random = np.random.default_rng(0)
    return [_ragged(random, batch) for batch in itertools.islice(batches, count)]


def random_rows(config: Config, task: Task, rows: int, count: int) -> list[Batch]:
    """Batches of random tokens or images, of the arrays that `task` reads.

    Raises:
        ConfigError: somebody's own task reads another array than rows of tokens have.
    """
    random, example = np.random.default_rng(0), task.example_batch(rows)
    if isinstance(config.model, VitConfig):
        return [_ragged(random, _images(random, example, config.model.classes)) for _ in range(count)]
    _refuse_other_fields(config, example)
    packed = not isinstance(config.data, TokenRowsConfig) or config.data.pack is not False
    vocab = _vocab(task)
    return [_ragged(random, _tokens(random, example, vocab, packed)) for _ in range(count)]


def _refuse_other_fields(config: Config, example: Mapping[str, ArraySpec]) -> None:
    other = [name for name, spec in example.items() if name not in TOKEN_FIELDS or len(spec.shape) != 2]
    if other:
        raise ConfigError(
            f"data.kind={config.data.kind}: rows of tokens have {', '.join(TOKEN_FIELDS)}, each of [rows, sequence], "
            f"but the model also reads {', '.join(other)}"
        )


def _ragged(random: np.random.Generator, batch: Batch) -> Batch:
    if WEIGHTS not in batch:
        return batch
    weights = np.asarray(batch[WEIGHTS])
    rows = len(weights)
    counted = random.random(weights.shape) < _COUNTED
    counted[random.integers(rows // 2 + 1, rows + 1) :] = False
    counted[0] = True
    return {**batch, WEIGHTS: weights * counted.astype(weights.dtype)}


def _images(random: np.random.Generator, example: Mapping[str, ArraySpec], classes: int) -> Batch:
    rows = example["label"].shape[0]
    return {
        "image": random.standard_normal(example["image"].shape, np.float32),
        "label": random.integers(0, classes, rows).astype(np.int32),
        WEIGHTS: np.ones(rows, np.float32),
    }


def _tokens(random: np.random.Generator, example: Mapping[str, ArraySpec], vocab: int, packed: bool) -> Batch:
    """Rows of mostly small ids, so that there is something to learn: of several documents, or of one and padding."""
    rows, length = next(iter(example.values())).shape
    tokens = (vocab * random.random((rows, length + 1)) ** 4).astype(np.int32)
    places = np.arange(length)
    starts = random.random((rows, length)) < (_NEW_DOCUMENT if packed else 0)
    starts[:, 0] = True
    inside = np.ones((rows, length), bool) if packed else places < random.integers(2, length + 1, (rows, 1))
    first = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segments": starts.cumsum(1),
        "positions": places - first,
    }
    batch = {name: np.where(inside, field, 0).astype(np.int32) for name, field in fields.items()}
    return {name: array for name, array in {**batch, WEIGHTS: inside.astype(np.float32)}.items() if name in example}


def _vocab(task: Task) -> int:
    """Ids that the task has rows for, as its parameters tell."""
    infos = named_leaves(describe(jax.eval_shape(task.init, jax.random.key(0))))
    sizes = [
        size for info in infos.values() for size, axis in zip(info.shape, info.axes, strict=True) if axis == "vocab"
    ]
    return min(sizes, default=_FEW_IDS)
