"""A fault among several keys, and the words in which the nearest right values are told."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxtrain.config.schema import Config
from jaxtrain.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """A fault among several keys; `keys` are all that take part in it."""

    keys: tuple[str, ...]
    message: str


def raise_problems(problems: Iterable[Problem], origins: Mapping[str, str]) -> None:
    lines = []
    for problem in problems:
        places = dict.fromkeys(origins[key] for key in problem.keys if key in origins)
        lines.append(f"{', '.join(places)}: {problem.message}" if places else problem.message)
    if lines:
        raise ConfigError("\n".join(lines))


def valued(config: Config, keys: tuple[str, ...]) -> str:
    texts = []
    for key in keys:
        value: object = config
        for part in key.split("."):
            value = getattr(value, part)
        texts.append(f"{key}={value}")
    return ", ".join(texts)


def multiples(value: int, unit: int) -> str:
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def divisors(value: int, at_most: int | None = None) -> str:
    small = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    divisors = sorted({*small, *(value // divisor for divisor in small)})
    return listed(divisor for divisor in divisors if at_most is None or divisor <= at_most)


def listed(numbers: Iterable[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
