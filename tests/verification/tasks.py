"""Tasks of somebody's own: that a mesh can't train as one device does, that can't be made small, that have layers."""

from dataclasses import dataclass

import jax.numpy as jnp

from jaxtrain.config import DecoderConfig
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.task import ArraySpec
from scripts.own_task import Regression


@dataclass(frozen=True)
class NormalizedOverRows(Regression):
    """Its loss depends on which rows are in the micro-batch, as batch normalisation's does."""

    def losses(self, params, batch, key):
        hidden = jnp.tanh(batch["place"] @ params["enter"] + params["shift"])
        height = jnp.tanh((hidden - hidden.mean(0)) @ params["mix"]) @ (params["leave"] + 1)
        return {"error": (batch["weights"] * (height - batch["height"]) ** 2).sum()}

    def shrunk(self):
        return NormalizedOverRows(width=16)


@dataclass(frozen=True)
class Shapeless(Regression):
    """Its small likeness is nothing."""

    def shrunk(self):
        return None


@dataclass(frozen=True)
class Odd(Regression):
    """Its small likeness doesn't divide over two devices."""

    def shrunk(self):
        return Odd(width=15)


@dataclass(frozen=True)
class ReadsMore(Regression):
    """Its small likeness reads other rows than it does."""

    columns: int = 2

    def losses(self, params, batch, key):
        return super().losses(params, {**batch, "place": batch["place"][:, :2]}, key)

    def example_batch(self, rows):
        return {**super().example_batch(rows), "place": ArraySpec((rows, self.columns), jnp.float32, ("batch", None))}

    def shrunk(self):
        return ReadsMore(width=16, columns=3)


def language(layers: int) -> LanguageTask:
    """A task with layers, which reads rows of tokens."""
    return LanguageTask(DecoderConfig(vocab=300, layers=layers, embed=64, heads=4, mlp=128), sequence=16)
