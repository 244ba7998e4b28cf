"""How far a run is: a live bar on a terminal, plain lines in a log, nothing from all processes but the first."""

import sys
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

WINDOW = 20

# A line has room for these; a bar of 80 columns only for the first.
FIELDS = {"loss": "loss {:.4f}", "grad_norm": "grad_norm {:.2f}", "learning_rate": "lr {:.1e}", "mfu": "mfu {:.1%}"}
BAR_FIELDS = {"loss": FIELDS["loss"]}
BAR_WIDTH = 20


class TrainingProgress:
    """Shows each step of a run; a context manager.

    On a terminal it is a bar with the newest step. Elsewhere it is a line for the first step, the last, and each
    that `log_every` divides:

        step 120/400  loss 3.2104  grad_norm 0.81  lr 2.0e-03  9,876 tokens/s  eta 0:03:12

    Speed and time left are those of the last 20 steps, without what lies between steps, such as evaluation.
    """

    def __init__(
        self,
        total_steps: int,
        start_step: int = 0,
        log_every: int = 1,
        stream: TextIO | None = None,
        *,
        silent: bool = False,
    ) -> None:
        """Goes on after the finished step `start_step`; `stream` is stdout unless given; `silent` shows nothing."""
        self._total = total_steps
        self._first = start_step + 1
        self._log_every = log_every
        self._step_seconds: deque[float] = deque(maxlen=WINDOW)
        self._step_tokens: deque[float] = deque(maxlen=WINDOW)
        self._console = SteadyConsole(file=sys.stdout if stream is None else stream, quiet=silent)
        self._bar: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal and not silent:
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(BAR_WIDTH),
                TextColumn("{task.fields[news]}"),
                console=self._console,
            )
            self._task: TaskID = self._bar.add_task("", total=total_steps, completed=start_step, news="")

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Takes the metrics of a finished step; all but `step` may be missing."""
        step = int(metrics["step"])
        if metrics.get("step_seconds") is not None:
            self._step_seconds.append(float(metrics["step_seconds"]))
            self._step_tokens.append(float(metrics.get("tokens", 0)))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, news=self._news(step, metrics, BAR_FIELDS))
        elif step in (self._first, self._total) or step % self._log_every == 0:
            self.message(f"step {step}/{self._total}  {self._news(step, metrics, FIELDS)}")

    def message(self, text: str) -> None:
        """Prints a line of its own, above the bar if there is one."""
        if self._bar is not None:
            self._console.print(Text(text))
        elif not self._console.quiet:
            self._console.file.write(text + "\n")  # as it is: rich would break a line at 80 columns
            self._console.file.flush()

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _news(self, step: int, metrics: Mapping[str, Any], fields: Mapping[str, str]) -> str:
        parts = [form.format(float(metrics[key])) for key, form in fields.items() if metrics.get(key) is not None]
        seconds = sum(self._step_seconds)
        if seconds > 0:
            if any(self._step_tokens):
                parts.append(f"{sum(self._step_tokens) / seconds:,.0f} tokens/s")
            left = (self._total - step) * seconds / len(self._step_seconds)
            parts.append(f"eta {timedelta(seconds=round(left))}")
        return "  ".join(parts)


class SteadyConsole(Console):
    """Never hides the cursor: a killed program could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return super().show_cursor(True)
