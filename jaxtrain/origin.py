"""`init_from`: a new run begins with another run's parameters, and with nothing else of it."""

from collections.abc import Iterator
from typing import Any

from jaxtrain import distributed
from jaxtrain.checkpoint import Saved, list_checkpoints, mismatches
from jaxtrain.config import Config, Difference, difference, format_differences
from jaxtrain.errors import ConfigError
from jaxtrain.program import Program
from jaxtrain.saved_run import find_checkpoint

_WHY = {
    "model.vocab": "a row of the embedding belongs to a token of that run's tokenizer: none can be cut off or made up",
    "model.tied_embeddings": "a tied model has no output head of its own: its embedding is the head",
}


def find_origin(config: Config, program: Program) -> Saved | None:
    """The checkpoint that a new run begins from; None where none is asked for, or the run goes on by itself.

    Nothing is read but descriptions. Once the run has a checkpoint of its own, the other run may be gone.

    Raises:
        ConfigError: there is no such checkpoint, or its parameters are not this model's: all differences are named.
        CheckpointError: its description can't be read.
    """
    if config.init_from is None or list_checkpoints(config.checkpoint_dir).steps:
        return None
    saved = find_checkpoint(config.init_from)
    problems = "\n".join(mismatches(saved, program.state["params"]))
    if problems:
        raise ConfigError("\n".join([f"init_from={config.init_from}: {problems}", *_why(saved, config)]))
    return saved


def agree_on_origin(config: Config, saved: Saved | None) -> None:
    """Raises a ConfigError where the processes found different checkpoints."""
    if not distributed.same_everywhere(saved and saved.meta.step):
        raise ConfigError(
            f"init_from={config.init_from}: the processes found different steps there; name one, as in RUN@STEP, "
            f"in a directory that all of them share"
        )


def describe(config: Config, saved: Saved) -> dict[str, Any]:
    """What is recorded in `run.json` and in each checkpoint of the new run."""
    meta = saved.meta
    return {"run": config.init_from, "checkpoint": str(saved.path), "step": meta.step, "data_hash": meta.data_hash}


def remarks(config: Config, saved: Saved, data_hash: str) -> Iterator[str]:
    """What fits by its shapes and may still not be meant."""
    if saved.meta.data_hash != data_hash:
        yield (
            f"warning: init_from={config.init_from} was trained on another data set (manifest "
            f"{saved.meta.data_hash[:12]}, here {data_hash[:12]}); make sure that both have the same tokenizer"
        )
    if changed := _model_differences(saved, config):
        yield (
            f"warning: the parameters of init_from={config.init_from} fit, but the model computes something else "
            f"with them:\n{format_differences(changed)}"
        )


def _why(saved: Saved, config: Config) -> Iterator[str]:
    changed = _model_differences(saved, config)
    if changed:
        yield f"these keys differ from that run's:\n{format_differences(changed)}"
        yield from (f"{change.key}: {_WHY[change.key]}" for change in changed if change.key in _WHY)
        yield "set them as in that run; nothing is cast, cut or left out silently"


def _model_differences(saved: Saved, config: Config) -> list[Difference]:
    changed = difference(saved.meta.config, config)
    return [change for change in changed if change.key.startswith("model.") and not change.may_change]
