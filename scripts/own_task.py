"""A task and data of your own: a small network learns a wave over the plane from noisy samples.

In the folder that holds this file and own_task.yml: python -m jaxtrain.train own_task.yml"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.data import ArrayTable, Tables
from jaxtrain.models.parameters import constant, normal, parameter
from jaxtrain.models.task import ArraySpec, Flops, Mean


def make_data(rows: int, noise: float = 0.05) -> Tables:  # the keys of `data` in the config
    random = np.random.default_rng(0)
    place = random.uniform(-2, 2, (rows, 2)).astype(np.float32)
    height = np.sin(2 * place[:, 0]) * np.cos(place[:, 1]) + noise * random.standard_normal(rows)
    fields, held_out = {"place": place, "height": height.astype(np.float32)}, rows // 8
    parts = [{name: field[part] for name, field in fields.items()} for part in np.split(np.arange(rows), [held_out])]
    return Tables(train=ArrayTable(parts[1]), held_out=ArrayTable(parts[0]))


@dataclass(frozen=True)
class Regression:
    width: int  # the keys of `model` in the config

    def init(self, key):
        rngs, width = nnx.Rngs(params=key), self.width
        return {
            "enter": parameter(rngs, (2, width), (None, "embed"), "matrix", normal(1.0)),
            "shift": parameter(rngs, (width,), ("embed",), "bias", normal(1.0)),
            "mix": parameter(rngs, (width, width), ("embed", "mlp"), "matrix", normal(width**-0.5)),
            "leave": parameter(rngs, (width,), ("mlp",), "head", constant(0.0)),
        }

    def denominators(self, batch):  # from the whole batch; filler rows have weight 0
        return {"error": jnp.maximum(batch["weights"].sum(), 1)}

    def losses(self, params, batch, key):  # sums over whatever rows are given
        hidden = jnp.tanh(batch["place"] @ params["enter"] + params["shift"])
        height = jnp.tanh(hidden @ params["mix"]) @ params["leave"]
        return {"error": (batch["weights"] * (height - batch["height"]) ** 2).sum()}

    def metrics(self, params, batch):
        return {"loss": Mean(self.losses(params, batch, None)["error"], batch["weights"].sum())}

    def counted(self, batch):
        return (batch["weights"] > 0).sum()

    def example_batch(self, rows):
        one = ArraySpec((rows,), jnp.float32, ("batch",))
        return {"place": ArraySpec((rows, 2), jnp.float32, ("batch", None)), "height": one, "weights": one}

    def flops(self, rows):
        return Flops(forward=2.0 * rows * self.width * (2 + self.width + 1), attention=0.0)

    def shrunk(self):
        return Regression(width=16)
