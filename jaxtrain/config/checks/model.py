"""What the keys of the model must satisfy together, and with the kind of data."""

from collections.abc import Iterator

from jaxtrain.config.checks.problems import Problem, divisors, multiples, valued
from jaxtrain.config.data import DigitsDataConfig, OwnDataConfig, TokenRowsConfig
from jaxtrain.config.model import DecoderConfig, VitConfig
from jaxtrain.config.schema import Config


def check_model(config: Config) -> Iterator[Problem]:
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
            f"the nearest embed is {multiples(model.embed, 2 * model.heads)}, or set model.head_dim",
        )
    elif model.resolved_head_dim % 2:
        keys = ("model.embed", "model.heads") if model.head_dim is None else ("model.head_dim",)
        yield Problem(
            keys,
            f"the head width must be even for rotary embedding, but {valued(config, keys)} gives "
            f"{model.resolved_head_dim}; the nearest is {multiples(model.resolved_head_dim, 2)}",
        )
    if model.heads % model.resolved_kv_heads:
        yield Problem(
            ("model.kv_heads", "model.heads"),
            f"model.heads={model.heads} doesn't divide by model.kv_heads={model.kv_heads}; "
            f"kv_heads may be {divisors(model.heads)}",
        )


def _rope(config: Config, model: DecoderConfig) -> Iterator[Problem]:
    scaling = model.rope.scaling
    if scaling is not None and scaling.low_frequency_factor >= scaling.high_frequency_factor:
        keys = ("model.rope.scaling.low_frequency_factor", "model.rope.scaling.high_frequency_factor")
        yield Problem(keys, f"{valued(config, keys)}: the first must be below the second; Llama 3.1 has 1 and 4")


def _images(config: Config, model: VitConfig) -> Iterator[Problem]:
    if model.image % model.patch:
        yield Problem(
            ("model.patch", "model.image"),
            f"model.image={model.image} doesn't divide by model.patch={model.patch}; "
            f"patch may be {divisors(model.image)}",
        )
    if model.embed % model.heads:
        yield Problem(
            ("model.embed", "model.heads"),
            f"model.embed={model.embed} doesn't divide by model.heads={model.heads}; "
            f"the nearest embed is {multiples(model.embed, model.heads)}",
        )
    if model.shift >= model.image:
        yield Problem(
            ("model.shift", "model.image"),
            f"model.shift={model.shift} moves images out of sight; with model.image={model.image} it may be at most "
            f"{model.image - 1}",
        )


def check_pair(config: Config) -> Iterator[Problem]:
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


def check_remat(config: Config) -> Iterator[Problem]:
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
