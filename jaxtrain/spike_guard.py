"""Spikes in the loop: the limits that the step is given, and where a rewind goes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint import Checkpointer
from jaxtrain.config import Config
from jaxtrain.data import RowOrder
from jaxtrain.resilience.spikes import Numbers, SpikeDetector
from jaxtrain.sharding import Layout


@dataclass(frozen=True)
class Return:
    """Where a rewind goes: the checkpoint of `step`, and on from data `position`."""

    step: int
    position: int


class SpikeGuard:
    """Judges each step's numbers, and keeps updates out where the policy is to skip them.

    Attributes:
        detector: the judge, which has seen nothing before `resume`.
    """

    def __init__(self, config: Config, layout: Layout):
        self._config = config
        self.detector = SpikeDetector(config.spikes, {})
        self._abstract = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=layout.replicated())
        self._placed: tuple[Numbers, jax.Array] | None = None

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Goes on as when `saved`, the `Meta.spikes` of the state that the run goes on from, was written."""
        self.detector = SpikeDetector(self._config.spikes, saved)

    def rewound(self, saved: Mapping[str, Any]) -> None:
        """The same of a state that the run went back to: how often it had to intervene isn't forgotten."""
        self.detector = self.detector.after_rewind(saved)

    @property
    def _skips(self) -> bool:
        return "skip" in (self._config.spikes.loss, self._config.spikes.grad_norm)

    def abstract_inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What `inputs` will be, to compile the train step for."""
        return {"limits": self._abstract} if self._skips else {}

    def limits(self, unread: int) -> Numbers:
        """What the step that is dispatched now may give at most, rounded as the devices have it.

        Args:
            unread: steps dispatched before and not read yet.
        """
        limits = self.detector.limits(unread)
        return Numbers(float(np.float32(limits.loss)), float(np.float32(limits.grad_norm)))

    def inputs(self, limits: Numbers) -> dict[str, jax.Array]:
        """What the train step gets beside its other inputs."""
        if not self._skips:
            return {}
        spikes = self._config.spikes
        within = Numbers(
            limits.loss if spikes.loss == "skip" else np.inf, limits.grad_norm if spikes.grad_norm == "skip" else np.inf
        )
        if self._placed is None or self._placed[0] != within:
            values = np.array([within.loss, within.grad_norm], np.float32)
            placed = jax.make_array_from_callback(values.shape, self._abstract.sharding, lambda index: values[index])
            self._placed = within, placed
        return {"limits": self._placed[1]}

    def way_back(self, step: int, position: int, order: RowOrder, checkpointer: Checkpointer) -> Return | None:
        """Where to go on after the numbers of `step`, whose rows begin at `position`; None where nothing is left.

        Every process must ask at the same step.
        """
        plan, spikes = self._config.batches, self._config.spikes
        beyond = plan.rows_of(plan.steps_to(position) + 1 + spikes.rewind_over)
        if order.total is not None and beyond >= order.total:
            return None
        target = checkpointer.newest_up_to(step - spikes.rewind_back)
        return None if target is None else Return(target, beyond)
