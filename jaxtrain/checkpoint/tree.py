"""The state as it lies on disk: nested dictionaries of arrays, readable without any of our classes."""

from typing import Any

import jax


def to_plain(tree: Any) -> dict[str, Any]:
    """Any pytree of arrays as nested dictionaries keyed by field names and indices; empty containers vanish."""
    plain: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        node = plain
        *parents, last = _keys(path)
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return plain


def from_plain(plain: dict[str, Any], like: Any) -> Any:
    """The inverse: the leaves of `plain` in the structure of `like`.

    Raises:
        KeyError: `plain` lacks a leaf of `like`.
    """

    def pick(path: tuple[Any, ...], _: Any) -> Any:
        node: Any = plain
        for key in _keys(path):
            node = node[key]
        return node

    return jax.tree_util.tree_map_with_path(pick, like)


def _keys(path: tuple[Any, ...]) -> list[str]:
    return [jax.tree_util.keystr((key,), simple=True) for key in path]
