"""What the processes of a run tell each other beside the devices: short texts by key, in JAX's coordination service.

The service lives in process 0 and ends with it: whatever stands there is of this start alone.
"""

import threading

import jax
from orbax.checkpoint import multihost

_PREFIX = "jaxtrain"


class Unreachable(Exception):
    """Process 0, where the texts lie, does not answer: it is gone, or the network to it is."""


class Channel:
    """Keys are paths such as `watchdog/3`. Any thread of any process may use it.

    No method waits for another process to do something; but each asks process 0, and as long as that one is stopped
    it may not return. A thread that must not be held up leaves the asking to another one.

    Raises:
        Unreachable: from every method, where process 0 doesn't answer.
    """

    def __init__(self) -> None:
        several = jax.distributed.is_initialized() and jax.process_count() > 1
        self._client = multihost.get_jax_distributed_client() if several else None
        self._own: dict[str, str] = {}
        self._lock = threading.Lock()

    def put(self, key: str, text: str) -> None:
        """Everybody who asks from now on gets this text."""
        if self._client is None:
            with self._lock:
                self._own[key] = text
            return
        try:
            self._client.key_value_set(f"{_PREFIX}/{key}", text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise Unreachable(str(error)) from error

    def get(self, key: str) -> str | None:
        """The text that was put last; None where there is none."""
        if self._client is None:
            return self._own.get(key)
        try:
            return str(self._client.key_value_try_get(f"{_PREFIX}/{key}"))
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith("NOT_FOUND"):
                return None
            raise Unreachable(str(error)) from error

    def get_all(self, folder: str) -> dict[str, str]:
        """What lies below a folder such as `watchdog`, by the rest of its key: `3` of `watchdog/3`."""
        if self._client is None:
            with self._lock:
                found = list(self._own.items())
            start = f"{folder}/"
        else:
            start = f"{_PREFIX}/{folder}/"
            try:
                found = self._client.key_value_dir_get(start)
            except jax.errors.JaxRuntimeError as error:
                raise Unreachable(str(error)) from error
        return {key.removeprefix(start): text for key, text in found if key.startswith(start)}
