"""Signs by which a process tells what became of others, and that it waits for them."""

import re
import sys
from pathlib import Path
from typing import Any

from jaxtrain.errors import JaxtrainError, MissingWorkerError

_OF_OTHERS = re.compile(
    r"gloo|nccl|connection|socket|broken pipe|peer|heartbeat|coordination|barrier|unavailable|deadline|cancel|abort",
    re.IGNORECASE,
)


def this_machine() -> str:
    """The same for two processes only if they see the same process numbers; empty where that can't be told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs: one that has ended, and that nobody has asked after, doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def is_of_others(error: BaseException) -> bool:
    """Whether an error, or what it was made of, is such as comes of the loss of another process."""
    told = [each for each in (error, error.__cause__) if each is not None and not isinstance(each, JaxtrainError)]
    return isinstance(error, MissingWorkerError) or any(_OF_OTHERS.search(str(each)) for each in told)


def waits_for_others() -> bool:
    """Whether a thread of this process is at a barrier of Orbax's, which doesn't tell us."""
    for frame in sys._current_frames().values():
        inner: Any = frame
        while inner is not None:
            if inner.f_code.co_filename.endswith("multihost/multihost.py"):
                return True
            inner = inner.f_back
    return False
