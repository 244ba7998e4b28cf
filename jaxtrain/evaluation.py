"""Evaluation on held-out rows: exact sums over every row once, whatever the batch size and the mesh."""

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.data import Order, Table, host_batches
from jaxtrain.errors import ConfigError
from jaxtrain.models.task import Mergeable
from jaxtrain.placement import Placement
from jaxtrain.program import Program
from jaxtrain.resilience.whereabouts import DEVICES, here


def refuse_unknown_metric(program: Program, sets: Collection[str]) -> None:
    """Raises a ConfigError where `checkpoint.keep_best` judges by a metric that no evaluation of this task gives.

    Args:
        sets: the names of what is evaluated beside the held-out rows.
    """
    best = program.config.checkpoint.keep_best
    if best is None:
        return
    config = program.config
    metrics = jax.eval_shape(program.eval_step, program.state["params"], program.eval_batch)
    every = [*metrics, *(f"{given}_{name}" for given in sets for name in metrics)]
    if config.ema is not None and config.ema.evaluate:
        every += [f"ema_{name}" for name in every]
    names = sorted(f"eval_{name}" for name in every)
    if best.metric not in names:
        raise ConfigError(
            f"checkpoint.keep_best.metric={best.metric}: an evaluation of this model has no such metric; "
            f"it has {', '.join(names)}"
        )


@dataclass(frozen=True)
class Evaluator:
    """Evaluates parameters on all rows of a held-out source.

    Attributes:
        eval_step: the compiled (params, batch) -> metrics.
        rows: rows per evaluation batch; the last is filled up with rows of weight 0.
        before_a_batch: called before each; what it raises ends the evaluation.
    """

    eval_step: Callable[..., Any]
    placement: Placement
    source: Table
    rows: int
    prefetch: int
    before_a_batch: Callable[[], None] = lambda: None

    def __call__(self, params: Any) -> dict[str, float]:
        """The final value of each metric."""
        return {name: metric.result() for name, metric in self.totals(params).items()}

    def totals(self, params: Any) -> dict[str, Mergeable]:
        """Each metric over all rows; sums over batches are float64, on the host, one batch late."""
        order = Order(rows=len(self.source), seed=0, shuffle=False, epochs=1)
        results: deque[dict[str, Mergeable]] = deque()
        total: dict[str, Mergeable] | None = None

        def add_oldest() -> None:
            nonlocal total
            with here.wait(DEVICES):
                read = jax.device_get(results.popleft())
            here.progress()
            wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), read)
            total = wide if total is None else jax.tree.map(np.add, total, wide)

        batches = host_batches(self.source, order, self.rows, self.placement.rows, prefetch=self.prefetch)
        with contextlib.closing(batches):
            for host_batch in batches:
                self.before_a_batch()
                results.append(self.eval_step(params, self.placement(host_batch)))
                if len(results) > 1:
                    add_oldest()
        add_oldest()
        assert total is not None
        return total


@dataclass(frozen=True)
class Evaluations:
    """The held-out rows and named sets, one after the other: the metrics of a set are called NAME_METRIC."""

    held_out: Evaluator
    sets: Mapping[str, Evaluator]

    def __call__(self, params: Any) -> dict[str, float]:
        """The final value of each metric of each."""
        values = self.held_out(params)
        for name, evaluate in self.sets.items():
            values |= {f"{name}_{metric}": value for metric, value in evaluate(params).items()}
        return values
