"""What several keys must satisfy together, in one place; limits on a single key stand in the schema.

`check` needs the configuration alone. `check_layout` repeats what depends on the mesh once its sizes are known on real
devices, and `check_steps` what depends on the length of the run once the data has set it. Every problem names the keys,
their values and the nearest values that are right.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxtrain.config.data import (
    LONGEST_PATTERN,
    DigitsDataConfig,
    MixtureDataConfig,
    OwnDataConfig,
    TokenDataConfig,
    TokenRowsConfig,
    whole_weights,
)
from jaxtrain.config.model import DecoderConfig, OwnModelConfig, VitConfig
from jaxtrain.config.optimizer import StableSchedule
from jaxtrain.config.schema import Config, MeshConfig
from jaxtrain.errors import ConfigError

AXES = tuple(MeshConfig.model_fields)
BATCH_AXES = ("data", "fsdp", "expert")
UNSUPPORTED_AXES = ("pipeline", "expert", "context")


@dataclass(frozen=True)
class Problem:
    """A fault among several keys; `keys` are all that take part in it."""

    keys: tuple[str, ...]
    message: str


def check(config: Config, origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if the keys contradict each other on any number of devices."""
    sizes = {axis: size for axis, size in config.mesh if size >= 1}
    problems = [
        *_model(config),
        *_pair(config),
        *_length(config),
        *_remat(config),
        *_reference(config),
        *_length_of_parts(config, config.steps),
        *_profile(config, config.steps),
        *_mesh(config.mesh),
        *_data(config),
        *_checkpoint(config),
        *_eval_sets(config),
        *_distributed(config),
        *_layout(config, sizes),
    ]
    _raise(problems, config.origins if origins is None else origins)


def check_layout(config: Config, axis_sizes: Mapping[str, int], origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if the model or a batch doesn't divide over the mesh, whose sizes all are known here."""
    _raise(_layout(config, axis_sizes), config.origins if origins is None else origins)


def check_steps(config: Config, steps: int, origins: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if what counts steps doesn't fit a run of so many, known here also where the data sets it."""
    _raise([*_length_of_parts(config, steps), *_profile(config, steps)], config.origins if origins is None else origins)


def resolve_mesh(mesh: MeshConfig, devices: int, origins: Mapping[str, str] | None = None) -> dict[str, int]:
    """The size of each axis, outermost first, with -1 replaced by what is left of the devices.

    Raises ConfigError if the axes don't multiply to the number of devices.
    """
    places = origins or {}
    _raise(_mesh(mesh), places)
    sizes = dict(mesh)
    fixed = math.prod(size for size in sizes.values() if size != -1)
    named = [f"mesh.{axis}" for axis, size in sizes.items() if size != 1]
    product = " × ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size not in (1, -1)) or "all axes 1"
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if not open_axes and fixed != devices:
        message = f"{product} needs {_count(fixed)}, but there are {devices}; {_mesh_that_fits(sizes, devices)}"
        _raise([Problem(tuple(named) or ("mesh",), message)], places)
    if open_axes and devices % fixed:
        fitting = _listed(divisor for divisor in range(1, devices + 1) if devices % divisor == 0)
        message = (
            f"{product} = {fixed} doesn't divide {devices} devices, so mesh.{open_axes[0]}=-1 has no whole size; "
            f"the axes other than that one may multiply to {fitting}"
        )
        _raise([Problem(tuple(named), message)], places)
    return {axis: devices // fixed if size == -1 else size for axis, size in sizes.items()}


def _model(config: Config) -> Iterator[Problem]:
    if isinstance(config.model, DecoderConfig):
        yield from _heads(config, config.model)
        yield from _rope(config, config.model)
    elif isinstance(config.model, VitConfig):
        yield from _images(config, config.model)


def _heads(config: Config, model: DecoderConfig) -> Iterator[Problem]:
    if model.head_dim is None and model.embed % model.heads:
        yield Problem(
            ("model.embed", "model.heads"),
            f"model.embed={model.embed} doesn't divide by model.heads={model.heads}; "
            f"the nearest embed is {_multiples(model.embed, 2 * model.heads)}, or set model.head_dim",
        )
    elif model.resolved_head_dim % 2:
        keys = ("model.embed", "model.heads") if model.head_dim is None else ("model.head_dim",)
        yield Problem(
            keys,
            f"the head width must be even for rotary embedding, but {_valued(config, keys)} gives "
            f"{model.resolved_head_dim}; the nearest is {_multiples(model.resolved_head_dim, 2)}",
        )
    if model.heads % model.resolved_kv_heads:
        yield Problem(
            ("model.kv_heads", "model.heads"),
            f"model.heads={model.heads} doesn't divide by model.kv_heads={model.kv_heads}; "
            f"kv_heads may be {_divisors(model.heads)}",
        )


def _rope(config: Config, model: DecoderConfig) -> Iterator[Problem]:
    scaling = model.rope.scaling
    if scaling is not None and scaling.low_frequency_factor >= scaling.high_frequency_factor:
        keys = ("model.rope.scaling.low_frequency_factor", "model.rope.scaling.high_frequency_factor")
        yield Problem(keys, f"{_valued(config, keys)}: the first must be below the second; Llama 3.1 has 1 and 4")


def _images(config: Config, model: VitConfig) -> Iterator[Problem]:
    if model.image % model.patch:
        yield Problem(
            ("model.patch", "model.image"),
            f"model.image={model.image} doesn't divide by model.patch={model.patch}; "
            f"patch may be {_divisors(model.image)}",
        )
    if model.embed % model.heads:
        yield Problem(
            ("model.embed", "model.heads"),
            f"model.embed={model.embed} doesn't divide by model.heads={model.heads}; "
            f"the nearest embed is {_multiples(model.embed, model.heads)}",
        )
    if model.shift >= model.image:
        yield Problem(
            ("model.shift", "model.image"),
            f"model.shift={model.shift} moves images out of sight; with model.image={model.image} it may be at most "
            f"{model.image - 1}",
        )


def _pair(config: Config) -> Iterator[Problem]:
    """A model reads what the data give; of somebody's own code, the batches are compared before the first step."""
    model, data = config.model, config.data
    keys = ("model.family", "data.kind")
    if isinstance(model, DecoderConfig) and isinstance(data, DigitsDataConfig):
        yield Problem(
            keys,
            "model.family=decoder reads tokens, but data.kind=digits are images; "
            "set data.kind=tokens, or model.family=vit",
        )
    if isinstance(model, VitConfig) and isinstance(data, TokenRowsConfig):
        yield Problem(
            keys,
            f"model.family=vit reads images, but data.kind={data.kind} are text; "
            "set data.kind=digits, or model.family=decoder",
        )
    if isinstance(model, DecoderConfig) and isinstance(data, OwnDataConfig) and config.sequence is None:
        yield Problem(
            ("data.target",),
            f"data.target={data.target} with model.family=decoder needs data.sequence, the tokens in a row; set it",
        )
    if isinstance(model, VitConfig) and isinstance(data, DigitsDataConfig):
        for key, size in (("image", 8), ("channels", 1), ("classes", 10)):
            given = getattr(model, key)
            if given != size and not (key == "classes" and given > size):
                yield Problem(
                    (f"model.{key}", "data.kind"), f"model.{key}={given}, but data.kind=digits needs {size}; set it so"
                )


def _length(config: Config) -> Iterator[Problem]:
    if config.steps is None and config.data.epochs is None:
        yield Problem(
            ("steps", "data.epochs"),
            "the run has no end: steps=null and data.epochs=null; set steps, or data.epochs to let the data set it",
        )


def _remat(config: Config) -> Iterator[Problem]:
    named = {"remat_save": config.remat_save, "remat_offload": config.remat_offload}
    if config.remat != "named":
        for key, names in named.items():
            if names:
                yield Problem(
                    (key, "remat"), f"{key} is given, but remat={config.remat} keeps nothing by name; set remat: named"
                )
    elif not any(named.values()):
        yield Problem(
            ("remat",), "remat=named without remat_save or remat_offload keeps nothing; name tensors, or use full"
        )
    if twice := sorted(set(config.remat_save) & set(config.remat_offload)):
        yield Problem(tuple(named), f"remat_save and remat_offload both name {', '.join(twice)}; keep it in one place")


def _reference(config: Config) -> Iterator[Problem]:
    scaling, reference = config.optimizer.batch_scaling, config.optimizer.reference_batch
    keys = ("optimizer.batch_scaling", "optimizer.reference_batch")
    if scaling != "none" and reference is None:
        yield Problem(
            keys,
            f"optimizer.batch_scaling={scaling} needs optimizer.reference_batch: the examples per update that "
            f"optimizer.learning_rate was chosen for (global_batch={config.global_batch} would change nothing)",
        )
    if scaling == "none" and reference is not None:
        yield Problem(
            keys,
            f"optimizer.reference_batch={reference} does nothing with optimizer.batch_scaling=none; "
            f"set batch_scaling to linear or sqrt, or leave reference_batch out",
        )


def _length_of_parts(config: Config, steps: int | None) -> Iterator[Problem]:
    yield from _schedule(config, steps)
    ramp = sum(part.steps for part in config.batch_ramp)
    if steps is not None and ramp >= steps:
        yield Problem(
            ("batch_ramp", "steps"),
            f"batch_ramp takes {ramp} steps of the run, steps={steps}, so global_batch={config.global_batch} is never "
            f"reached; its parts may have at most {steps - 1} steps together",
        )


def _schedule(config: Config, steps: int | None) -> Iterator[Problem]:
    schedule, key = config.optimizer.schedule, "optimizer.schedule"
    if schedule.warmup and schedule.warmup_tokens is not None:
        keys = (f"{key}.warmup", f"{key}.warmup_tokens")
        yield Problem(keys, f"{_valued(config, keys)}: the warm-up has one length; leave one of them out")
        return
    if schedule.warmup_tokens is not None and config.sequence is None:
        yield Problem(
            (f"{key}.warmup_tokens", "data.kind"),
            f"{key}.warmup_tokens={schedule.warmup_tokens} needs the length of a row, and data.kind={config.data.kind} "
            f"gives none; set {key}.warmup in steps",
        )
        return
    if steps is None or (config.optimizer.batch_scaling != "none" and config.optimizer.reference_batch is None):
        return
    name = f"{key}.warmup" if schedule.warmup_tokens is None else f"{key}.warmup_tokens"
    warmup = config.warmup_steps
    meaning, limit = _valued(config, (name,)), f"be at most {steps}"
    if warmup != schedule.warmup:
        meaning, limit = f"{meaning} ({warmup} steps here)", f"take at most {steps} steps"
    if warmup > steps:
        yield Problem((name, "steps"), f"{meaning} is longer than the run, steps={steps}; it may {limit}")
    elif isinstance(schedule, StableSchedule) and warmup + schedule.decay_steps(steps) > steps:
        yield Problem(
            (name, f"{key}.decay", "steps"),
            f"{meaning} and {key}.decay={schedule.decay} ({schedule.decay_steps(steps)} steps) are together longer "
            f"than the run, steps={steps}; the decay may have at most {steps - warmup} steps",
        )


def _profile(config: Config, steps: int | None) -> Iterator[Problem]:
    start, count = config.profile.start, config.profile.steps
    if start is not None and steps is not None and start + count - 1 > steps:
        fitting = f"profile.start may be at most {steps - count + 1}" if count <= steps else f"the run has {steps}"
        yield Problem(
            ("profile.start", "profile.steps", "steps"),
            f"profile.start={start} with profile.steps={count} is a window up to step {start + count - 1}, but the "
            f"run ends at step {steps}; {fitting}",
        )


def _mesh(mesh: MeshConfig) -> Iterator[Problem]:
    for axis, size in mesh:
        if axis in UNSUPPORTED_AXES and size != 1:
            yield Problem((f"mesh.{axis}",), f"mesh.{axis}={size} is not supported yet; the nearest value is 1")
        elif size == 0:
            yield Problem((f"mesh.{axis}",), f"mesh.{axis}=0 leaves no device; use 1, or -1 for all that are left")
    open_axes = tuple(f"mesh.{axis}" for axis, size in mesh if size == -1 and axis not in UNSUPPORTED_AXES)
    if len(open_axes) > 1:
        yield Problem(open_axes, f"{' and '.join(f'{axis}=-1' for axis in open_axes)}: only one axis may be -1")


def _eval_sets(config: Config) -> Iterator[Problem]:
    if config.eval.sets.own_keys and not isinstance(config.data, TokenRowsConfig):
        keys = tuple(f"eval.sets.{name}" for name in config.eval.sets.own_keys)
        yield Problem(
            (*keys, "data.kind"),
            f"{', '.join(keys)}: prepared data sets are for data.kind=tokens, not {config.data.kind}; "
            "leave eval.sets out",
        )


def _data(config: Config) -> Iterator[Problem]:
    data, vocab = config.data, config.model_vocab
    if isinstance(data, TokenDataConfig):
        if data.vocab is not None and vocab is not None and data.vocab > vocab:
            yield Problem(
                ("data.vocab", "model.vocab"),
                f"data.vocab={data.vocab} gives token ids that model.vocab={vocab} has no rows for; "
                f"data.vocab may be at most {vocab}",
            )
        if data.source is not None and config.data_vocab is None:
            yield Problem(
                ("data.vocab", "data.source"),
                f"data.source={data.source} trains a tokenizer, but neither data.vocab=null nor a model.vocab "
                "says its size; set data.vocab, such as 8192",
            )
    if isinstance(data, MixtureDataConfig):
        yield from _mixture(data)
        return
    if isinstance(data, OwnDataConfig) or (isinstance(data, TokenDataConfig) and data.source is None):
        return
    if data.held_out == 0 and config.eval.every > 0:
        yield Problem(
            ("eval.every", "data.held_out"),
            f"eval.every={config.eval.every} has nothing to evaluate on with data.held_out=0.0; "
            f"set data.held_out above 0 (its default is {type(data).model_fields['held_out'].default}), "
            "or eval.every=0",
        )


def _mixture(data: MixtureDataConfig) -> Iterator[Problem]:
    names = list(data.mixture)
    for name in names:
        if not re.fullmatch(r"[\w-]+", name):
            yield Problem(
                (f"data.mixture.{name}",), f"data.mixture: {name!r} is no name; use letters, digits, - and _ alone"
            )
    if data.epochs is not None:
        yield Problem(
            ("data.epochs", "data.kind"),
            f"data.epochs={data.epochs}: a mixture has no epochs, since each data set goes through its own at its own "
            "pace; set steps, and data.epochs=null",
        )
    every = [("data.mixture", "data.mixture", [component.weight for component in data.mixture.values()])]
    position = 0
    for number, stage in enumerate(data.stages):
        where = f"data.stages.{number}"
        if stage.position <= position:
            yield Problem(
                ("data.stages",),
                f"{where}.position={stage.position} must be after {position}, where the stage before begins",
            )
        position = stage.position
        for name in [*(set(stage.weights) - set(names)), *(set(names) - set(stage.weights))]:
            what = f"names {name}, which data.mixture lacks" if name in stage.weights else f"lacks a weight for {name}"
            yield Problem(("data.stages",), f"{where}.weights {what}; give one for each of {', '.join(names)}")
        every.append(("data.stages", where, list(stage.weights.values())))
    for key, where, weights in every:
        if not any(weights):
            yield Problem((key,), f"{where}: all weights are 0; give one above 0")
        elif (length := sum(whole_weights(weights))) > LONGEST_PATTERN:
            yield Problem(
                (key,),
                f"{where}: these weights come out even only after {length} rows, which is more than {LONGEST_PATTERN}; "
                "round them to fewer digits",
            )


def _checkpoint(config: Config) -> Iterator[Problem]:
    every, keep_every, best = config.checkpoint.every, config.checkpoint.keep_every, config.checkpoint.keep_best
    if keep_every is not None and (every == 0 or keep_every % every):
        nearest = _multiples(keep_every, every) if every else "null"
        yield Problem(
            ("checkpoint.keep_every", "checkpoint.every"),
            f"checkpoint.keep_every={keep_every} names steps that checkpoint.every={every} doesn't save; "
            f"the nearest keep_every is {nearest}",
        )
    if best is not None and config.eval.every == 0:
        yield Problem(
            ("checkpoint.keep_best", "eval.every"),
            "checkpoint.keep_best has nothing to judge by with eval.every=0; set eval.every, or keep_best to null",
        )
    elif best is not None and (every == 0 or (config.eval.every % every and every % config.eval.every)):
        nearest = _multiples(every, config.eval.every) if every else str(config.eval.every)
        yield Problem(
            ("checkpoint.keep_best", "checkpoint.every", "eval.every"),
            f"checkpoint.keep_best judges checkpoints by an evaluation at the same step, and checkpoint.every={every} "
            f"and eval.every={config.eval.every} don't fall together; the nearest checkpoint.every is {nearest}",
        )


def _distributed(config: Config) -> Iterator[Problem]:
    names = ("coordinator", "processes", "process_id")
    keys = tuple(f"distributed.{name}" for name in names)
    distributed = config.distributed
    missing = [key for key, name in zip(keys, names, strict=True) if getattr(distributed, name) is None]
    if missing and len(missing) < len(names):
        yield Problem(keys, f"{', '.join(keys)} are given together or not at all; {' and '.join(missing)} is null")
    process_id, processes = distributed.process_id, distributed.processes
    if not missing and process_id is not None and processes is not None and process_id >= processes:
        yield Problem(keys[1:], f"{_valued(config, keys[1:])}: process_id may be at most {processes - 1}")


def _layout(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    yield from _tensor(config, sizes.get("tensor", 1))
    yield from _fsdp(config, sizes.get("fsdp", 1))
    if all(axis in sizes for axis in BATCH_AXES):
        yield from _batches(config, {axis: sizes[axis] for axis in BATCH_AXES})


def _tensor(config: Config, tensor: int) -> Iterator[Problem]:
    if isinstance(config.model, OwnModelConfig):  # the sharding rules judge it
        return
    dimensions, patches = _split_over_tensor(config.model, config.sequence), _patches(config.model)
    fitting = _divisors(math.gcd(*dimensions.values(), patches or 0))
    for key, size in dimensions.items():
        if size % tensor:
            yield Problem(
                (key, "mesh.tensor"),
                f"{key}={size} doesn't divide by mesh.tensor={tensor}; "
                f"the nearest {key} is {_multiples(size, tensor)}, and mesh.tensor may be {fitting}",
            )
    if patches is not None and patches % tensor:
        keys = ("model.image", "model.patch")
        yield Problem(
            (*keys, "mesh.tensor"),
            f"the {patches} patches that {_valued(config, keys)} give don't divide by mesh.tensor={tensor}; "
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


def _fsdp(config: Config, fsdp: int) -> Iterator[Problem]:
    model = config.model
    if isinstance(model, OwnModelConfig):
        return
    if model.embed % fsdp:
        free = isinstance(model, DecoderConfig) and model.head_dim is not None
        unit = fsdp if free else math.lcm(fsdp, (2 if isinstance(model, DecoderConfig) else 1) * model.heads)
        yield Problem(
            ("model.embed", "mesh.fsdp"),
            f"model.embed={model.embed} doesn't divide by mesh.fsdp={fsdp}; the nearest model.embed is "
            f"{_multiples(model.embed, unit)}, and mesh.fsdp may be {_divisors(model.embed, at_most=fsdp)}",
        )


def _batches(config: Config, sizes: Mapping[str, int]) -> Iterator[Problem]:
    shards = math.prod(sizes.values())
    axes = tuple(f"mesh.{axis}" for axis, size in sizes.items() if size > 1)
    over = f"{shards} batch shards ({' × '.join(f'mesh.{axis}={size}' for axis, size in sizes.items() if size > 1)})"
    ramp = (
        ("batch_ramp", f"batch_ramp[{i}].global_batch", part.global_batch) for i, part in enumerate(config.batch_ramp)
    )
    for key, name, size in [("global_batch", "global_batch", config.global_batch), *ramp]:
        share = size // shards
        if size % shards:
            yield Problem(
                (key, *axes),
                f"{name}={size} doesn't divide over {over}; the nearest is {_multiples(size, shards)}",
            )
        elif config.microbatch is not None and share % config.microbatch:
            yield Problem(
                ("microbatch", key, *axes),
                f"microbatch={config.microbatch} doesn't divide the {share} examples that each device has of "
                f"{name}={size}; it may be {_divisors(share)}",
            )
    if config.eval.batch is not None and config.eval.batch % shards:
        yield Problem(
            ("eval.batch", *axes),
            f"eval.batch={config.eval.batch} doesn't divide over {over}; "
            f"the nearest is {_multiples(config.eval.batch, shards)}",
        )


def _raise(problems: Iterable[Problem], origins: Mapping[str, str]) -> None:
    lines = []
    for problem in problems:
        places = dict.fromkeys(origins[key] for key in problem.keys if key in origins)
        lines.append(f"{', '.join(places)}: {problem.message}" if places else problem.message)
    if lines:
        raise ConfigError("\n".join(lines))


def _valued(config: Config, keys: tuple[str, ...]) -> str:
    texts = []
    for key in keys:
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        texts.append(f"{key}={value}")
    return ", ".join(texts)


def _mesh_that_fits(sizes: Mapping[str, int], devices: int) -> str:
    """One axis changed so that the mesh fits, the smallest change first."""
    product = math.prod(sizes.values())
    candidates = {
        axis: devices * size // product
        for axis, size in sizes.items()
        if axis not in UNSUPPORTED_AXES and devices % (product // size) == 0
    }
    if not candidates:
        return "the axes must multiply to that; one of them may be -1 for all that are left"
    axis = min(candidates, key=lambda name: abs(math.log(candidates[name] / sizes[name])))
    return f"mesh.{axis}={candidates[axis]} would fit"


def _multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _divisors(value: int, at_most: int | None = None) -> str:
    small = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    divisors = sorted({*small, *(value // divisor for divisor in small)})
    return _listed(divisor for divisor in divisors if at_most is None or divisor <= at_most)


def _listed(numbers: Iterable[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _count(devices: int) -> str:
    return "1 device" if devices == 1 else f"{devices} devices"
