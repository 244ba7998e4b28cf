"""What a run shows is for whoever looks: that nobody looks any more doesn't end it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import environment, write_tiny

pytestmark = pytest.mark.slow


def shell(line: str, config: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`line` in bash, with the command of a run in the place of TRAIN."""
    command = shlex.join([sys.executable, "-m", "jaxtrain.train", str(config), "log_every=1"])
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line.replace('TRAIN', command)}"],
        env={**environment(1), **variables},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize("line", ["TRAIN | head -1", "TRAIN > /dev/full", "TRAIN <&- >&- 2>&-"])
def test_a_closed_or_full_terminal_ends_no_run(line: str, tmp_path: Path, tiny_data: Path) -> None:
    result = shell(line, write_tiny(tmp_path, tiny_data))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


def test_letters_that_a_terminal_cannot_show_end_no_run(tmp_path: Path, tiny_data: Path) -> None:
    folder = tmp_path / "caf\u00e9"
    folder.mkdir()
    result = shell("TRAIN", write_tiny(folder, tiny_data), PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "complete: 10 steps" in result.stdout
