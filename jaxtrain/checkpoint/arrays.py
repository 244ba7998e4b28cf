"""The arrays of a checkpoint: how Orbax is told to lay them down, and how they come back, all or only a part."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain import distributed
from jaxtrain.checkpoint.checksum import as_text
from jaxtrain.checkpoint.meta import Unreadable
from jaxtrain.checkpoint.tree import from_plain, to_plain
from jaxtrain.errors import first_line
from jaxtrain.models.parameters import named_leaves

Types = dict[str, list[Any]]
"""Shape and dtype of each leaf, by path name."""

T = TypeVar("T")


def state_handler() -> ocp.PyTreeCheckpointHandler:
    """Orbax's handler without the sharding file, which would tie a plain restore to the saving mesh."""
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False))
    )
    return ocp.PyTreeCheckpointHandler(type_handler_registry=registry)


def array_types(tree: Any) -> Types:
    """What is written into a checkpoint's description of its arrays."""
    return {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in named_leaves(to_plain(tree)).items()}


def read_arrays(path: Path, abstract: Any, *, partial: bool = False) -> Any:
    """The arrays below `path` that `abstract` names, straight into its shardings.

    Orbax casts without a word, so shapes and dtypes must have been compared. `partial` leaves out, and never reads,
    what `abstract` doesn't name.

    Raises:
        Unreadable: a file is missing or damaged.
    """
    plain = to_plain(abstract)
    arguments = ocp.args.PyTreeRestore(
        plain, restore_args=ocp.checkpoint_utils.construct_restore_args(plain), partial_restore=partial
    )
    try:
        return from_plain(state_handler().restore(epath.Path(path), args=arguments), abstract)
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise  # says nothing about the checkpoint
        raise Unreadable(f"{type(error).__name__}: {first_line(error)}") from error


def read_by_all(read: Callable[[], T]) -> T:
    """What `read` returns, if it does so on every process: one that failed has nothing to compute checksums of, and
    the others must not wait for it.

    Raises:
        Unreadable: this process's own, or because another one had one.
    """
    problem: Unreadable | None = None
    result: T | None = None
    try:
        result = read()
    except Unreadable as error:
        problem = error
    if not distributed.all_agree(problem is None):
        raise problem or Unreadable("another process could not read it")
    return result  # type: ignore[return-value]  # all agreed that it was read


def verify(sums: Mapping[str, jax.Array], saved: Mapping[str, str]) -> None:
    """Raises Unreadable with the names of leaves whose content is not what was saved."""
    now = as_text(jax.device_get(dict(sums)))
    wrong = sorted(name for name in now if now[name] != saved.get(name))
    if wrong:
        raise Unreadable(f"the content of {', '.join(wrong[:3])} differs from its checksum")
