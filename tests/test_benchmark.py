"""The benchmark is itself measured by nobody: here it is shown to measure our step and the program beside it."""

import json
import shlex
import subprocess
import sys

import pytest

from tests.runs import ROOT, environment

BENCHMARK = ROOT / "scripts" / "benchmark.py"
OTHER = [sys.executable, "-c", "print('{\"tok_s\": 4.0}')"]


def benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    undecided = {name: value for name, value in environment(1).items() if name != "XLA_FLAGS"}
    command = [sys.executable, str(BENCHMARK), "--rounds", "1", "--steps", "1", *arguments]
    return subprocess.run(command, env=undecided, cwd=ROOT, text=True, capture_output=True, check=False)


@pytest.mark.slow
def test_it_prints_one_line_with_both_layouts_and_their_share_of_the_program_beside() -> None:
    done = benchmark("--beside", shlex.join(OTHER))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["parameters"] == 8_390_912
    assert result["beside_tokens_per_second"] == 4
    assert result["share"] == pytest.approx(result["tokens_per_second"] / 4, rel=0.01)
    assert result["fsdp4_tensor2_share"] == pytest.approx(result["fsdp4_tensor2_tokens_per_second"] / 4, rel=0.01)


@pytest.mark.slow
def test_a_program_beside_that_prints_no_figure_is_named() -> None:
    done = benchmark("--beside", f"{sys.executable} -c pass")
    assert done.returncode == 1
    assert "-c pass (exit code 0) printed no line of JSON" in done.stderr
