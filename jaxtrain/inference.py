"""A trained model on this machine: its run's program on another mesh and its parameters, without optimizer state."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxtrain import distributed
from jaxtrain.checkpoint import Saved
from jaxtrain.config import Config, resolve_mesh
from jaxtrain.data import Table
from jaxtrain.errors import ConfigError
from jaxtrain.evaluation import Evaluator
from jaxtrain.models.task import Generative, Mean
from jaxtrain.placement import Placement
from jaxtrain.program import Program, build
from jaxtrain.sharding import BATCH_AXES, PIPELINE
from jaxtrain.training_data import TrainingData, agree_on_data, open_data, refuse_other_fields
from jaxtrain.weights import restore_weights

HELD_OUT = "held_out"


def inference_program(config: Config, devices: Sequence[jax.Device], rows: int) -> Program:
    """The program of a run's config for other batches: of `rows` rows, or more where the mesh doesn't divide that.

    `eval_batch` has the number of rows; the run's own batches play no part.

    Raises:
        ConfigError: the model doesn't divide over the mesh.
    """
    sizes = resolve_mesh(config.mesh, len(devices), config.origins)
    shards = math.prod(sizes[axis] for axis in (PIPELINE, *BATCH_AXES))
    evaluation = config.eval.model_copy(update={"batch": None})
    update = {"global_batch": -(-rows // shards) * shards, "batch_ramp": (), "microbatch": None, "eval": evaluation}
    return build(config.model_copy(update=update), devices)


@dataclass(frozen=True)
class Evaluated:
    """The metrics of one set of rows at one step.

    Attributes:
        weight: what the loss is a mean over (of a language model, tokens), where it is a mean.
        metrics: `loss` among them, and of a language model `perplexity`.
    """

    step: int
    set: str
    rows: int
    weight: float | None
    metrics: Mapping[str, float]


def evaluate_checkpoints(
    checkpoints: Sequence[Saved],
    config: Config,
    devices: Sequence[jax.Device],
    *,
    ema: bool = False,
    warn: Callable[[str], None],
) -> Iterator[Evaluated]:
    """Each of a run's checkpoints on the held-out rows of its data and on those of `eval.sets`, one after the other.

    Args:
        config: of the run, for this machine; `eval.batch` is rounded up to what the mesh divides.
        warn: told where the held-out rows are not those that the run had.

    Raises:
        ConfigError, DataError: the data are missing, broken, or don't fit the model, or there are no rows.
        CheckpointError: a checkpoint can't be read.
    """
    program = inference_program(config, devices, config.eval_batch)
    evaluation = config.eval.model_copy(update={"every": 1})
    with distributed.together("open the data to evaluate on"):
        data = open_data(config.model_copy(update={"eval": evaluation}), held_out_needed=False)
        refuse_other_fields(data, program.eval_batch)
        tables = _evaluated_tables(data)
    agree_on_data(data)
    placement, rows = Placement(program.eval_batch), program.eval_rows
    for saved in checkpoints:
        if saved.meta.data_hash != data.hash:
            warn(f"{data.where}: the data are others than step {saved.meta.step} was trained on")
        params = restore_weights(saved, program, "ema" if ema else "params")
        for name, table in tables.items():
            evaluator = Evaluator(program.eval_step, placement, table, rows, config.data.prefetch)
            totals = evaluator.totals(params)
            metrics = {metric: total.result() for metric, total in totals.items()}
            if isinstance(program.task, Generative):
                metrics["perplexity"] = _perplexity(metrics["loss"])
            loss = totals["loss"]
            weight = float(loss.weight) if isinstance(loss, Mean) else None
            yield Evaluated(saved.meta.step, name, len(table), weight, metrics)


def _evaluated_tables(data: TrainingData) -> dict[str, Table]:
    tables: dict[str, Table] = {} if data.held_out is None else {HELD_OUT: data.held_out}
    tables |= {name: given.table for name, given in data.eval_sets.items()}
    if not tables:
        raise ConfigError(
            f"{data.where} holds nothing out, and there is no other set to evaluate on; "
            "name one of tokens with --set NAME=DIR, or give other data with data.*"
        )
    return tables


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
