"""`RUN/metrics.jsonl`: one value per step, whatever was killed and resumed in between."""

from pathlib import Path
from typing import Any, Self

from jaxtrain.files import replace_file
from jaxtrain.telemetry import jsonl

_NUMBERS = ("loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "data_wait")


class MetricsWriter:
    """Appends metrics; steps that a resumed run will repeat are dropped on opening.

    A line of training carries `step, loss, grad_norm, learning_rate, tokens` (counted ones, of this step),
    `tokens_per_second, step_seconds, data_wait` (a share of the step's time), with a batch ramp `global_batch`; a line
    of evaluation `step` and `eval_NAME` for each metric of the task, `eval_loss` among them, and with a moving average
    of the weights `eval_ema_NAME`. NaN and infinity are written as `jsonl.encode`
    says.

    Exactly one process writes; the numbers it is given are global ones.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        """Keeps the lines up to and with `resume_step`, the last step of the restored state; none at 0, a new start."""
        _drop_lines_after(path, resume_step)
        self._file = path.open("a", encoding="utf-8")

    def write(self, *, step: int, **values: Any) -> None:
        """Appends one line and hands it to the operating system, so that it outlives a killed process."""
        self._file.write(jsonl.encode({"step": step, **values}))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file in order; one that is being written, was torn or is no metrics is passed over."""
    return jsonl.read(path, _decode)


def _decode(line: str) -> dict[str, Any] | None:
    """Of a whole line: a step, and what is measured as numbers, or null."""
    record = jsonl.decode_line(line)
    if record is None or type(record.get("step")) is not int:
        return None
    measured = [value for name, value in record.items() if name in _NUMBERS or name.startswith("eval_")]
    return record if all(value is None or type(value) in (int, float) for value in measured) else None


def _drop_lines_after(path: Path, resume_step: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    replace_file(path, jsonl.lines_below(path, "step", resume_step + 1 if resume_step else 0))
