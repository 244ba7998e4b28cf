"""All that a run shows and writes down, by one process for all, with global numbers."""

import contextlib
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

import jax
from rich.console import Console

from jaxtrain.checkpoint import Choice
from jaxtrain.config import Config, TokenRowsConfig, dump
from jaxtrain.data.vocabulary import keep_vocabulary
from jaxtrain.errors import (
    EXIT_COMPLETE,
    EXIT_CRASHED,
    EXIT_INTERRUPTED,
    CheckpointError,
    JaxtrainError,
    RunPaused,
    refusing_os_errors,
    storing,
)
from jaxtrain.files import replace_file, replace_json
from jaxtrain.models.parameters import count_parameters
from jaxtrain.program import Program
from jaxtrain.resilience.beat import ATTEMPT_VARIABLE
from jaxtrain.resilience.judge import Finding
from jaxtrain.resilience.spikes import Spike
from jaxtrain.run_directory import RunDirectory
from jaxtrain.sharding.table import render_table
from jaxtrain.telemetry.events import EventLog
from jaxtrain.telemetry.jsonl import encode, lines_below
from jaxtrain.telemetry.log import close_log, open_log
from jaxtrain.telemetry.metrics import MetricsWriter
from jaxtrain.telemetry.norms import NamedNorms, as_json, layer_by_layer, update_ratios
from jaxtrain.telemetry.progress import TrainingProgress
from jaxtrain.telemetry.run_info import run_info
from jaxtrain.token_data import directories

if TYPE_CHECKING:
    from jaxtrain.telemetry.tensorboard import TensorBoardWriter

PROGRESS_SECONDS = 10
"""Between two events of progress."""

_log = logging.getLogger(__name__)


@dataclass
class _Untold:
    """Steps that no event of progress has told of yet."""

    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    waited: float = 0.0

    def add(self, step: int, seconds: float, waited: float) -> None:
        self.step, self.steps = step, self.steps + 1
        self.seconds, self.waited = self.seconds + seconds, self.waited + waited

    def fields(self) -> dict[str, float]:
        seconds = {"seconds": round(self.seconds, 3), "data_wait": round(self.waited, 3)}
        return {"step": self.step, "steps": self.steps, **seconds}


class Recorder:
    """Metrics, events, logs and progress of a run.

    Nothing is written before `open`: until then the request may still be refused. Events and metrics are written by
    process 0; logs, and the rows that a process consumed, by each.
    """

    def __init__(self, directory: RunDirectory, config: Config, total_steps: int):
        self._directory = directory
        self._config = config
        self._total = total_steps
        self._process = jax.process_index()
        self._first = self._process == 0
        self._claim: TextIO | None = None
        self._events: EventLog | None = None
        self._metrics: MetricsWriter | None = None
        self._norms: MetricsWriter | None = None
        self._tensorboard: TensorBoardWriter | None = None
        self._rows: Any = None
        self._by_step = contextlib.ExitStack()
        """What is opened after a step and closed before the run goes on from another one."""
        self._progress: TrainingProgress | None = None
        self._step = 0
        self._untold = _Untold()
        self._told_at: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.__exit__(kind, error, trace)
        # On a full disk all of these fail, and must not take the place of the error that is under way.
        with contextlib.ExitStack() as ending:
            if error is not None:
                ending.enter_context(contextlib.suppress(OSError, CheckpointError))
            ending.callback(close_log)
            for closable in (self._claim, self._events, self._by_step):
                if closable is not None:
                    ending.callback(closable.close)
            if isinstance(error, RunPaused):
                self._paused(error)
            elif error is not None:
                self._failed(error)

    def open(
        self, program: Program, data_hash: str, step: int, origin: dict[str, Any] | None = None, seconds: float = 0.0
    ) -> None:
        """Starts to write: the resolved config, run.json, the log, the start-up table.

        `step` is that of the newest checkpoint, 0 for a new run; which one is really restored, its own event tells.
        `origin` is what the run began with by `init_from`; `seconds` are those since this start began.

        Raises:
            ConfigError: another process trains in the directory, or it can't be written.
        """
        with self._writing():
            self._open(program, data_hash, step, origin, seconds)

    def _keeping(self) -> contextlib.AbstractContextManager[None]:
        """What can't be written down ends the run as a checkpoint does that can't."""
        return storing(self._directory.path)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        remedy = "free some space or mend what is there, or choose another run_dir"
        return refusing_os_errors(f"run_dir={self._directory.path}", remedy)

    def _open(self, program: Program, data_hash: str, step: int, origin: dict[str, Any] | None, seconds: float) -> None:
        if self._first:
            self._claim = self._directory.claim()
        open_log(self._directory.path, self._process)
        if not self._first:
            return
        self._events = EventLog(self._directory.events)
        attempt = os.environ.get(ATTEMPT_VARIABLE)
        supervised = {"attempt": int(attempt)} if attempt is not None and attempt.isdecimal() else {}
        self._event("start", step=step, steps=self._total, **supervised, seconds=round(seconds, 3))
        self._directory.write_config(self._config)
        if isinstance(self._config.data, TokenRowsConfig):
            keep_vocabulary(directories(self._config.data)[0], self._directory.tokenizer)
        devices = list(program.mesh.devices.flat)
        description = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
        description |= {"processes": jax.process_count(), "mesh": dict(program.mesh.shape)}
        info = run_info(seed=self._config.seed, data_manifest_hash=data_hash, devices=description)
        apart = self._config.checkpoint.dir
        info |= {"checkpoint_dir": None if apart is None else str(apart.absolute()), "init_from": origin}
        replace_json(self._directory.info, info)
        self._print_start(program, info)

    def _print_start(self, program: Program, info: dict[str, Any]) -> None:
        mesh = " × ".join(f"{axis} {size}" for axis, size in program.mesh.shape.items() if size > 1) or "one device"
        devices = info["devices"]
        console = Console(highlight=False)
        console.print(render_table(program.parameter_table()))
        console.print(
            f"{count_parameters(program.infos):,} parameters on {devices['count']} {devices['kind']} "
            f"({devices['processes']} processes, {mesh}), {self._config.precision}, "
            f"{self._rows_a_step()} rows a step, {self._total} steps → {self._directory.path}",
            soft_wrap=True,
        )
        console.print(f"XLA_FLAGS: {' '.join(info['xla_flags']) or 'none'}", soft_wrap=True)

    def _rows_a_step(self) -> str:
        parts = [f"{part.global_batch} (for {part.steps} steps)" for part in self._config.batch_ramp]
        return ", ".join([*parts, str(self._config.global_batch)])

    def restored(self, step: int, position: int, seconds: float, tier: str | None) -> None:
        """A checkpoint that was read back and verified."""
        self._event("restore", step=step, position=position, seconds=round(seconds, 3), tier=tier)
        if tier == "local":
            self.message(f"step {step} comes from the hosts' own disks (checkpoint.local)")

    def adopted(self, origin: dict[str, Any], seconds: float) -> None:
        """The parameters of another run that this one begins with."""
        fields = {"run": origin["run"], "checkpoint": origin["checkpoint"], "step": origin["step"]}
        self._event("init_from", **fields, seconds=round(seconds, 3))
        self.message(f"begins with the parameters of {origin['checkpoint']}")

    def started(self, step: int, position: int) -> None:
        """Opens metrics, rows and progress after the state's last step and data position."""
        self._open_by_step(step, position)
        self._progress = TrainingProgress(self._total, step, self._config.log_every, silent=not self._first)
        self._progress.__enter__()
        if step:
            self.message(f"resumed after step {step}")

    def step(self, metrics: dict[str, Any]) -> None:
        """The metrics of a finished step."""
        self._step = metrics["step"]
        if self._metrics is not None:
            with self._keeping():
                self._metrics.write(**metrics)
        self._to_tensorboard("train", self._step, {name: value for name, value in metrics.items() if name != "step"})
        assert self._progress is not None
        self._progress.update(metrics)

    def took(self, step: int, seconds: float, waited: float) -> None:
        """An attempt at a step has ended, `step` being the last one that is done; the first is told at once."""
        self._untold.add(step, seconds, waited)
        if self._told_at is None or time.monotonic() >= self._told_at + PROGRESS_SECONDS:
            self.progress()

    def progress(self) -> None:
        """Tells of the steps since the last such event, if there are any: to be called where stepping pauses."""
        untold, self._untold = self._untold, _Untold()
        if untold.steps:
            self._told_at = time.monotonic()
            self._event("progress", **untold.fields())

    def spike(self, step: int, position: int, spike: Spike, nowhere: bool) -> None:
        """Numbers far above what is usual; `nowhere`: the rewind that they ask for has no place to go to."""
        over = {name: getattr(spike.limits, name) for name in spike.over}
        numbers = {"loss": spike.numbers.loss, "grad_norm": spike.numbers.grad_norm}
        action = "none" if nowhere else spike.action
        self._event("spike", step=step, position=position, **numbers, limit=over, action=action)
        what = {"warn": "", "skip": "; update skipped", "rewind": "; going back"}[spike.action]
        if nowhere:
            what = "; it can't go back: no checkpoint is spikes.rewind_back steps older, or the data end before"
        self.message(f"step {step}: spike: {spike}{what}")

    def rewound(self, left: int, step: int, cut: int, position: int, seconds: float) -> None:
        """The run went back from step `left`; what was written for steps that will come again is dropped.

        Args:
            cut: data position of the state of `step`.
            position: data position that the run goes on from.
        """
        self._event("rewind", step=left, to=step, position=position, seconds=round(seconds, 3))
        self._by_step.close()
        self._open_by_step(step, cut)
        self.message(f"went back from step {left} to {step}, and goes on at data position {position}")

    def skipped(self, step: int, position: int, message: str) -> None:
        """An update that was not applied, of the rows at a data position."""
        self._event("skip", step=step, position=position, reason="non-finite")
        self.message(message)

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """An evaluation's result."""
        named = {f"eval_{name}": value for name, value in values.items()}
        if self._metrics is not None:
            with self._keeping():
                self._metrics.write(step=step, **named)
        self._to_tensorboard("eval", step, values)
        self.message(f"step {step}  " + "  ".join(f"{name} {value:.4f}" for name, value in named.items()))

    def norms(self, step: int, norms: NamedNorms) -> None:
        """The norms of a finished step."""
        if self._norms is not None:
            with self._keeping():
                self._norms.write(step=step, **as_json(norms))
        for kind, values in norms.items():
            self._to_tensorboard(kind, step, dict(layer_by_layer(values)))
        self._to_tensorboard("update_ratio", step, update_ratios(norms))

    def profiled(self, first: int, last: int, seconds: float) -> None:
        """A trace that this process has written."""
        self._event("profile", first=first, last=last, seconds=round(seconds, 3))
        folder = self._directory.profile(self._process)
        self.message(
            f"steps {first} to {last} are traced in {folder}; open its trace.json.gz at https://ui.perfetto.dev, "
            f"or the folder with XProf: xprof --logdir {folder}"
        )

    def saved(self, step: int, seconds: float, stall: float) -> None:
        """A checkpoint that was committed, after the loop stood still for `stall`; called from the saving thread."""
        self._event("save", step=step, seconds=round(seconds, 3), stall=round(stall, 4))

    def saved_locally(self, step: int, seconds: float, stall: float) -> None:
        """This process's part on the hosts' own disks, and its copy; called from the saving thread."""
        self._event("save_local", step=step, seconds=round(seconds, 3), stall=round(stall, 4))

    def left_out(self, step: int, why: str) -> None:
        """A save that was due and not begun."""
        self._event("left_out", step=step, reason=why)
        self.message(f"step {step} is not saved: {why}")

    def paced(self, choice: Choice) -> None:
        """The interval between saves that was chosen; called from the saving thread."""
        cost = {"stall": round(choice.cost.stall, 4), "write": round(choice.cost.write, 3)}
        rate = float(f"{choice.failures_per_day:.4g}")
        self._event("interval", seconds=round(choice.seconds, 1), **cost, failures_per_day=rate, source=choice.source)
        self.message(str(choice))

    def health(self, finding: Finding, action: str) -> None:
        """A fault of a device or host, and what is done about it: `warn` or `stop`; called from another thread."""
        fields = {"rank": finding.rank, "host": finding.host, "device": finding.device, "what": finding.what}
        self._event("health", **fields, score=finding.score, step=finding.step, action=action, detail=finding.detail)
        self.message(f"{'warning' if action == 'warn' else 'stops'}: {finding.detail}")

    def rows(self, step: int, position: int, ids: Sequence[str | int], skipped: bool) -> None:
        """The row ids that this process consumed for a step (or lost to a skipped one)."""
        with self._keeping():
            self._rows.write(encode({"step": step, "position": position, "rows": list(ids), "skipped": skipped}))
            self._rows.flush()

    def message(self, text: str) -> None:
        """A line on the terminal and in the log."""
        _log.info(text)
        if self._progress is not None:
            self._progress.message(text)
        elif self._first:
            Console(highlight=False).print(text, soft_wrap=True)

    @contextlib.contextmanager
    def timed(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """An event with the seconds that the block took; the block may add fields."""
        started = time.perf_counter()
        yield fields
        self._event(kind, **fields, seconds=round(time.perf_counter() - started, 3))

    def chose(self, choices: Mapping[str, str]) -> None:
        """How the compiled step computes what can be computed in several ways."""
        for what, choice in choices.items():
            self.message(f"{what}: {choice}")

    def already_complete(self, step: int) -> None:
        """The run had reached its goal before this start."""
        self._event("stop", step=step, reason="already complete", exit_code=EXIT_COMPLETE)
        self.message(f"already complete: {self._directory.path} is at its last step, {step}; nothing to do")

    def completed(self, step: int) -> None:
        """The goal is reached and saved."""
        self._event("stop", step=step, reason="complete", exit_code=EXIT_COMPLETE)
        self.message(f"complete: {step} steps in {self._directory.path}")

    def _paused(self, pause: RunPaused) -> None:
        self.progress()
        self._event("stop", step=self._step, reason=str(pause), exit_code=pause.exit_code)
        self.message(str(pause))

    def _failed(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        _log.info("the run ended with an error:\n%s", text)
        code = EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", EXIT_CRASHED)
        reason = str(error) if isinstance(error, JaxtrainError) else f"{type(error).__name__}: {error}"
        self.progress()
        self._event("stop", step=self._step, reason=reason, exit_code=code)

    def _open_by_step(self, step: int, position: int) -> None:
        """Goes on to write after `step` and data position `position`."""
        self._step = step
        with self._writing():
            if self._config.data.log_rows:
                self._rows = self._by_step.enter_context(self._open_rows(position))
            if self._first:
                self._open_metrics(step)

    def _open_metrics(self, step: int) -> None:
        """Opens what holds numbers by step, without those of steps after `step`: they will come again."""
        directory, wanted = self._directory, self._config.telemetry
        self._metrics = self._by_step.enter_context(MetricsWriter(directory.metrics, step))
        if wanted.norms_every or directory.norms.exists():
            self._norms = self._by_step.enter_context(MetricsWriter(directory.norms, step))
        if wanted.tensorboard or directory.tensorboard.exists():
            from jaxtrain.telemetry import tensorboard

            if wanted.tensorboard:
                writer = tensorboard.TensorBoardWriter(directory.tensorboard, step, dump(self._config))
                self._tensorboard = self._by_step.enter_context(contextlib.closing(writer))
            else:
                tensorboard.drop_steps_after(directory.tensorboard, step)

    def _to_tensorboard(self, group: str, step: int, values: dict[str, float]) -> None:
        if self._tensorboard is not None:
            self._tensorboard.write(step, {f"{group}/{name}": value for name, value in values.items()})

    def _event(self, kind: str, **fields: Any) -> None:
        if self._events is not None:
            with self._keeping():
                self._events.write(kind, **fields)

    def _open_rows(self, position: int) -> Any:
        """This process's row log, where no log has rows from `position` on any more: they will be read again."""
        count = jax.process_count()
        # Process 0 also sees to the logs of processes that an earlier start had and this one lacks.
        paths = [
            path
            for process, path in self._directory.row_logs()
            if process == self._process or (self._first and process >= count)
        ]
        for path in paths:
            replace_file(path, lines_below(path, "position", position))
        return self._directory.rows(self._process).open("a", encoding="utf-8")
