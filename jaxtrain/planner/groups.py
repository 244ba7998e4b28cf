"""Which devices talk to each other in a collective, and which axes of the mesh that is.

A compiled program numbers the devices in the order of the mesh (`mesh.devices.flat`) and prints the groups in one of
four forms: listed `{{0,1},{2,3}}`, counted `[8,32]<=[32,8]T(1,0)`, by a mesh of its own
`mesh['a'=8,'b'=4] {'a'}`, and, where data is passed on in a ring, as pairs `{{0,1},{1,0}}`.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxtrain.planner.hlo import HloError

Groups = npt.NDArray[np.int64]
"""[groups, devices]: device numbers, one row a group."""

_REPLICA_GROUPS = re.compile(
    r"replica_groups=(?P<groups>mesh\[[^{]*\{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[\d,]*\},?)*\})"
)
_PAIRS = re.compile(r"source_target_pairs=(\{(?:\{\d+,\d+\},?)*\})")
_IOTA = re.compile(r"\[(?P<dims>[\d,]+)\](?:<=\[(?P<reshape>[\d,]+)\])?(?:T\((?P<order>[\d,]+)\))?")


@dataclass(frozen=True)
class MeshShape:
    """The sizes of a mesh's axes, outermost first."""

    sizes: Mapping[str, int]

    @property
    def devices(self) -> int:
        return math.prod(self.sizes.values())

    def axes_of(self, groups: Groups) -> tuple[str, ...]:
        """The mesh axes along which the devices of a group differ, outermost first."""
        place = np.stack(np.unravel_index(groups, tuple(self.sizes.values())))
        varying = (place != place[:, :, :1]).any(axis=(1, 2))
        return tuple(axis for axis, varies in zip(self.sizes, varying, strict=True) if varies)


def read_groups(attributes: str, devices: int) -> Groups:
    """The groups of a collective from its attributes; empty groups mean all devices.

    Raises:
        HloError: there are none, or they are printed in an unknown form.
    """
    if match := _PAIRS.search(attributes):
        return _listed(match[1])
    match = _REPLICA_GROUPS.search(attributes)
    if match is None:
        raise HloError(f"a collective's groups are printed in a form that isn't known here: {attributes.strip()[:200]}")
    text = match["groups"]
    if text.startswith("mesh"):
        groups = _by_mesh(text)
    elif text.startswith("["):
        groups = _counted(text)
    else:
        groups = _listed(text)
    return groups if groups.size else np.arange(devices)[None]


def _listed(text: str) -> Groups:
    rows = [_numbers(row) for row in re.findall(r"\{([\d,]*)\}", text.strip()[1:-1] or "")]
    return np.array([row for row in rows if row], dtype=np.int64)


def _counted(text: str) -> Groups:
    """`[8,32]<=[32,8]T(1,0)`: count up, in the shape on the right, transpose, in the shape on the left."""
    match = _IOTA.fullmatch(text)
    if match is None:
        raise HloError(f"device numbers are printed in a form that isn't known here: {text}")
    dims = _numbers(match["dims"])
    numbers = np.arange(math.prod(dims)).reshape(_numbers(match["reshape"]) if match["reshape"] else dims)
    if match["order"]:
        numbers = numbers.transpose(_numbers(match["order"]))
    return numbers.reshape(dims)


def _by_mesh(text: str) -> Groups:
    """`mesh['a'=8,'b'=4] {'a'}`: devices in one group differ along the axes that are named behind, in this order.

    A part of an axis is `'a':(2)4`: after its first 2 ways of splitting, the next 4. The mesh may give the numbers of
    its devices: `mesh['a'=8,'b'=4], device_ids=([8,4]<=[4,8]T(1,0))`, or a list in brackets.
    """
    head, _, tail = text.rpartition("{")
    sizes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", head.partition("]")[0])}
    numbers = _device_ids(head, math.prod(sizes.values()))
    shape, names = [], []
    wanted = [_sub_axis(part.strip()) for part in tail.rstrip("} ").split(",") if part.strip()]
    for axis, size in sizes.items():
        cuts = sorted(
            {1, size, *(cut for name, pre, part in wanted if name == axis for cut in (pre, pre * (part or size)))}
        )
        for before, after in itertools.pairwise(cuts):
            shape.append(after // before)
            names.append((axis, before, after))
        if size == 1:
            shape.append(1)
            names.append((axis, 1, 1))
    chosen = [
        place
        for axis, pre, part in wanted
        for place, (name, before, after) in enumerate(names)
        if name == axis and before >= pre and after <= pre * (part or sizes[axis])
    ]
    others = [place for place in range(len(shape)) if place not in chosen]
    per_group = math.prod(shape[place] for place in chosen)
    return numbers.reshape(shape).transpose(others + chosen).reshape(-1, per_group)


def _sub_axis(text: str) -> tuple[str, int, int | None]:
    """(axis, ways it was split before, size; None: the whole axis)."""
    match = re.fullmatch(r"'?([\w.\-]+?)'?(?::\((\d+)\)(\d+))?", text)
    if match is None:
        raise HloError(f"a mesh axis is printed in a form that isn't known here: {text}")
    return match[1], int(match[2] or 1), int(match[3]) if match[3] else None


def _device_ids(head: str, devices: int) -> Groups:
    match = re.search(r"device_ids=\((.*)\)\s*$", head)
    if match is None:
        return np.arange(devices)
    if _IOTA.fullmatch(match[1]):
        return _counted(match[1]).ravel()
    return np.array(_numbers(re.sub(r"[^\d]+", ",", match[1]).strip(",")), dtype=np.int64)


def _numbers(text: str | Sequence[str]) -> list[int]:
    return [int(number) for number in (text.split(",") if isinstance(text, str) else text) if number]
