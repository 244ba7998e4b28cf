"""A config of the same structure with small sizes, which trains on virtual CPU devices in seconds.

What decides how a step is cut stays: every axis of the mesh, the schedule and its chunks, accumulation, ZeRO,
gathering, recomputation; and of the model, the data and the optimizer all but sizes. What only a run has is left out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config import (
    BATCH_AXES,
    AdafactorConfig,
    Config,
    DecoderConfig,
    MeshConfig,
    OwnModelConfig,
    PipelineConfig,
    StableSchedule,
    VitConfig,
    difference,
    flat,
)
from jaxtrain.models.families import make_task
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.vision import VisionTask

STEPS = 4
_MOST_PASSES = 4
_ROWS = 2
"""Of each device in a pass, so that there are others beside each."""
_CHUNK = 32
"""Tokens whose logits exist at once: half a row, so that the loss is computed in several pieces."""
_FACTORED_FROM = 16
_SMALL_SIDE = 2
_WARMUP = 2


def small_mesh(mesh: MeshConfig, zero: int = 0) -> dict[str, int]:
    """The size of each axis, outermost first: 2 where it splits something, else 1.

    An axis of -1 splits nothing here, unless no other axis does, or it is `data` and ZeRO would have nothing to divide.
    """
    sizes = {axis: min(size, _SMALL_SIDE) if size != -1 else 1 for axis, size in mesh}
    alone = math.prod(sizes.values()) == 1
    return {
        axis: _SMALL_SIDE if size == -1 and (alone or (zero > 0 and axis == "data")) else sizes[axis]
        for axis, size in mesh
    }


def device_count(config: Config) -> int:
    """Devices that the small mesh of a config needs."""
    return math.prod(small_mesh(config.mesh, config.sharding.zero).values())


def shrunk(config: Config) -> Config:
    """The same config with small sizes, in float32. Somebody's own model keeps its keys: its task shrinks itself."""
    values = config.to_dict()
    sizes = small_mesh(config.mesh, config.sharding.zero)
    _set(values, {f"mesh.{axis}": size for axis, size in sizes.items()})
    _set(values, _batches(config, sizes))
    _set(values, _run(config))
    if not isinstance(config.model, OwnModelConfig):
        _set(values, _model(config, sizes))
    return Config.model_validate(values).with_origins(config.origins)


def on_one_device(config: Config) -> Config:
    """A small config as it is compared with: on one device, in one pass, with nothing computed again or in pieces."""
    plain = PipelineConfig()
    values = config.to_dict()
    _set(values, {f"mesh.{axis}": 1 for axis, _ in config.mesh})
    _set(values, {"microbatch": None, "remat": "none", "remat_save": [], "remat_offload": [], "sharding.zero": 0})
    _set(values, {"pipeline.schedule": plain.schedule, "pipeline.chunks": plain.chunks})
    if isinstance(config.model, DecoderConfig):
        _set(values, {"model.loss.chunk": DecoderConfig().loss.chunk})
    return Config.model_validate(values).with_origins(config.origins)


def changes(config: Config, small: Config) -> dict[str, list[str]]:
    """What was made small, by section (`""`: the top level), as `layers 80 → 4`."""
    told: dict[str, list[str]] = {}
    for change in difference(config.to_dict(), small):
        section, _, name = change.key.partition(".")
        section, name = (section, name) if name else ("", section)
        told.setdefault(section, []).append(f"{name} {_shown(change.saved)} → {_shown(change.now)}")
    return told


def _batches(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Some rows for each device in each pass, and about as many passes: one where there was one, else a few."""
    passes = 1
    if config.microbatch is not None:
        shards = math.prod(max(size, 1) for axis, size in config.mesh if axis in BATCH_AXES)
        passes = min(max(config.global_batch // (shards * config.microbatch), 1), _MOST_PASSES)
    rows = min(config.microbatch or _ROWS, _ROWS)
    batch = math.prod(sizes[axis] for axis in BATCH_AXES) * passes * rows
    values: dict[str, Any] = {
        "global_batch": batch,
        "microbatch": None if config.microbatch is None else rows,
        "batch_ramp": [],
    }
    if config.optimizer.reference_batch is not None:
        share = config.optimizer.reference_batch / config.global_batch
        values["optimizer.reference_batch"] = max(round(share * batch), 1)
    return values


def _run(config: Config) -> dict[str, Any]:
    """A run of a few steps that passes through the whole schedule."""
    schedule = config.optimizer.schedule
    warmup = _WARMUP if schedule.warmup or schedule.warmup_tokens is not None else 0
    if isinstance(schedule, StableSchedule):
        warmup = min(warmup, STEPS - schedule.decay_steps(STEPS))
    values: dict[str, Any] = {
        "steps": STEPS,
        "precision": "float32",
        "init_from": None,
        "optimizer.schedule.warmup": warmup,
        "optimizer.schedule.warmup_tokens": None,
        "eval.batch": None,
        "telemetry.norms_every": 0,
        "profile.start": None,
        "data.epochs": None,
        "sharding.allow_replicated": True,  # narrow matrices leave norms a larger share
    }
    if isinstance(config.optimizer, AdafactorConfig):
        values["optimizer.factored_from"] = min(config.optimizer.factored_from, _FACTORED_FROM)
    return values


def _model(config: Config, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The sizes of the small task of our own families, so that the mesh divides them."""
    task, model = make_task(config), config.model
    assert not isinstance(model, OwnModelConfig)
    layers = min(_layers(model.layers, config, sizes), model.layers)
    if isinstance(task, VisionTask):
        small = task.shrunk().config
        side = small.patch * next(count for count in (4, 2, 1) if count * small.patch <= small.image)
        heads = small.heads + small.heads % 2
        of_vit = {"layers": layers, "heads": heads, "embed": 8 * heads, "mlp": 16 * heads}
        return _in_model(small.model_copy(update={**of_vit, "image": side, "shift": min(small.shift, side - 1)}))
    assert isinstance(task, LanguageTask)
    language = task.shrunk()
    loss = language.config.loss.model_copy(update={"chunk": min(language.config.loss.chunk, _CHUNK)})
    values = _in_model(language.config.model_copy(update={"layers": layers, "loss": loss}))
    if "vocab" in type(config.data).model_fields:
        values["data.vocab"] = None
    return {**values, "data.sequence": language.sequence}


def _layers(layers: int, config: Config, sizes: Mapping[str, int]) -> int:
    """Two for each part that a stage has, and one more where the config's parts don't have equally many."""
    chunks, stages = config.pipeline.chunks, sizes["pipeline"]
    if stages == 1:
        return 2
    uneven = layers % (max(config.mesh.pipeline, 2) * chunks) != 0
    return 2 * stages * chunks + uneven


def _in_model(model: DecoderConfig | VitConfig) -> dict[str, Any]:
    return {f"model.{name}": value for name, value in flat(model.model_dump(mode="json")).items()}


def _set(values: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Sets values of a plain tree by dotted path."""
    for path, value in new.items():
        *sections, name = path.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        inner[name] = value


def _shown(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{len(value)} parts" if value else "none"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
