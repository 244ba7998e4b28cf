"""A resumed start needs hardly more memory than a cold one: the restored state never stands beside a fresh one."""

import os
import sys
from pathlib import Path

import pytest

from tests.runs import checkpoint_steps, events, start, step_losses, write_tiny

pytestmark = pytest.mark.slow

MODEL = "model: {vocab: 256, layers: 7, embed: 768, heads: 12, kv_heads: 12, mlp: 2560, head_dim: 64}\n"
PARAMETERS = 58_207_488


def peak_bytes(arguments: list[str], log: Path) -> int:
    """The peak resident memory of a training that dies at a step, before it saves."""
    with log.open("w") as output:
        process = start(arguments, program=("-m", "tests.faults"))
        output.write(process.stdout.read())  # type: ignore[union-attr]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 1, log.read_text()
    assert "injected at step" in log.read_text()
    return usage.ru_maxrss * 1024


def test_a_resumed_start_peaks_at_most_a_third_above_a_cold_one(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny(tmp_path, tiny_data)
    lines = [line for line in path.read_text().splitlines() if not line.startswith(("model", "run_dir", "checkpoint:"))]
    path.write_text("\n".join(lines) + "\n" + MODEL)

    def arguments(fault: str, name: str, every: int) -> list[str]:
        return [fault, str(path), f"run_dir={tmp_path / name}", f"checkpoint.every={every}"]

    peak_bytes(arguments("raise=RuntimeError@2", "resumed", 1), tmp_path / "first.log")
    assert checkpoint_steps(tmp_path / "resumed") == [1]
    cold = peak_bytes(arguments("raise=RuntimeError@3", "cold", 0), tmp_path / "cold.log")
    resumed = peak_bytes(arguments("raise=RuntimeError@4", "resumed", 0), tmp_path / "resumed.log")
    assert f"{PARAMETERS:,} parameters" in (tmp_path / "cold.log").read_text()
    assert [event["step"] for event in events(tmp_path / "resumed", "start")] == [0, 1]
    assert sorted(step_losses(tmp_path / "resumed")) == [1, 2, 3]
    with capsys.disabled():
        sys.stdout.write(f"\npeak memory: cold {cold / 2**30:.2f} GiB, resumed {resumed / 2**30:.2f} GiB\n")
    assert cold > 12 * PARAMETERS, "parameters and moments alone are more than what was measured"
    assert resumed <= 1.3 * cold, f"cold {cold / 2**30:.2f} GiB, resumed {resumed / 2**30:.2f} GiB"
