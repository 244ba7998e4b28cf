"""What a run shows is for whoever looks: that nobody looks any more doesn't end it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.output import write_once
from tests.runs import environment, write_tiny


@pytest.mark.parametrize(("process", "shown"), [(0, "one"), (1, "")])
def test_what_all_processes_computed_is_shown_by_the_first(
    process: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("jax.process_index", lambda: process)
    write_once("one")
    write_once("one", sys.stderr)
    assert tuple(capsys.readouterr()) == (shown, shown)


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


@pytest.mark.slow
@pytest.mark.parametrize("line", ["TRAIN | head -1", "TRAIN > /dev/full", "TRAIN <&- >&- 2>&-"])
def test_a_closed_or_full_terminal_ends_no_run(line: str, tmp_path: Path, tiny_data: Path) -> None:
    result = shell(line, write_tiny(tmp_path, tiny_data))
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


@pytest.mark.slow
def test_letters_that_a_terminal_cannot_show_end_no_run(tmp_path: Path, tiny_data: Path) -> None:
    folder = tmp_path / "caf\u00e9"
    folder.mkdir()
    result = shell("TRAIN", write_tiny(folder, tiny_data), PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    assert "complete: 10 steps" in result.stdout
