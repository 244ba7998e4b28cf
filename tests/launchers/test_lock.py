"""One supervisor for each run."""

from pathlib import Path

from jaxtrain.launchers.lock import LOCK, claim
from jaxtrain.run_directory import RunDirectory


def test_a_run_is_held_on_a_full_disk_too(tmp_path: Path) -> None:
    (tmp_path / LOCK).symlink_to("/dev/full")
    claim(RunDirectory(tmp_path)).close()
