"""The keys of `data`: what is read, and how it becomes batches."""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxtrain.config.base import CodeName, Count, LocalPath, OpenSection, Section, choose_by_default, setting


class DataSection(Section):
    """The keys that all kinds of data have: how rows become batches."""

    kind: str
    shuffle: bool = setting(True, "Read rows in an order drawn from the seed, new in each epoch.")
    epochs: Count | None = setting(None, "Passes over the data set; null: repeat for ever.", gt=0)
    workers: Count = setting(0, "Loader processes; 0: threads of the trainer.", may_change=True, ge=0, le=1000)
    prefetch: Count = setting(2, "Batches prepared ahead of the step.", may_change=True, ge=0, le=1000)
    log_rows: bool = setting(False, "Write the row ids of each step to RUN/rows-PROCESS.jsonl.", may_change=True)


class TokenRowsConfig(DataSection):
    """The keys of all kinds whose rows are made of documents."""

    sequence: Count = setting(256, "Tokens in a row.", gt=0)
    pack: Literal[True, False, "best_fit"] = setting(
        True,
        "Put several documents in a row, kept apart by segment ids: true cuts one stream into rows, best_fit places "
        "documents so that few are cut; false: one a row, padded.",
    )


class TokenDataConfig(TokenRowsConfig):
    """Rows of tokens from a prepared data set."""

    kind: Literal["tokens"] = setting("tokens", "What a row is: text, images, or what somebody's own code gives.")
    dir: LocalPath = setting(Path("data/python-stdlib"), "Directory of the prepared data set.", may_change=True)
    source: Literal["python_stdlib"] | None = setting(
        None,
        "Source from which `dir` is prepared on first use: the running Python's standard library; null: it is there.",
        may_change=True,
    )
    vocab: Count | None = setting(
        None, "Vocabulary of the tokenizer that is trained when source prepares; null: model.vocab.", gt=0
    )
    held_out: float = setting(0.02, "Share of documents held out for evaluation when source prepares.", ge=0, lt=1)


class ComponentConfig(Section):
    """One data set of a mixture."""

    dir: LocalPath = setting(..., "Directory of the prepared data set.", may_change=True)
    weight: float = setting(..., "Share of the rows, in proportion to the other weights.", ge=0)


class StageConfig(Section):
    """Weights that hold from a data position on."""

    position: int = setting(..., "Rows of the run before these weights hold.", gt=0, le=2**53)
    weights: dict[str, Annotated[float, Field(ge=0)]] = setting(..., "The weight of each data set of the mixture.")


class MixtureDataConfig(TokenRowsConfig):
    """Rows of tokens from several prepared data sets, by weight."""

    kind: Literal["mixture"] = setting(..., "What a row is: text, images, or what somebody's own code gives.")
    mixture: dict[str, ComponentConfig] = setting(..., "The data sets by names of your own.", min_length=1)
    stages: list[StageConfig] = setting([], "Other weights from stated positions on, in rising order.")


class DigitsDataConfig(DataSection):
    """scikit-learn's 1,797 handwritten digits: grey images of 8×8 pixels."""

    kind: Literal["digits"] = setting(..., "What a row is: text, images, or what somebody's own code gives.")
    held_out: float = setting(0.2, "Share of images held out for evaluation, the same in every run.", ge=0, lt=1)


class OwnDataConfig(DataSection, OpenSection):
    """Somebody's own data, made by the callable that `target` names."""

    kind: Literal["target"] = setting("target", "What a row is: text, images, or what somebody's own code gives.")
    target: CodeName = setting(..., "MODULE:NAME of a callable that takes the other keys and returns the data.")


DataConfig = Annotated[
    TokenDataConfig | MixtureDataConfig | DigitsDataConfig | OwnDataConfig,
    Field(discriminator="kind"),
    BeforeValidator(choose_by_default("kind", "tokens", or_target=True)),
]

SET_NAME = "a name has small letters, digits and _, is not train, held_out or ema and doesn't begin with ema_"


def may_name_a_set(name: object) -> bool:
    """Whether rows to evaluate on can have this name beside those that the data and the metrics have of their own.

    `SET_NAME` says in words which can.
    """
    if not isinstance(name, str) or not re.fullmatch("[a-z][a-z0-9_]*", name):
        return False
    return name not in ("train", "held_out", "ema") and not name.startswith("ema_")


LONGEST_PATTERN = 100_000
"""Rows after which a mixture's components have come exactly by their weights: five digits of a weight."""


def whole_weights(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the proportions of the weights, which count as the decimals they are written as."""
    fractions = [Fraction(str(weight)) for weight in weights]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * unit) for fraction in fractions]
    return [number // (math.gcd(*whole) or 1) for number in whole]
