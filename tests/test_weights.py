"""The weights of a saved run, for other verbs: the trained ones or their average, on any mesh."""

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import open_saved
from jaxtrain.errors import ConfigError
from jaxtrain.models.parameters import named_leaves
from jaxtrain.program import build
from jaxtrain.weights import restore_weights
from tests.runs import read_checkpoint, run_here, tiny_config

EMA = "ema={decay: 0.5}"


@pytest.mark.parametrize("frozen", [(), ('optimizer.frozen=["embed.*"]',)], ids=["all trained", "some frozen"])
def test_either_set_of_weights_is_restored_on_another_mesh(
    frozen: tuple[str, ...], tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, EMA, *frozen, "steps=3")
    run_here(config)
    saved = read_checkpoint(config.run_dir, 3)
    mesh = ("mesh.data=2", "mesh.fsdp=4", "sharding.zero=1")  # which divides averages further than parameters
    program = build(tiny_config(tmp_path, tiny_data, EMA, *frozen, *mesh), jax.devices())
    checkpoint = open_saved(config.checkpoint_dir)
    sharding = {name: leaf.sharding for name, leaf in named_leaves(program.state["params"]).items()}
    for which in ("params", "ema"):
        weights = named_leaves(restore_weights(checkpoint, program, which))
        assert weights.keys() == sharding.keys()
        for name, leaf in weights.items():
            part = which if f"{which}.{name}" in saved else "params"
            np.testing.assert_array_equal(leaf, saved[f"{part}.{name}"], err_msg=name)
            assert leaf.sharding.is_equivalent_to(sharding[name], leaf.ndim)
    assert ("ema.embed.table" in saved) is not bool(frozen)
    assert (saved["ema.head.projection"] != saved["params.head.projection"]).any()


def test_an_average_that_a_run_does_not_keep_is_refused(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=1")
    run_here(config)
    for overrides in ((), (EMA,)):
        program = build(tiny_config(tmp_path, tiny_data, *overrides), jax.devices()[:1])
        with pytest.raises(ConfigError, match=r"keeps no moving average of the weights \(ema: null\)"):
            restore_weights(open_saved(config.checkpoint_dir), program, "ema")
