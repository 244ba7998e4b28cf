"""What the keys of the data and of evaluation must satisfy together."""

import re
from collections.abc import Iterator

from jaxtrain.config.checks.problems import Problem
from jaxtrain.config.data import (
    LONGEST_PATTERN,
    MixtureDataConfig,
    OwnDataConfig,
    TokenDataConfig,
    TokenRowsConfig,
    whole_weights,
)
from jaxtrain.config.schema import Config


def check_eval_sets(config: Config) -> Iterator[Problem]:
    if config.eval.sets.own_keys and not isinstance(config.data, TokenRowsConfig):
        keys = tuple(f"eval.sets.{name}" for name in config.eval.sets.own_keys)
        yield Problem(
            (*keys, "data.kind"),
            f"{', '.join(keys)}: prepared data sets are for data.kind=tokens, not {config.data.kind}; "
            "leave eval.sets out",
        )


def check_sets_are_evaluated(config: Config) -> Iterator[Problem]:
    if config.eval.sets.own_keys and config.eval.every == 0:
        keys = tuple(f"eval.sets.{name}" for name in config.eval.sets.own_keys)
        yield Problem(
            (*keys, "eval.every"),
            f"{', '.join(keys)}: nothing is evaluated with eval.every=0; set eval.every, or leave eval.sets out",
        )


def check_data(config: Config) -> Iterator[Problem]:
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
