"""Parameters that are not trained, chosen by name.

Where only some parameters take part (gradients, moments, the average), the others are None in the tree: they take no
memory, and no function that maps over the tree sees them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import jax

from jaxtrain.errors import ConfigError
from jaxtrain.models.parameters import ParameterInfo, named_leaves, path_name


def freeze(infos: Any, patterns: Sequence[str], place: str = "") -> Any:
    """`infos` with `frozen` set where a pattern matches the parameter's name.

    A pattern is a name as in the start-up table, in which `*` stands for anything (dots too), `?` for one character.

    Raises:
        ConfigError: a pattern without a match, with the nearest names; or nothing is left to train.
    """
    names = list(named_leaves(infos))
    where = f"{place}: " if place else ""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"{where}optimizer.frozen: {pattern} matches no parameter; {_nearest(pattern, names)}")
    if patterns and all(any(fnmatchcase(name, pattern) for pattern in patterns) for name in names):
        raise ConfigError(f"{where}optimizer.frozen: {', '.join(patterns)} leaves no parameter to train")

    def freeze_one(path: tuple[Any, ...], info: ParameterInfo) -> ParameterInfo:
        return dataclasses.replace(info, frozen=any(fnmatchcase(path_name(path), pattern) for pattern in patterns))

    return jax.tree_util.tree_map_with_path(freeze_one, infos)


def _nearest(pattern: str, names: Sequence[str]) -> str:
    close = get_close_matches(pattern, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"the parameters are {', '.join(names)}"


def pick(tree: Any, infos: Any, wanted: Callable[[ParameterInfo], bool]) -> Any:
    """A tree like `infos` with None where the parameter isn't wanted."""
    return jax.tree.map(lambda info, leaf: leaf if wanted(info) else None, infos, tree)


def trainable(tree: Any, infos: Any) -> Any:
    """The tree with None in place of frozen parameters."""
    return pick(tree, infos, lambda info: not info.frozen)


def like(tree: Any, partial: Any) -> Any:
    """The tree with None wherever `partial` has None."""
    return jax.tree.map(lambda a, b: None if a is None else b, partial, tree, is_leaf=_is_none)


def complete(partial: Any, full: Any) -> Any:
    """`partial` with the leaves of `full` in place of None."""
    return jax.tree.map(lambda a, b: b if a is None else a, partial, full, is_leaf=_is_none)


def _is_none(node: Any) -> bool:
    return node is None
