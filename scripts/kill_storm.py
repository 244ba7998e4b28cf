"""SIGKILL at random moments of a run on two processes, again and again: what is lost?

Each attempt is killed while it starts, some steps later, or while it saves, by a seeded draw: one process, or both.
The supervisor (`jaxtrain.launch local`) starts the next; where it holds a crash at the same step, three times in a row,
for the run's own, and ends, it is started again. In the end the run must be what one is that was left alone: losses
and checkpoint bit-equal, every row once an epoch; and each attempt must have gone on from the newest checkpoint that
was complete. Prints one JSON line; the exit code is 1 if anything is not so. With `--folder`, a storm that was itself
stopped goes on where it was.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxtrain.checkpoint import list_checkpoints
from jaxtrain.data import write_dataset
from jaxtrain.data.prepare.tokenizer import train_tokenizer
from jaxtrain.errors import EXIT_REPEATED_CRASH
from jaxtrain.telemetry.jsonl import read

PROCESSES, BATCH, ROWS = 2, 8, 64
PATIENCE = 600
"""Seconds for an attempt to get where it is to be killed."""
RESTARTS = 100
"""In a row, without a new checkpoint: kills while it starts follow one another."""
CONFIG = """
run_dir: {run_dir}
steps: {steps}
global_batch: {batch}
log_every: 100
cpu_devices: 1
compile_cache: {folder}/compile
mesh: {{fsdp: {processes}}}
model: {{vocab: 300, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128, dropout: 0.1}}
data: {{dir: {folder}/data, sequence: 32, pack: false, log_rows: true}}
checkpoint: {{every: 2, keep: 1}}
telemetry: {{tensorboard: false}}
"""

Moment = Callable[[], bool]


def main() -> int:
    """Parses, storms, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="how many (200)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (0)")
    parser.add_argument("--folder", type=Path, help="keep everything here, and go on with what is here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        result = Storm(folder, options.kills, options.seed).run()
    print(json.dumps(result))
    return 0 if result["passed"] else 1


class Storm:
    """A run below `folder`, the same one left alone beside it, and a ledger of what was killed when."""

    def __init__(self, folder: Path, kills: int, seed: int):
        self._folder, self._kills, self._seed = folder, kills, seed
        self._ledger = folder / "kills.jsonl"
        self._steps = 4 * kills + 20  # a start gets two steps further on average: the run never ends before the storm
        self._run, self._alone = folder / "run", folder / "alone"
        self._supervisors = 0
        self._problems: list[str] = []

    def run(self) -> dict[str, Any]:
        """What happened, in numbers."""
        began = time.monotonic()
        if not (self._folder / "data").exists():
            write_data(self._folder / "data")
        with Progress(console=Console(stderr=True)) as progress:
            with self._supervised(self._alone) as alone:
                self._expect_complete(alone)
            done = len(read(self._ledger)) if self._ledger.exists() else 0
            bar = progress.add_task("kills", total=self._kills, completed=done)
            complete = False
            while not complete:
                attempts = len(self._events("launch"))
                with self._supervised(self._run) as supervisor:
                    self._await(
                        done, supervisor, "attempt", lambda attempts=attempts: len(self._events("launch")) > attempts
                    )
                    again = True
                    while again and done < self._kills:
                        again = self._kill(done, supervisor)
                        done += 1
                        progress.advance(bar)
                    if again:
                        self._expect_complete(supervisor)
                    complete = again
        return self._verdict(time.monotonic() - began)

    def _verdict(self, seconds: float) -> dict[str, Any]:
        records = read(self._ledger)
        lost = [record for record in records if record["lost"]]
        verdict = {
            "restarts_failed": len(self._problems),
            "checkpoints_lost": len(lost),
            "losses_equal": losses(self._run) == losses(self._alone),
            "checkpoints_equal": checksums(self._run) == checksums(self._alone),
            "rows_once_an_epoch": once_an_epoch(self._run),
        }
        passed = list(verdict.values()) == [0, 0, True, True, True]
        moments = dict(Counter(record["moment"] for record in records))
        return {"kills": len(records), "moments": moments, **verdict, "passed": passed, "problems": self._problems,
                "steps": self._steps, "supervisors": self._supervisors, "seconds": round(seconds)}  # fmt: skip

    def _kill(self, kill: int, supervisor: subprocess.Popen[bytes]) -> bool:
        """Kills one process of the newest attempt, or first one and then the other, and waits for the next attempt;
        False: there is none, since the supervisor holds that this crash is the run's own."""
        draw = random.Random(f"{self._seed}/{kill}")
        attempts = len(self._events("launch"))
        before, restores = newest(self._run), len(self._events("restore"))
        name, moment = self._moment(draw)
        self._await(kill, supervisor, name, moment)
        pids = self._events("launch")[-1]["pids"]
        victims = draw.sample(pids, draw.choice([1, 1, len(pids)]))
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
            time.sleep(draw.choice([0, 0, 0.05, 0.5]))
        again = self._await(
            kill, supervisor, "next attempt", lambda: len(self._events("launch")) > attempts,
            unless=EXIT_REPEATED_CRASH,
        )  # fmt: skip
        restored = [event["step"] for event in self._events("restore")[restores:]]
        lost = newest(self._run) < before or any(step != before for step in restored)
        record = {"kill": kill, "moment": name, "victims": [pids.index(victim) for victim in victims], "newest": before}
        append(self._ledger, record | {"restored": restored, "lost": lost})
        return again

    def _moment(self, draw: random.Random) -> tuple[str, Moment]:
        """When to kill an attempt that begins now."""
        name = draw.choices(["start", "steps", "save"], [2, 5, 3])[0]
        if name == "start":
            at = time.monotonic() + draw.uniform(0, self._start_seconds())
            return name, lambda: time.monotonic() >= at
        if name == "steps":
            wanted, delay = len(losses(self._run)) + draw.randint(1, 6), draw.uniform(0, 0.05)
            return name, after(lambda: len(losses(self._run)) >= wanted, delay)
        left = temporaries(self._run)  # by those that were killed before
        return name, after(lambda: bool(temporaries(self._run) - left), draw.uniform(0, 0.1))

    def _start_seconds(self) -> float:
        """From the first event of the run that was left alone to its first checkpoint."""
        events = read(self._alone / "events.jsonl")
        saved = next(event["time"] for event in events if event["kind"] == "save")
        return float(saved - events[0]["time"])

    def _await(
        self, kill: int, supervisor: subprocess.Popen[bytes], what: str, moment: Moment, unless: int | None = None
    ) -> bool:
        """True once the moment has come; False where the supervisor has ended with the exit code `unless`."""
        deadline = time.monotonic() + PATIENCE
        while not moment():
            code = supervisor.poll()
            if code is not None and code == unless:
                return False
            if code is not None or time.monotonic() > deadline:
                ended = f"no {what} within {PATIENCE} s" if code is None else f"the supervisor ended with {code}"
                self._problems.append(f"kill {kill}: {ended}; see {self._folder}/logs")
                print(json.dumps({"kills": kill, "passed": False, "problems": self._problems}))
                raise SystemExit(1)
            time.sleep(0.005)
        return True

    def _expect_complete(self, supervisor: subprocess.Popen[bytes]) -> None:
        code = supervisor.wait()
        if code != 0:
            self._problems.append(f"the run ended with {code}; see {self._folder}/logs")

    def _events(self, kind: str) -> list[dict[str, Any]]:
        path = self._run / "events.jsonl"
        return [event for event in read(path) if event["kind"] == kind] if path.exists() else []

    @contextlib.contextmanager
    def _supervised(self, run_dir: Path) -> Iterator[subprocess.Popen[bytes]]:
        """The supervisor of a run, which ends with this block, and its processes with it."""
        config = self._folder / f"{run_dir.name}.yml"
        config.write_text(
            CONFIG.format(run_dir=run_dir, steps=self._steps, batch=BATCH, folder=self._folder, processes=PROCESSES)
        )
        (self._folder / "logs").mkdir(exist_ok=True)
        # Flags may make more devices than the mesh has.
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        environment["JAX_PLATFORMS"] = "cpu"
        options = ["--processes", str(PROCESSES), "--restarts", str(RESTARTS)]
        command = [sys.executable, "-m", "jaxtrain.launch", "local", *options, str(config)]
        self._supervisors += 1
        with (self._folder / "logs" / f"{run_dir.name}.log").open("ab") as log:
            supervisor = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield supervisor
        finally:
            supervisor.terminate()
            supervisor.wait()


def write_data(folder: Path) -> None:
    """Rows that are whole batches in each epoch."""
    random_ids = np.random.default_rng(0)
    documents = [random_ids.integers(0, 256, 30).tolist() for _ in range(ROWS)]
    tokenizer = train_tokenizer(["some text"], 300).tokenizer
    write_dataset(folder, {"train": documents}, tokenizer, end_of_document=None, source={"name": "random"})


def after(condition: Moment, delay: float) -> Moment:
    """So many seconds after a condition was first seen."""
    since: list[float] = []

    def moment() -> bool:
        if not since and condition():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() >= since[0] + delay

    return moment


def temporaries(run_dir: Path) -> set[tuple[str, int]]:
    """Checkpoints that are being written, or were."""
    found = set()
    for path in (run_dir / "checkpoints").glob("*.orbax-checkpoint-tmp*"):
        with contextlib.suppress(OSError):  # it is complete, or removed
            found.add((path.name, path.stat().st_ino))
    return found


def newest(run_dir: Path) -> int:
    return max(list_checkpoints(run_dir / "checkpoints").steps, default=0)


def losses(run_dir: Path) -> dict[int, float]:
    path = run_dir / "metrics.jsonl"
    return {line["step"]: line["loss"] for line in read(path)} if path.exists() else {}


def checksums(run_dir: Path) -> Any:
    path = run_dir / "checkpoints" / str(newest(run_dir)) / "meta" / "metadata"
    return json.loads(path.read_text())["checksums"]


def once_an_epoch(run_dir: Path) -> bool:
    """Whether the rows of all processes are, in each whole epoch, all rows."""
    lines = [line for rank in range(PROCESSES) for line in read(run_dir / f"rows-{rank}.jsonl")]
    epochs: dict[int, list[Any]] = {}
    for line in lines:
        epochs.setdefault(line["position"] // ROWS, []).extend(line["rows"])
    whole = [rows for rows in epochs.values() if len(rows) >= ROWS]
    return len(whole) >= len(epochs) - 1 > 0 and all(len(rows) == len(set(rows)) == ROWS for rows in whole)


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
