"""One supervisor for each run."""

from pathlib import Path

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.launchers.lock import LOCK, claim
from jaxtrain.run_directory import RunDirectory


def test_a_full_disk_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=f"run_dir={tmp_path}: No space left on device; free some space"):
        claim(RunDirectory(tmp_path))
