"""What happens once a save is complete, beside the loop."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain.checkpoint.directory import is_complete
from jaxtrain.resilience.whereabouts import here

_LOOK_AGAIN = 0.1


class Completion:
    """Calls `then` in a thread of its own as soon as a checkpoint is complete.

    Orbax's own callback won't do: it comes before the rename that makes the checkpoint one.

    Args:
        check_save: raises what made the save fail, if it has failed.
    """

    def __init__(self, path: Path, then: Callable[[], None], check_save: Callable[[], None]):
        self._path = path
        self._check_save = check_save
        self._then = then
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._watch, name="save-completion", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether the save is complete and `then` has run, after so many seconds at most.

        Raises:
            Exception: what made the save fail, as soon as it does.
        """
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_LOOK_AGAIN)
            self._check_save()
        return not self._thread.is_alive()

    def ended(self) -> None:
        """The save has ended, well or not; returns when `then` has run if it ended well."""
        self._ended.set()
        self._thread.join()

    def check(self) -> None:
        """Raises what `then` raised."""
        if self._error is not None:
            raise self._error

    def _watch(self) -> None:
        with here.background("save"):
            while not is_complete(self._path):
                if self._ended.wait(_LOOK_AGAIN) and not is_complete(self._path):
                    return
            try:
                self._then()
            except Exception as error:
                self._error = error
