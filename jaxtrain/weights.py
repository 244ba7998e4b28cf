"""The weights of a saved run for whoever wants to use them: the trained ones, or their moving average."""

from typing import Any

from jaxtrain.checkpoint import Saved, restore_part
from jaxtrain.errors import ConfigError
from jaxtrain.optimizer import Weights, like, weights
from jaxtrain.program import Program


def restore_weights(saved: Saved, program: Program, which: Weights = "params") -> Any:
    """The parameters of a checkpoint for `program`, straight into its shards, on any mesh.

    `ema` reads the average, and of the parameters nothing unless some are frozen and so have no average.

    Args:
        program: built from the saved run's config, or one with the same model (and `ema`, to restore that).

    Raises:
        ConfigError: the run keeps no average, or the checkpoint has other arrays than the program.
        CheckpointError: what is there can't be read, or isn't what was saved.
    """
    if which == "params":
        return restore_part(saved, program.state["params"])
    if "ema" not in program.state or "ema" not in saved.parts:
        raise ConfigError(f"{saved.path} keeps no moving average of the weights (ema: null); take its params")
    # Where the program trains, ZeRO divides the average further than parameters.
    average = restore_part(saved, like(program.state["params"], program.state["ema"]), "ema")
    if not program.config.optimizer.frozen:
        return average
    return weights({"params": restore_part(saved, program.state["params"]), "ema": average}, "ema")
