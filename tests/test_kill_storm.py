"""The storm of kills, in a short form: `scripts/kill_storm --kills 200` is the long one."""

import json
import os
import subprocess
import sys

import pytest

from tests.runs import ROOT


@pytest.mark.slow
def test_three_kills_lose_nothing() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "kill_storm.py", "--kills", "3", "--seed", "9"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    storm = json.loads(result.stdout)
    assert result.returncode == 0, storm
    assert storm["passed"]
    assert storm["kills"] == sum(storm["moments"].values()) == 3
