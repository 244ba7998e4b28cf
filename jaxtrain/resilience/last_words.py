"""Time to say why, where JAX's runtime ends the process.

When process 0 is gone, or a process falls silent for long, JAX's client aborts all others from C++, and no Python runs
any more. With `sleep` as the handler of that signal, the thread that aborts waits for some seconds first, in which the
watchdog, on another thread, can end the process with a name and a code of its own. Then it is aborted all the same.
"""

import ctypes
import faulthandler
import signal
import sys


def delay_aborts() -> None:
    """From here on SIGABRT shows all stacks, and ends the process six seconds later."""
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    # A handler is called with the signal's number, which for SIGABRT is 6: so many seconds. POSIX lets handlers sleep.
    libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))
    faulthandler.enable(sys.__stderr__ or 2)  # calls the handler that was there when it has shown the stacks
