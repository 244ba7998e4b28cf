"""What changed between the configuration that a run began with and the one it is asked to go on with."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config.schema import Config
from jaxtrain.config.tree import key_at, own_key_may_change

ABSENT = "(absent)"


@dataclass(frozen=True)
class Difference:
    """One key with another value; `ABSENT` stands for a key that one side doesn't have."""

    key: str
    saved: Any
    now: Any
    may_change: bool

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.saved)} -> {_shown(self.now)}"


def difference(saved: Mapping[str, Any], now: Config) -> list[Difference]:
    """Every key whose value differs, in the order of the schema, then keys that only the saved run has.

    `saved` is the `to_dict()` of an earlier run, perhaps by another version. A key that it doesn't have counts as the
    default, since the run knew nothing else. A key that no longer exists may not change: what it did is unknown.
    """
    return list(_differences(saved, now.to_dict(), ""))


def format_differences(differences: Sequence[Difference]) -> str:
    """One aligned line `key: saved -> now` for each difference."""
    key_width = max((len(change.key) for change in differences), default=0) + 1
    saved_width = max((len(_shown(change.saved)) for change in differences), default=0)
    return "\n".join(
        f"{change.key + ':':<{key_width}} {_shown(change.saved):<{saved_width}} -> {_shown(change.now)}"
        for change in differences
    )


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str) -> Iterator[Difference]:
    for name in [*now, *(name for name in saved if name not in now)]:
        path = f"{prefix}{name}"
        known = key_at(path)
        default = known.default if known is not None and known.has_default else ABSENT
        before = saved.get(name, default)
        after = now.get(name, ABSENT)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{path}.")
        elif before == ABSENT and isinstance(after, Mapping):
            yield from _differences({}, after, f"{path}.")
        elif before != after:
            yield Difference(path, before, after, own_key_may_change(path) if known is None else known.may_change)


def _shown(value: Any) -> str:
    return ABSENT if value == ABSENT else json.dumps(value, ensure_ascii=False, default=str)
