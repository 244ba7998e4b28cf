"""A supervisor in a process of its own, with stand-ins for trainings."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.telemetry.jsonl import read
from tests.launchers.stand_in import PLAN
from tests.runs import ROOT

PATIENCE_SECONDS = 120


class Launched:
    """`launch local` with a plan of what each process does."""

    def __init__(self, folder: Path, plan: Mapping[str, Any], *arguments: str, config_lines: str = ""):
        self.run = folder / "run"
        (folder / "plan.json").write_text(json.dumps(plan))
        config = folder / "config.yml"
        config.write_text(f"run_dir: {self.run}\nsteps: 10\nglobal_batch: 12\ndata: {{dir: {folder}}}\n{config_lines}")
        environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", PLAN)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.launchers.stand_in", "local", *arguments, str(config)],
            env={**environment, PLAN: str(folder / "plan.json"), "JAX_PLATFORMS": "cpu"},
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def end(self) -> tuple[int, str]:
        """Its exit code and what it showed."""
        try:
            output, _ = self.process.communicate(timeout=PATIENCE_SECONDS)
        finally:
            self.process.kill()
        return self.process.returncode, output

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        return [event for event in read(path) if event["kind"] == kind] if path.exists() else []

    def pids(self, attempt: int = 1) -> list[int]:
        """Those of the processes of an attempt, once it has begun."""
        wait_until(lambda: len(self.events("launch")) >= attempt or self.process.poll() is not None)
        return list(self.events("launch")[attempt - 1]["pids"])

    def steps(self) -> int:
        path = self.run / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


def wait_until(condition: Callable[[], object]) -> None:
    """Until it holds; fails after a time that no test needs."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
