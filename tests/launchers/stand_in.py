"""What a supervisor starts in the place of a training: `python -m tests.launchers.stand_in`, done in a moment.

The environment's STAND_IN names a JSON file: `{"1.0": [["steps", 3], ["exit", 0]], …}`, what each process does by
`ATTEMPT.RANK`; `*` for all others. As a program of its own, it is a `launch` of such processes.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from jaxtrain.resilience.beat import Beat, folder_of_beats, write_beat
from jaxtrain.telemetry.events import EventLog

PLAN = "STAND_IN"


class Actor:
    """One process, and what it can be told to do."""

    def __init__(self, run: Path, rank: int, attempt: int):
        self.run, self.rank, self.attempt = run, rank, attempt
        self.step = 0
        self.writing = threading.Lock()

    def steps(self, last: int) -> None:
        """Finishes steps up to this one."""
        if self.step == 0 and self.rank == 0:
            (self.run / "metrics.jsonl").unlink(missing_ok=True)
        while self.step < last:
            self.step += 1
            if self.rank == 0:
                with (self.run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps({"step": self.step}) + "\n")
        self.beat()

    def beat(self) -> None:
        """Says once where it is."""
        folder = folder_of_beats()
        assert folder is not None
        with self.writing:
            write_beat(folder, Beat(self.rank, os.getpid(), "here", self.step, "step", 0.0, time.time()))

    def keep_beating(self) -> None:
        """Says so all the time."""

        def beats() -> None:
            while True:
                self.beat()
                time.sleep(0.1)

        threading.Thread(target=beats, daemon=True).start()

    def save(self, step: int) -> None:
        with EventLog(self.run / "events.jsonl") as events:
            events.write("save", step=step, seconds=0.0)

    def blame(self, rank: int, code: int) -> None:
        """As a watchdog does before it ends its process."""
        with EventLog(self.run / "events.jsonl") as events:
            events.write("fault", what="stuck", rank=rank, host="here", step=7, phase="data", exit_code=code)

    def say(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def arguments(self) -> None:
        """Shows what it was called with."""
        self.say(" ".join(sys.argv[2:]) + "\n")

    def wait_for(self, name: str) -> None:
        """Until there is a file of this name in the run directory."""
        while not (self.run / name).exists():
            time.sleep(0.01)

    def exclude(self, entries: list[dict[str, object]]) -> None:
        (self.run / "excluded.json").write_text(json.dumps(entries))

    def ignore(self, *names: str) -> None:
        for name in names:
            signal.signal(signal.Signals[name], signal.SIG_IGN)

    def leave_at(self, name: str, code: int) -> None:
        signal.signal(signal.Signals[name], lambda number, frame: os._exit(code))

    def child(self) -> None:
        """Starts a process that outlives it, and writes down its number."""
        if (pid := os.fork()) == 0:
            while True:
                time.sleep(1)
        (self.run / "child").write_text(str(pid))

    def hang(self) -> None:
        while True:
            time.sleep(1)

    def die(self, name: str) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    def exit(self, code: int) -> None:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Does what the plan says for this process."""
    path = Path(os.environ[PLAN])
    plan = json.loads(path.read_text())
    rank, attempt = int(os.environ.get("JAX_PROCESS_ID", "0")), int(os.environ["JAXTRAIN_ATTEMPT"])
    actor = Actor(path.parent / "run", rank, attempt)
    for name, *values in plan.get(f"{attempt}.{rank}", plan.get("*", [])):
        getattr(actor, name)(*values)


if __name__ == "__main__":
    if "JAXTRAIN_ATTEMPT" in os.environ:
        main()
    else:
        from jaxtrain.command import leave
        from jaxtrain.launch import main as launch
        from jaxtrain.output import outlive_the_terminal

        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under `nohup`
        outlive_the_terminal()
        leave(launch(sys.argv[1:], module="tests.launchers.stand_in", warm="json"))
