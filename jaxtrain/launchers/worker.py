"""python -m jaxtrain.launchers.worker MODULE [argument …]: runs a module as `python -m` does, and ends with its parent.

With `--wait IMPORT`, it imports that, so that it is warm, and waits for its orders: one line of JSON on stdin with
`module`, `arguments`, `environment` and `log`, the file that its output goes to.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence

PARENT_VARIABLE = "JAXTRAIN_PARENT"
_PR_SET_PDEATHSIG = 1
_FOR_THE_PROGRAM = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def main(arguments: Sequence[str]) -> None:
    """Becomes the program that is asked for."""
    end_with_parent()
    if arguments[0] == "--wait":
        # Threads that libraries start have the mask of now: a signal is for who listens to it later on.
        signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PROGRAM)
        importlib.import_module(arguments[1])
        arguments = _take_orders()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FOR_THE_PROGRAM)
    sys.argv = list(arguments)
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


def end_with_parent() -> None:
    """The kernel kills this process when its parent dies, however that dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(PARENT_VARIABLE, str(os.getppid())) != str(os.getppid()):
        os._exit(1)  # it died before


def _take_orders() -> list[str]:
    line = sys.stdin.readline()
    if not line:
        sys.exit(0)  # not needed any more
    orders = json.loads(line)
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        log = os.open(orders["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        log = nowhere  # a full disk; the run goes on
    os.dup2(nowhere, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(orders["environment"])
    return [orders["module"], *orders["arguments"]]


if __name__ == "__main__":
    main(sys.argv[1:])
