"""A drill's story: train undisturbed, train again under the plan's faults, compare the ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from jaxtrain.config import Config
from jaxtrain.drilling.comparison import Finding, compare
from jaxtrain.drilling.plan import Fault
from jaxtrain.drilling.process import Inside
from jaxtrain.drilling.strikes import SEEN, Event, Target
from jaxtrain.errors import EXIT_COMPLETE, JaxtrainError
from jaxtrain.launchers.sizes import with_overrides
from jaxtrain.launchers.worker import PARENT_VARIABLE
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry.events import read_events
from jaxtrain.telemetry.jsonl import read

_SUPERVISED = (sys.executable, "-m", "jaxtrain.drilling.supervised", "local")
_LOOK_AGAIN = 0.1
OF_OTHER_LAYOUT = 1e-5
"""How far losses may be apart where a part of the run had fewer devices (law 2)."""

INSIDE = ("nan", "slow", "full")
"""They have been in the processes since their start, and strike by themselves."""
WITHOUT_A_RESTART = ("nan", "slow")

Tell = Callable[[str, int], None]
"""Called with what is done, and the last finished step."""


class DrillError(JaxtrainError):
    """The drill itself can't go on: a run ended with this exit code."""

    def __init__(self, message: str, code: int):
        super().__init__(f"{message} ended with exit code {code}")
        self.exit_code = code


@dataclass(frozen=True)
class Request:
    """What is drilled.

    Attributes:
        arguments: the config file and overrides, as `train` takes them.
        undisturbed: the resolved config of that run.
        disturbed: the same in another directory.
        silence: seconds after which a process without a sign of life is dead.
        patience: seconds in which a fault must be seen and the run be back.
    """

    arguments: Sequence[str]
    undisturbed: Config
    disturbed: Config
    plan: tuple[Fault, ...]
    processes: int
    silence: float
    patience: float


@dataclass
class Outcome:
    """What became of a fault.

    Attributes:
        seen: seconds until an event told of it by its right name; None: none did.
        back: seconds until the next finished step; None where the run didn't stop for it, or didn't come back.
    """

    fault: Fault
    seen: float | None = None
    back: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class Report:
    """The result of a drill."""

    outcomes: list[Outcome]
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return all(outcome.passed for outcome in self.outcomes) and all(finding.passed for finding in self.findings)


def drill(request: Request, tell: Tell) -> Report:
    """Trains twice, and compares.

    Raises:
        DrillError: the undisturbed run fails, or the disturbed one for good.
    """
    inside = _inside(request)
    undisturbed = Supervised(request, request.undisturbed, inside={**inside, "full_step": None, "slow_rank": None})
    with undisturbed:
        undisturbed.wait(lambda step: tell("undisturbed", step))
    with Supervised(request, request.disturbed, inside) as disturbed:
        outcomes = [_Watch(fault, disturbed, request, tell).survive() for fault in request.plan]
        disturbed.wait(lambda step: tell("to the end", step))
    shrunk = any(fault.kind == "lost" for fault in request.plan)
    return Report(outcomes, compare(request.undisturbed, request.disturbed, OF_OTHER_LAYOUT if shrunk else 0.0))


def _inside(request: Request) -> dict[str, Any]:
    """The faults that no signal can make, as `Inside` has them."""
    found: dict[str, Any] = {}
    for fault in request.plan:
        if fault.kind == "nan":  # the data are so, and in both runs
            found |= {"nan_rank": fault.rank, "nan_position": request.disturbed.batches.rows_of(fault.step)}
        if fault.kind == "full":
            found |= {"full_step": fault.step}
        if fault.kind == "slow":
            found |= {"slow_rank": fault.rank, "slow_step": fault.step}
    return found


class Supervised:
    """A run under its supervisor, started again where that was told to leave or gave up."""

    def __init__(self, request: Request, config: Config, inside: dict[str, Any]):
        self._request = request
        self._config = config
        self.directory = RunDirectory(config.run_dir)
        once = config.run_dir.with_name(f"{config.run_dir.name}-faults")
        once.mkdir(parents=True, exist_ok=True)
        self._environment = {**os.environ, **Inside(once=str(once), **inside).variable()}
        self._environment[PARENT_VARIABLE] = str(os.getpid())
        self._output = once / "launch.log"
        self._log: IO[bytes] | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.consumed = 0

    def __enter__(self) -> "Supervised":
        self._log = self._output.open("ab")
        self.launch()
        return self

    def __exit__(self, *_: object) -> None:
        if self._supervisor is not None and self._supervisor.poll() is None:
            self._supervisor.send_signal(signal.SIGKILL)  # its processes die with it
            self._supervisor.wait()
        assert self._log is not None
        self._log.close()

    def launch(self) -> None:
        """Starts the supervisor."""
        elastic = ("--elastic", "1") if self._request.processes > 1 else ()
        options = ("--processes", str(self._request.processes), *elastic, "--silence", f"{self._request.silence:g}")
        arguments = with_overrides(self._request.arguments, [f"run_dir={self._config.run_dir}"])
        command = [*_SUPERVISED, *options, *arguments]
        self._supervisor = subprocess.Popen(
            command, env=self._environment, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def ended(self) -> int | None:
        """The supervisor's exit code once it has ended."""
        assert self._supervisor is not None
        return self._supervisor.poll()

    def step(self) -> int:
        """The last finished step."""
        lines = read(self.directory.metrics) if self.directory.metrics.exists() else []
        return max((line["step"] for line in lines if "loss" in line), default=0)

    def events(self) -> list[Event]:
        """All that happened so far."""
        return read_events(self.directory.events) if self.directory.events.exists() else []

    def target(self) -> Target:
        """The newest attempt."""
        pids = [event["pids"] for event in self.events() if event["kind"] == "launch"]
        return Target(self.directory, self._config.checkpoint_dir, pids[-1])

    def wait(self, tell: Callable[[int], None]) -> None:
        """To the end of the run.

        Raises:
            DrillError: it ends short of its goal.
        """
        while (code := self.ended()) is None:
            tell(self.step())
            time.sleep(_LOOK_AGAIN)
        if code != EXIT_COMPLETE:
            raise DrillError(f"{self._output} says why: the run", code)
        tell(self.step())

    def reach(self, step: int, tell: Callable[[int], None]) -> None:
        """Waits until a step is finished."""
        while (now := self.step()) < step:
            tell(now)
            if (code := self.ended()) is not None:
                raise DrillError(f"{self._output} says why: the run, at step {now},", code)
            time.sleep(_LOOK_AGAIN)

    def find(self, wanted: Callable[[Event], bool], patience: float) -> Event | None:
        """The next event of this sort, after those found before; None where none comes in so many seconds.

        A supervisor that ends meanwhile is started again, as a scheduler or a person would.
        """
        until = time.monotonic() + patience
        while time.monotonic() < until:
            for event in self.events()[self.consumed :]:
                self.consumed += 1
                if wanted(event):
                    return event
            if self.ended() not in (None, EXIT_COMPLETE):
                self.launch()
            time.sleep(_LOOK_AGAIN)
        return None


class _Watch:
    """One fault from its strike until the run is past it."""

    def __init__(self, fault: Fault, run: Supervised, request: Request, tell: Tell):
        self._fault, self._run, self._request = fault, run, request
        self._tell = tell
        self._outcome = Outcome(fault)

    def survive(self) -> Outcome:
        """Strikes, and watches."""
        fault, run = self._fault, self._run
        if fault.kind not in INSIDE:
            run.reach(fault.step, lambda step: self._tell(f"until {fault.kind}", step))
            run.consumed = len(run.events())
        self._tell(fault.kind, run.step())
        struck = time.time()
        try:
            altered = run.target().strike(fault)
            seen = self._find("was not seen, or not by its name", lambda event: SEEN[fault.kind](fault, event))
            begun = seen["time"] if fault.kind in INSIDE else struck
            self._outcome.seen = max(seen["time"] - begun, 0.0)
            if fault.kind in WITHOUT_A_RESTART:
                return self._outcome
            # What ends the attempt may take a while: until the next one is launched, its steps are of the old one.
            if fault.kind == "lost":
                self._find("did not go on with fewer", lambda event: _is("launch")(event) and self._short(event))
            else:
                self._find("was not started again", _is("launch"))
            if altered is not None:
                restored = self._find("nothing was restored", _is("restore"))
                if restored["step"] >= altered:
                    self._problem(f"step {restored['step']} was restored, and {altered} had been altered")
            self._outcome.back = self._find("no step after it", _is("progress"))["time"] - begun
            if fault.kind == "lost":
                self._find("no checkpoint with fewer processes", _is("save"))
                run.target().give_back()
                self._find("did not grow again", lambda event: _is("launch")(event) and not self._short(event))
                self._find("no step at full size again", _is("progress"))
        except ProcessLookupError:
            self._problem(f"the run had ended before step {fault.step}")
        except LookupError as error:
            self._problem(str(error))
        return self._outcome

    def _find(self, problem: str, wanted: Callable[[Event], bool]) -> Event:
        found = self._run.find(wanted, self._request.patience)
        if found is None:
            raise LookupError(f"{problem} within {self._request.patience:g} s")
        return found

    def _short(self, launch: Event) -> bool:
        return int(launch["processes"]) < self._request.processes

    def _problem(self, text: str) -> None:
        self._outcome.problems.append(text)


def _is(kind: str) -> Callable[[Event], bool]:
    return lambda event: event["kind"] == kind
