"""`RUN/run.json`: all that one needs to know to repeat a run, beside its config."""

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
CODE = Path(__file__).resolve().parents[1]
GIT_SECONDS = 20


def run_info(*, seed: int, data_manifest_hash: str | None, devices: Mapping[str, Any]) -> dict[str, Any]:
    """Describes the run that this process is: code, versions, machine, command, data, devices.

    Args:
        data_manifest_hash: of the data set; None for data that has no manifest, such as made-up batches.
        devices: as it shall be written, such as `{"platform": "gpu", "kind": "H100", "count": 8, "processes": 1}`.

    Returns:
        A JSON value. `git` is absent when the code is not from a git checkout.
    """
    info: dict[str, Any] = {
        "command": shlex.join(sys.orig_argv),
        "host": socket.gethostname(),
        "seed": seed,
        "data_manifest_hash": data_manifest_hash,
        "devices": dict(devices),
        "xla_flags": os.environ.get("XLA_FLAGS", "").split(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
    }
    if git := git_state(CODE):
        info["git"] = git
    return info


def package_versions() -> dict[str, str]:
    """The installed versions of what decides a run's numbers; a package that is not installed is absent."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def git_state(code: Path) -> dict[str, Any] | None:
    """`{"commit", "dirty"}` of the checkout that holds the folder `code`, or None without one.

    Dirty means that files in `code` are not as committed or not committed at all; other folders are not looked at.
    """
    try:
        # A package installed into a folder of someone else's checkout is not that checkout's code.
        if not _git(code, "ls-files", "--", "."):
            return None
        commit = _git(code, "rev-parse", "HEAD")
        dirty = bool(_git(code, "status", "--porcelain", "--", "."))
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": dirty}


def _git(folder: Path, *arguments: str) -> str:
    # In a container the checkout often belongs to another user, which git refuses by default.
    command = ["git", "--no-optional-locks", "-c", "safe.directory=*", "-C", str(folder), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS, env=environment)
    return result.stdout.strip()
