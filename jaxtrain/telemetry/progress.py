"""How far a run is: a live bar on a terminal, plain lines in a log, nothing from all processes but the first."""

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

WINDOW = 20

# A line has room for these; a bar of 80 columns only for the first.
FIELDS = {"loss": "loss {:.4f}", "grad_norm": "grad_norm {:.2f}", "learning_rate": "lr {:.1e}"}
BAR_FIELDS = {"loss": FIELDS["loss"]}
BAR_WIDTH = 20


class Advance(Protocol):
    """Reports that `count` more are done."""

    def __call__(self, count: int = 1) -> None: ...


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
        self._console = _console(stream, silent)
        self._bar: Progress | None = None
        if _is_live(self._console):
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
        _print_line(self._console, text)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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


@contextmanager
def task_progress(
    description: str, total: int | None = None, stream: TextIO | None = None, *, silent: bool = False
) -> Iterator[Advance]:
    """Shows how far a long task other than training is; `total` None: nobody knows how much it will be.

    On a terminal it is a bar. Elsewhere it is a line for each tenth, where the total is known, and one at the end:

        packing documents: 4,000 of 10,000
        packing documents: 10,000 in 12.3 s

    Yields:
        `advance(count=1)`, to be called for what got done.
    """
    console = _console(stream, silent)
    if _is_live(console):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(description, total=total)
            yield lambda count=1: bar.advance(task, count)
        return

    done, start = 0, time.monotonic()

    def advance(count: int = 1) -> None:
        nonlocal done
        before, done = done, done + count
        if total and done < total and 10 * done // total > 10 * before // total:
            _print_line(console, f"{description}: {done:,} of {total:,}")

    yield advance
    _print_line(console, f"{description}: {done:,} in {time.monotonic() - start:.1f} s")


class _Console(Console):
    """Never hides the cursor: a killed program could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        return super().show_cursor(True)


def _console(stream: TextIO | None, silent: bool) -> Console:
    return _Console(file=sys.stdout if stream is None else stream, quiet=silent)


def _is_live(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal and not console.quiet


def _print_line(console: Console, text: str) -> None:
    if _is_live(console):
        console.print(Text(text))
    elif not console.quiet:
        console.file.write(text + "\n")  # as it is: rich would break a line at 80 columns
        console.file.flush()
