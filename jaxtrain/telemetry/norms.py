"""`RUN/norms.jsonl`: norms of each parameter, layer by layer.

A line is `{"step": 20, "gradient_norm": {"embed.table": 0.2, "layers.mlp.up": [0.1, 0.3]}, "parameter_norm": …,
"update_norm": …}`; a stacked parameter has one norm for each of its layers. A norm that isn't finite is null.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.telemetry import jsonl

ByParameter = dict[str, float | list[float]]
"""Name of a parameter to its norm, or to those of its layers."""
NamedNorms = dict[str, ByParameter]
"""Kind of norm to the norms of that kind."""


def as_json(norms: NamedNorms) -> dict[str, Any]:
    """The fields of a line."""
    return {
        kind: {
            name: [_finite(norm) for norm in norms] if isinstance(norms, list) else _finite(norms)
            for name, norms in by_parameter.items()
        }
        for kind, by_parameter in norms.items()
    }


def read_norms(path: Path) -> list[dict[str, Any]]:
    """The lines of a file in order, with NaN for null."""
    return [{kind: _with_nan(value) for kind, value in line.items()} for line in jsonl.read(path, _decode)]


def _decode(line: str) -> dict[str, Any] | None:
    """Of a whole line: a step, and for each kind the norms by parameter; None: it is another one's."""
    record = jsonl.decode_line(line)
    if record is None or type(record.get("step")) is not int:
        return None
    return record if all(_is_norms(value) for kind, value in record.items() if kind != "step") else None


def _is_norms(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    found = [norm for norms in value.values() for norm in (norms if isinstance(norms, list) else [norms])]
    return bool(found) and all(norm is None or type(norm) in (int, float) for norm in found)


def layer_by_layer(norms: ByParameter) -> Iterator[tuple[str, float]]:
    """Yields each norm alone: a stacked parameter's layer 3 is named `layers.mlp.up/3`."""
    for name, norm in norms.items():
        if isinstance(norm, list):
            yield from ((f"{name}/{layer}", value) for layer, value in enumerate(norm))
        else:
            yield name, norm


def update_ratios(norms: NamedNorms) -> dict[str, float]:
    """By how much of its own size each parameter changed in the step; NaN where it was zero."""
    before, update = dict(layer_by_layer(norms["parameter_norm"])), dict(layer_by_layer(norms["update_norm"]))
    return {name: norm / before[name] if before[name] else math.nan for name, norm in update.items()}


def _finite(norm: float) -> float | None:
    return norm if math.isfinite(norm) else None


def _with_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _with_nan(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_nan(inner) for inner in value]
    return math.nan if value is None else value
