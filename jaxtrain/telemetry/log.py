"""`RUN/logs/process-N.log`: what the program and its libraries say, with time stamps."""

import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import TextIO

FILE_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"


def open_log(run_dir: Path, process: int) -> logging.Logger:
    """Sends the logging of the whole program to `RUN/logs/process-N.log` and warnings to stderr too.

    The file takes everything from INFO, tracebacks included, and is appended to over restarts. On stderr a text shows
    once however often it is logged, without its traceback: from WARNING in process 0, only from ERROR in the others,
    since a warning of one is mostly a warning of all. What only the file should have, such as the traceback of an
    error whose message a person is shown, is logged at INFO. Python's own warnings take the same way. A second call
    replaces the first.

    Returns:
        The logger `jaxtrain`.
    """
    close_log()
    path = run_dir / "logs" / f"process-{process}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _File(path, encoding="utf-8")
    formatter = logging.Formatter(FILE_FORMAT, datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    file.setFormatter(formatter)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if type(handler) is logging.StreamHandler]:
        root.removeHandler(handler)  # absl, which Orbax logs through, adds one for stderr as soon as it finds none
    root.setLevel(logging.INFO)
    root.addHandler(file)
    root.addHandler(_Stderr(logging.WARNING if process == 0 else logging.ERROR))
    logging.captureWarnings(True)
    return logging.getLogger("jaxtrain")


def close_log() -> None:
    """Undoes `open_log`; without effect when none is open."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, _File | _Stderr)]:
        root.removeHandler(handler)
        handler.close()
        root.setLevel(logging.WARNING)
        logging.captureWarnings(False)


class _File(logging.FileHandler):
    """Says once that it can't write, as on a full disk, where `logging` would show a traceback for every line."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._told:
            self._told = True
            sys.stderr.write(
                f"WARNING: {self.baseFilename}: can't be written ({sys.exc_info()[1]}); lines are missing\n"
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _Line(logging.Formatter):
    """The message alone: what a person can't act on stays in the file."""

    def format(self, record: logging.LogRecord) -> str:
        plain = logging.makeLogRecord({**vars(record), "exc_info": None, "exc_text": None, "stack_info": None})
        return super().format(plain)


class _Stderr(logging.StreamHandler[TextIO]):
    """Looks `sys.stderr` up for each line: while a progress bar is shown, it is one that prints above the bar."""

    def __init__(self, level: int) -> None:
        logging.Handler.__init__(self, level)
        self._shown: set[str] = set()
        self.setFormatter(_Line("%(levelname)s: %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._shown:
            self._shown.add(text)
            super().emit(record)
