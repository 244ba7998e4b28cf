"""One supervisor for each run."""

import fcntl
import json
import os
import time
from typing import TextIO

from jaxtrain.errors import ConfigError, refusing_os_errors
from jaxtrain.run_directory import RunDirectory

LOCK = "supervisor.lock"


def claim(directory: RunDirectory) -> TextIO:
    """Holds the run against another supervisor until the file that is returned is closed; the kernel lets go if we die.

    Raises:
        ConfigError: there is one, or the directory can't be written.
    """
    with refusing_os_errors(f"run_dir={directory.path}", "choose another run_dir"):
        directory.path.mkdir(parents=True, exist_ok=True)
        file = (directory.path / LOCK).open("a+", encoding="utf-8", errors="replace")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise ConfigError(
            f"run_dir={directory.path}: another supervisor runs it ({holder or 'unknown'}); end that one, or choose "
            f"another run_dir"
        ) from None
    except OSError:
        return file  # no locks on this file system; process 0's own claim is tried as well
    me = json.dumps({"pid": os.getpid(), "host": os.uname().nodename}) + "\n"
    with refusing_os_errors(f"run_dir={directory.path}", "free some space, or choose another run_dir"):
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), me.encode())
    return file


def wait_for_former_processes(directory: RunDirectory, patience: float = 10.0) -> None:
    """Waits until no training holds the run: those of a supervisor that was killed may take a moment to be gone.

    Raises:
        ConfigError: one still does after so many seconds.
    """
    until = time.monotonic() + patience
    while True:
        try:
            directory.claim().close()
            return
        except ConfigError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        except OSError:
            return  # a disk that is full or can't be written; the training says so
