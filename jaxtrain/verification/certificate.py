"""What two trainings have in common: how it is measured, and how much may differ.

Arrays are compared as vectors, parameter by parameter and layer by layer, so that a small parameter counts as much as a
large one. How each is measured follows from what rounding does to it:

- Gradients: ‖a - b‖ / ‖a‖, in Euclidean norms. Where a parameter's gradient is nothing but rounding (softmax doesn't
  see a bias of its keys), its norm is taken to be `NOISE` of what its share of the whole gradient would be.
- Parameters after some steps: Σ|a - b| / Σ|a - start|, against what the updates did. An optimizer that divides by the
  gradient's size (AdamW, Lion) turns a rounding of an element near 0 into a whole step of it: one element in a million,
  of which a sum of absolute values takes no more notice than it must, and a Euclidean norm a thousand times more.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

NOISE = 1e-3
TOLERANCE = 1e-5
"""Relative, in float32."""
TOLERANCE_OF_PIPELINE = 1e-4
AVERAGE = "ema."
"""What the names of averages of parameters begin with."""
LATER = 10
"""What the optimizer has made of a difference may be so many times larger."""
TOLERANCE_OF_PARAMETERS = 1e-3
"""After several steps, of what their updates did. An optimizer that takes the sign of a gradient lets one rounding
change later gradients by a thousandth, at rates that large, while from the same state all steps are equal to 1e-6."""

Arrays = Mapping[str, np.ndarray]
"""By name; arrays whose name is in `stacked` hold a layer at each index of their first dimension."""


@dataclass(frozen=True)
class Trained:
    """What one training left.

    Attributes:
        initial: parameters before the first step.
        gradients: of each step, before clipping; those of frozen parameters are missing.
        final: parameters after the last step, and their average where there is one.
        losses, norms: of each step; the norm is the gradient's, before clipping.
    """

    initial: Arrays
    gradients: tuple[Arrays, ...]
    final: Arrays
    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True)
class HandedOver:
    """The mesh's last step, where it begins with the state that one device has then.

    Attributes:
        start, final: parameters before and after it, and their average where there is one.
        gradients: before clipping.
    """

    start: Arrays
    gradients: Arrays
    final: Arrays


@dataclass(frozen=True)
class Check:
    """One thing that must be the same.

    Attributes:
        one_device, mesh: the numbers, where it is one.
        difference: relative to that of one device; infinite where one of them isn't finite or is missing.
        where: the parameter, and its layer, where the difference is largest.
        left_out: the parameters that couldn't be compared, having no gradient but rounding.
    """

    what: str
    difference: float
    tolerance: float
    one_device: float | None = None
    mesh: float | None = None
    where: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance."""
        return self.difference <= self.tolerance


@dataclass(frozen=True)
class Certificate:
    """Whether a mesh trains as one device does.

    Attributes:
        mesh: the axes that split something, with their small sizes.
        made_small: what differs from the config, by section.
        choices: how the mesh's program is computed.
        config: the small config, every key.
    """

    mesh: Mapping[str, int]
    devices: int
    steps: int
    rows: str
    made_small: Mapping[str, list[str]]
    choices: Mapping[str, str]
    checks: tuple[Check, ...]
    config: Mapping[str, Any]

    @property
    def failed(self) -> list[Check]:
        """The checks that a difference didn't pass."""
        return [check for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return not self.failed

    def as_data(self) -> dict[str, Any]:
        """Everything as plain data for JSON; a difference that isn't finite is null."""
        checks = [
            {
                **asdict(check),
                **{name: _finite(getattr(check, name)) for name in ("difference", "one_device", "mesh")},
                "passed": check.passed,
            }
            for check in self.checks
        ]
        return {"passed": self.passed, **asdict(self), "checks": checks}


def compare(
    alone: Trained, split: Trained, handed_over: HandedOver, stacked: Collection[str], tolerance: float
) -> tuple[Check, ...]:
    """The checks: of the start, of the first step, of what follows from it.

    Args:
        stacked: names of arrays that hold a layer at each index of their first dimension.
        tolerance: relative, for everything but the initial parameters, which have the same bits.
    """
    steps, later = len(alone.losses), LATER * tolerance
    losses, norms = zip(alone.losses, split.losses, strict=True), zip(alone.norms, split.norms, strict=True)
    heard = set().union(*(_heard(each, stacked) for each in alone.gradients))
    last = f"step {steps} from the same state"
    loss, *more_losses = [_number(f"loss of step {i}", *pair, tolerance) for i, pair in enumerate(losses, 1)]
    norm, *more_norms = [
        _number(f"gradient norm of step {i}", *pair, tolerance if i == 1 else later) for i, pair in enumerate(norms, 1)
    ]
    gradients = [
        _gradients(alone.gradients[0], split.gradients[0], stacked),
        _gradients(alone.gradients[-1], handed_over.gradients, stacked),
    ]
    updates = [
        _updates(handed_over.start, alone.final, handed_over.final, stacked, heard),
        _updates(alone.initial, alone.final, split.final, stacked, heard),
    ]
    return (
        _initial(alone.initial, split.initial),
        loss,
        norm,
        _largest("gradients of step 1", gradients[0], tolerance),
        *more_losses,
        *more_norms,
        _largest(f"parameters after step {steps}", updates[1], TOLERANCE_OF_PARAMETERS),
        _largest(f"gradients of {last}", gradients[1], tolerance),
        _largest(f"update of {last}", updates[0], later),
    )


def _initial(alone: Arrays, split: Arrays) -> Check:
    """Passes where every bit is the same; bits differ also where numbers don't, as in 0.0 and -0.0."""
    smallest = float(np.finfo(np.float32).tiny)
    differences: dict[str, float | None] = {
        name: 0.0 if _same_bits(a, split[name]) else max(_relative(_most(split[name] - a), _most(a)), smallest)
        for name, a in alone.items()
    }
    return _largest("initial parameters", differences, 0.0)


def _most(array: np.ndarray) -> float:
    return float(np.abs(array).max())


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def _number(what: str, alone: float, split: float, tolerance: float) -> Check:
    return Check(what, _relative(abs(split - alone), abs(alone)), tolerance, alone, split)


def _largest(what: str, differences: Mapping[str, float | None], tolerance: float) -> Check:
    compared = {name: value for name, value in differences.items() if value is not None}
    where = max(compared, key=compared.__getitem__, default="") if any(compared.values()) else ""
    left_out = tuple(name for name in differences if name not in compared)
    return Check(what, compared.get(where, 0.0), tolerance, where=where, left_out=left_out)


def _gradients(alone: Arrays, split: Arrays, stacked: Collection[str]) -> dict[str, float | None]:
    """How much each part's gradient differs."""
    noise = _noise(alone, stacked)
    return {
        name: _relative(float(np.linalg.norm(b - a)), max(float(np.linalg.norm(a)), noise[name]))
        for (name, a), (_, b) in zip(_parts(alone, stacked), _parts(split, stacked), strict=True)
    }


def _heard(gradients: Arrays, stacked: Collection[str]) -> set[str]:
    """The parts whose gradient is more than rounding."""
    noise = _noise(gradients, stacked)
    return {name for name, part in _parts(gradients, stacked) if np.linalg.norm(part) > noise[name]}


def _noise(gradients: Arrays, stacked: Collection[str]) -> dict[str, float]:
    """The norm below which each part's gradient may be nothing but rounding."""
    sizes = {name: part.size for name, part in _parts(gradients, stacked)}
    whole = math.sqrt(sum(float(np.square(part).sum()) for _, part in _parts(gradients, stacked)))
    share = NOISE * whole / math.sqrt(max(sum(sizes.values()), 1))
    return {name: share * math.sqrt(size) for name, size in sizes.items()}


def _updates(
    start: Arrays, alone: Arrays, split: Arrays, stacked: Collection[str], heard: Collection[str]
) -> dict[str, float | None]:
    """How much the updates of each part differ; None for one that isn't heard, whose update is rounding too."""
    differences: dict[str, float | None] = {}
    starts = dict(_parts(start, stacked))
    for (name, a), (_, b) in zip(_parts(alone, stacked), _parts(split, stacked), strict=True):
        parameter = name.removeprefix(AVERAGE)
        moved = float(np.abs(a - starts.get(name, starts[parameter])).sum())
        compared = parameter in heard or moved == 0
        differences[name] = _relative(float(np.abs(b - a).sum()), moved) if compared else None
    return differences


def _parts(arrays: Arrays, stacked: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Each array, or each layer of it, as a vector in float64."""
    for name, array in arrays.items():
        exact = array.astype(np.float64)
        if name.removeprefix(AVERAGE) in stacked:
            yield from ((f"{name}[{i}]", layer.ravel()) for i, layer in enumerate(exact))
        else:
            yield name, exact.ravel()


def _relative(difference: float, size: float) -> float:
    """Infinite where it is no number, so that it passes no check."""
    if difference == 0:
        return 0.0
    ratio = difference / size if size else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
