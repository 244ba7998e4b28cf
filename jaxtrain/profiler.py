"""A window of steps traced by JAX's profiler."""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import ProfileConfig
from jaxtrain.errors import first_line

_log = logging.getLogger(__name__)


class ProfileWindow:
    """Traces the steps of `config`, on this process's devices, into a directory of this process's own.

    A start that goes on in the middle of the window traces what is left of it, one that goes on behind it nothing.
    A trace that can't be taken or written is a warning: the training goes on.

    Args:
        directory: gets `plugins/profile/DATE/HOST.xplane.pb` and `HOST.trace.json.gz`, as TensorBoard and XProf read.
        written: called with the first and the last traced step and the seconds that writing took.
    """

    def __init__(self, config: ProfileConfig, directory: Path, written: Callable[[int, int, float], None]):
        self._directory = directory
        self._written = written
        self._window = range(config.start, config.start + config.steps) if config.start is not None else range(0)
        self._traced: list[int] | None = None
        self._spent = False

    def turns(self, step: int) -> bool:
        """Whether a trace begins or ends when `step` is done."""
        return bool(self._window) and step in (self._window[0] - 1, self._window[-1])

    def begin(self, step: int, state: Any) -> None:
        """Begins the trace if the step after `step` is in the window; `state` is what the devices compute last."""
        if self._traced is not None or self._spent or step + 1 not in self._window:
            return
        jax.block_until_ready(state)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # a line for every call of Python would slow down what is measured
        options.raise_error_on_start_failure = True
        self._spent = True
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._directory, profiler_options=options)
        except Exception as error:  # as various as the devices; none is worth the run
            self._warn(error)
        else:
            self._traced = []

    def step(self, step: int) -> contextlib.AbstractContextManager[object]:
        """Marks what is dispatched inside as `step`."""
        if self._traced is None:
            return contextlib.nullcontext()
        self._traced.append(step)
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, step: int, state: Any) -> None:
        """Ends the trace if `step`, which is done, is the last of the window."""
        if self._window and step >= self._window[-1]:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Ends and writes a trace that is still taken."""
        if self._traced is None:
            return
        traced, self._traced = self._traced, None
        started = time.perf_counter()
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            self._warn(error)
        else:
            if traced:
                self._written(traced[0], traced[-1], time.perf_counter() - started)

    def _warn(self, error: Exception) -> None:
        _log.warning("%s: no profile could be taken (%s)", self._directory, first_line(error))
