"""A signal is for the thread that listens: no other one may exist that could take it."""

import subprocess
import sys

from tests.runs import ROOT

PROGRAM = """
import os, sys, jaxtrain.train
print(len(os.listdir("/proc/self/task")), *sorted({"jax", "numpy", "orbax"} & set(sys.modules)))
"""


def test_the_trainer_starts_no_thread_and_no_library_that_does_before_it_listens() -> None:
    """numpy's threads would not block SIGTERM, which JAX's own handler would then swallow."""
    printed = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    assert printed.stdout.split() == ["1"]
