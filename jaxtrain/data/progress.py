"""Progress of a preparation for the person who waits: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxtrain.data.prepare import Report
from jaxtrain.telemetry.progress import SteadyConsole


@contextmanager
def console_progress(console: Console | None = None) -> Iterator[Report]:
    """A `Report` that shows progress on `console` (default: standard error)."""
    console = console or SteadyConsole(stderr=True)
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bars:
            yield _bars(bars)
    else:
        yield _lines(console)


def _bars(bars: Progress) -> Report:
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int) -> None:
        if what not in tasks:
            for task in bars.tasks:
                if task.total is None:  # nobody knew how much it was, but now it is over
                    bars.update(task.id, total=1, completed=1)
            tasks[what] = bars.add_task(what, total=total or None)
        bars.update(tasks[what], completed=done)

    return report


def _lines(console: Console) -> Report:
    begun: set[str] = set()

    def report(what: str, done: int, total: int) -> None:
        if what not in begun:
            begun.add(what)
            console.print(f"{what} …", soft_wrap=True, markup=False, highlight=False)
        if total and done == total:
            console.print(f"{what}: {done} of {total}", soft_wrap=True, markup=False, highlight=False)

    return report
