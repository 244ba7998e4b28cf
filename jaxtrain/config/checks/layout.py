"""What the mesh must satisfy, and what must divide over it."""

import math
from collections.abc import Iterator, Mapping

from jaxtrain.config.checks.problems import Problem, divisors, listed, multiples, raise_problems, valued
from jaxtrain.config.model import DecoderConfig, OwnModelConfig, VitConfig
from jaxtrain.config.schema import Config, MeshConfig

BATCH_AXES = ("data", "fsdp", "expert")
"""The mesh axes over which the rows of a batch are split."""
EVAL_AXES = ("pipeline", *BATCH_AXES)
"""Those over which the rows of an evaluation are: stages take part in it as fsdp does."""

UNSUPPORTED_AXES = ("expert", "context")


def resolve_mesh(mesh: MeshConfig, devices: int, origins: Mapping[str, str] | None = None) -> dict[str, int]:
    """The size of each axis, outermost first, with -1 replaced by what is left of the devices.

    Raises ConfigError if the axes don't multiply to the number of devices.
    """
    places = origins or {}
    raise_problems(check_mesh(mesh), places)
    sizes = dict(mesh)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    named = [f"mesh.{axis}" for axis, size in sizes.items() if size != 1]
    product = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)) or "all axes 1"
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if not open_axes and fixed != devices:
        message = f"{product} needs {_count(fixed)}, but there are {devices}; {_mesh_that_fits(sizes, devices)}"
        raise_problems([Problem(tuple(named) or ("mesh",), message)], places)
    if open_axes and devices % fixed:
        fitting = listed(divisor for divisor in range(1, devices + 1) if devices % divisor == 0)
        together = f"{product} = {fixed}" if " × " in product else product
        more = f"; without GPUs, cpu_devices={fixed} makes as many of the processor" if devices == 1 else ""
        message = (
            f"{together} doesn't divide {_count(devices)}, so mesh.{open_axes[0]}=-1 has no whole size; "
            f"the axes other than that one may multiply to {fitting}{more}"
        )
        raise_problems([Problem(tuple(named), message)], places)
    return {axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}


def check_mesh(mesh: MeshConfig) -> Iterator[Problem]:
    for axis, size in mesh:
        if axis in UNSUPPORTED_AXES and size != 1:
            yield Problem((f"mesh.{axis}",), f"mesh.{axis}={size} is not supported yet; the nearest value is 1")
        elif size == 0:
            yield Problem((f"mesh.{axis}",), f"mesh.{axis}=0 leaves no device; use 1, or -1 for all that are left")
    open_axes = tuple(f"mesh.{axis}" for axis, size in mesh if size == -1 and axis not in UNSUPPORTED_AXES)
    if len(open_axes) > 1:
        yield Problem(open_axes, f"{' and '.join(f'{axis}=-1' for axis in open_axes)}: only one axis may be -1")


def check_distributed(config: Config) -> Iterator[Problem]:
    names = ("coordinator", "processes", "process_id")
    keys = tuple(f"distributed.{name}" for name in names)
    distributed = config.distributed
    missing = [key for key, name in zip(keys, names, strict=True) if getattr(distributed, name) is None]
    if missing and len(missing) < len(names):
        yield Problem(keys, f"{', '.join(keys)} are given together or not at all; {' and '.join(missing)} is null")
    process_id, processes = distributed.process_id, distributed.processes
    if not missing and process_id is not None and processes is not None and process_id >= processes:
        yield Problem(keys[1:], f"{valued(config, keys[1:])}: process_id may be at most {processes - 1}")


def check_parts(config: Config, sizes: Mapping[str, int], *, batches: bool = True) -> Iterator[Problem]:
    yield from _tensor(config, sizes.get("tensor", 1))
    yield from _stored(config, sizes)
    yield from _pipeline(config, sizes.get("pipeline", 1))
    if batches and all(axis in sizes for axis in BATCH_AXES):
        yield from _batches(config, {axis: sizes[axis] for axis in BATCH_AXES})
    if batches and all(axis in sizes for axis in EVAL_AXES):
        yield from _evaluation(config, {axis: sizes[axis] for axis in EVAL_AXES})


def _tensor(config: Config, tensor: int) -> Iterator[Problem]:
    if isinstance(config.model, OwnModelConfig):  # the sharding rules judge it
        return
    dimensions, patches = _split_over_tensor(config.model, config.sequence), _patches(config.model)
    fitting = divisors(math.gcd(*dimensions.values(), patches or 0))
    for key, size in dimensions.items():
        if size % tensor:
            yield Problem(
                (key, "mesh.tensor"),
                f"{key}={size} doesn't divide by mesh.tensor={tensor}; "
                f"the nearest {key} is {multiples(size, tensor)}, and mesh.tensor may be {fitting}",
            )
    if patches is not None and patches % tensor:
        keys = ("model.image", "model.patch")
        yield Problem(
            (*keys, "mesh.tensor"),
            f"the {patches} patches that {valued(config, keys)} give don't divide by mesh.tensor={tensor}; "
            f"mesh.tensor may be {fitting}",
        )


def _split_over_tensor(model: DecoderConfig | VitConfig, sequence: int | None) -> dict[str, int]:
    """The keys whose sizes the tensor axis must divide."""
    sizes = {"model.heads": model.heads}
    if isinstance(model, VitConfig):
        return {**sizes, "model.mlp": model.mlp}
    if model.kv_heads is not None:
        sizes["model.kv_heads"] = model.kv_heads
    sizes |= {"model.mlp": model.mlp, "model.vocab": model.vocab}
    return sizes if sequence is None else {**sizes, "data.sequence": sequence}


def _patches(model: DecoderConfig | VitConfig) -> int | None:
    return model.patches if isinstance(model, VitConfig) and model.image % model.patch == 0 else None


def _stored(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    """What is stored in parts must divide: weights over fsdp and pipeline, with ZeRO their moments over data too."""
    model = config.model
    if isinstance(model, OwnModelConfig):
        return
    axes = ("fsdp", "pipeline", *(("data",) if config.sharding.zero else ()))
    split = {axis: sizes[axis] for axis in axes if sizes.get(axis, 1) > 1}
    parts = math.prod(split.values())
    if model.embed % parts:
        free = isinstance(model, DecoderConfig) and model.head_dim is not None
        unit = parts if free else math.lcm(parts, (2 if isinstance(model, DecoderConfig) else 1) * model.heads)
        keys = tuple(f"mesh.{axis}" for axis in split)
        over = " × ".join(f"mesh.{axis}={size}" for axis, size in split.items())
        yield Problem(
            ("model.embed", *keys, *(("sharding.zero",) if "data" in split else ())),
            f"model.embed={model.embed} doesn't divide by {over}{_why_stored(split)}; the nearest model.embed is "
            f"{multiples(model.embed, unit)}, and {' × '.join(keys)} may be {divisors(model.embed, at_most=parts)}",
        )


def _why_stored(split: Mapping[str, int]) -> str:
    if "data" in split:
        return ", which store parts of each weight's moments (sharding.zero)"
    return ", which store parts of each weight" if "pipeline" in split else ""


def _pipeline(config: Config, stages: int) -> Iterator[Problem]:
    chunks, schedule, model = config.pipeline.chunks, config.pipeline.schedule, config.model
    if chunks > 1 and schedule != "interleaved_1f1b":
        yield Problem(
            ("pipeline.chunks", "pipeline.schedule"),
            f"pipeline.chunks={chunks}, but pipeline.schedule={schedule} has one chunk for each stage; "
            f"set pipeline.chunks: 1 or pipeline.schedule: interleaved_1f1b",
        )
    if not isinstance(model, OwnModelConfig) and stages > 1 and model.layers < stages * chunks:
        keys = ("mesh.pipeline", *(("pipeline.chunks",) if chunks > 1 else ()))
        over = f"mesh.pipeline={stages}" + (f" × pipeline.chunks={chunks}" if chunks > 1 else "")
        yield Problem(
            ("model.layers", *keys),
            f"model.layers={model.layers} are too few for {over}: each of the {stages * chunks} parts needs a layer; "
            f"{' × '.join(keys)} may be at most {model.layers}",
        )


def _evaluation(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    shards = math.prod(sizes.values())
    if config.eval.batch is not None and config.eval.batch % shards:
        yield Problem(
            ("eval.batch", *(f"mesh.{axis}" for axis, size in sizes.items() if size > 1)),
            f"eval.batch={config.eval.batch} doesn't divide over {_shards(sizes)}; "
            f"the nearest is {multiples(config.eval.batch, shards)}",
        )


def _shards(sizes: Mapping[str, int]) -> str:
    axes = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size > 1)
    return f"{math.prod(sizes.values())} batch shards ({axes})"


def _batches(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    shards = math.prod(sizes.values())
    axes = tuple(f"mesh.{axis}" for axis, size in sizes.items() if size > 1)
    over = _shards(sizes)
    ramp = (
        ("batch_ramp", f"batch_ramp[{i}].global_batch", part.global_batch) for i, part in enumerate(config.batch_ramp)
    )
    for key, name, size in [("global_batch", "global_batch", config.global_batch), *ramp]:
        share = size // shards
        if size % shards:
            yield Problem(
                (key, *axes), f"{name}={size} doesn't divide over {over}; the nearest is {multiples(size, shards)}"
            )
        elif config.microbatch is not None and share % config.microbatch:
            yield Problem(
                ("microbatch", key, *axes),
                f"microbatch={config.microbatch} doesn't divide the {share} examples that each device has of "
                f"{name}={size}; it may be {divisors(share)}",
            )


def _mesh_that_fits(sizes: Mapping[str, int], devices: int) -> str:
    """One axis changed so that the mesh fits, the smallest change first."""
    product = math.prod(sizes.values())
    candidates = {
        axis: devices * size // product
        for axis, size in sizes.items()
        if axis not in UNSUPPORTED_AXES and (axis != "pipeline" or sizes[axis] > 1) and devices % (product // size) == 0
    }
    if not candidates:
        return "the axes must multiply to that; one of them may be -1 for all that are left"
    axis = min(candidates, key=lambda name: abs(math.log(candidates[name] / sizes[name])))
    return f"mesh.{axis}={candidates[axis]} would fit"


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
