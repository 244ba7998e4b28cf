"""How much of what the devices could compute a model makes use of: the model FLOPs utilisation (MFU).

MFU = floating-point operations that a step of the model needs / (seconds of the step · peak of all devices)

after PaLM (arXiv 2204.02311, appendix B). What a step needs is the task's own count, `Task.flops(rows).training`:
matrix products only, recomputation not counted, rows counted whole although they may hold padding, causal attention
counted as the half that is needed. It depends on the rows of a step, and not on how they are split into micro-batches.
"""

import re
from collections.abc import Iterable

PEAK_TERAFLOPS: dict[str, float] = {
    r"NVIDIA A100\b.*": 312,
    r"NVIDIA H100 80GB HBM3": 989,
    r"NVIDIA H200": 989,
    r"NVIDIA B200": 2250,
}
"""JAX's name of a device to its peak in dense bfloat16 matrix products, in TFLOP/s, from NVIDIA's data sheets.

The whole name must match: an H100 on PCIe, or a part of a card (MIG), has another peak. Runs in float32 are measured
against the same number, so that MFU tells what the card could do, not what the chosen precision allows.
"""


def peak_flops(device_kinds: Iterable[str]) -> float | None:
    """The peak of these devices together, in FLOP/s; None where one of them isn't known."""
    peaks = [_peak(kind) for kind in device_kinds]
    known = [peak for peak in peaks if peak is not None]
    return sum(known) * 1e12 if known and len(known) == len(peaks) else None


def model_flops_utilisation(step_flops: float, seconds: float, peak: float) -> float:
    """The share, from 0 to 1, of `peak` FLOP/s that a step of `step_flops` in so many seconds made use of."""
    return step_flops / (seconds * peak)


def _peak(kind: str) -> float | None:
    if " MIG " in kind:
        return None
    return next((peak for name, peak in PEAK_TERAFLOPS.items() if re.fullmatch(name, kind)), None)
