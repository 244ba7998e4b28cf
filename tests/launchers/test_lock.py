"""One supervisor for each run."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.launchers.lock import claim
from jaxtrain.run_directory import RunDirectory


def test_a_full_disk_is_refused_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(ConfigError, match=f"run_dir={tmp_path}: No space left on device; free some space"):
        claim(RunDirectory(tmp_path))
