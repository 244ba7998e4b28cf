"""One run's story: build, open the data, restore or initialise, compile, train to the goal, save."""

import contextlib
import functools
import math
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxtrain import distributed
from jaxtrain.batches import RunBatches
from jaxtrain.checkpoint import Checkpointer, Meta, Saved, restore_part
from jaxtrain.clock import Clock, Due, now
from jaxtrain.config import Config, MixtureDataConfig, check_steps, keys, value_at
from jaxtrain.continuation import own_checkpoints, refuse_foreign_run
from jaxtrain.data import ROW_IDS, RowOrder
from jaxtrain.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RunPaused, refusing_os_errors
from jaxtrain.evaluation import Evaluations, Evaluator, refuse_unknown_metric
from jaxtrain.norms import name_norms
from jaxtrain.origin import agree_on_origin, describe, find_origin, remarks
from jaxtrain.placement import Placement
from jaxtrain.profiler import ProfileWindow
from jaxtrain.program import Program, build
from jaxtrain.recorder import Recorder
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry.utilisation import model_flops_utilisation, peak_flops
from jaxtrain.token_data import differing_parts
from jaxtrain.training_data import TrainingData, agree_on_data, open_data, refuse_other_fields

MOST_SKIPPED_IN_A_ROW = 100
"""With `non_finite: skip`; the state is unchanged meanwhile, so more would follow without end."""


def run(config: Config, devices: Sequence[jax.Device], started: float | None = None) -> None:
    """Trains `config` on `devices` to its goal, from wherever its run directory stands.

    Returns only when the goal is reached.

    Args:
        started: when this start of the run began, by `clock.now()`, for `max_hours`; None: now.

    Raises:
        JaxtrainError: with the exit code that says why it wasn't.
    """
    refuse_other_configs(config)
    program = build(config, devices)
    with distributed.together("open the data set"):
        data = open_data(config)
        refuse_other_fields(data, program.batch)
        refuse_unknown_metric(program, data.eval_sets)
    total_steps = planned_steps(config, data)
    directory = RunDirectory(config.run_dir)
    with Recorder(directory, config, total_steps) as recorder:
        checkpointer = Checkpointer(config.checkpoint_dir.absolute(), config.checkpoint, recorder.saved)
        with distributed.together("go on with what is in run_dir"):
            newest = checkpointer.newest_meta()
            refuse_foreign_run(config, directory, newest)
            origin = find_origin(config, program)
        refuse_other_checkpoints(checkpointer, newest)
        refuse_other_data(data, newest)
        agree_on_origin(config, origin)
        distributed.barrier("config checked", config.distributed.start_timeout)
        with distributed.together("write to run_dir"):
            open_recorder(recorder, program, data.hash, newest, origin)
            for line in data.summary.splitlines():
                recorder.message(line)
            with refusing_os_errors(f"checkpoint.dir={config.checkpoint_dir}", "choose one that can be written"):
                checkpointer.claim()
                if jax.process_index() == 0:
                    own_checkpoints(config)
        if newest is not None and is_complete(newest, total_steps, data.order, config):
            verified = checkpointer.restore_newest(program.state)
            if verified is not None and verified[1] == newest:
                recorder.already_complete(newest.step)
                return
            del verified
        clock = Clock(config, program.mesh, now() if started is None else started)
        compiled = compile_program(program, total_steps, checkpointer, recorder, clock)
        state, meta = restore_or_initialise(program, checkpointer, recorder, data.hash, origin)
        profile = ProfileWindow(config.profile, directory.profile(jax.process_index()), recorder.profiled)
        training = Training(
            config, program, compiled, data, checkpointer, recorder, profile, clock, state, meta, total_steps
        )
        with contextlib.closing(training):
            training.run()
        recorder.completed(training.meta.step)


def refuse_other_configs(config: Config) -> None:
    """Raises where the processes of this run were not started with the same config."""
    values = _compared_values(config)
    differing = distributed.differing([zlib.crc32(repr(value).encode()) for value in values.values()])
    if differing:
        names = list(values)
        here = ", ".join(f"{names[index]}={values[names[index]]}" for index in differing)
        raise ConfigError(f"the processes were started with different configs (here: {here}); give all the same")


def _compared_values(config: Config) -> dict[str, Any]:
    """What must be the same in all processes; as many entries in each, whatever its config."""
    values = {name: value_at(config, name) for name, key in keys().items() if not key.is_section}
    values |= {name: getattr(getattr(config, name), "own_keys", None) for name in ("model", "data")}
    if isinstance(config.data, MixtureDataConfig):  # its directories are of one process as `data.dir` is
        values["data.mixture"] = [(name, component.weight) for name, component in config.data.mixture.items()]
    return {name: value for name, value in values.items() if not name.startswith(distributed.OF_ONE_PROCESS)}


def open_recorder(
    recorder: Recorder, program: Program, data_hash: str, newest: Meta | None, origin: Saved | None
) -> None:
    """Starts to write, with what the run began with, what is new about its length, and what may be a mistake."""
    config = program.config
    began_with = newest.origin if newest is not None else describe(config, origin) if origin is not None else None
    recorder.open(program, data_hash, newest.step if newest is not None else 0, began_with)
    if newest is not None and newest.config.get("steps") != config.steps:
        recorder.message(f"steps was {newest.config.get('steps')} and is {config.steps} now")
    for remark in remarks(config, origin, data_hash) if origin is not None else ():
        recorder.message(remark)


def refuse_other_checkpoints(checkpointer: Checkpointer, newest: Meta | None) -> None:
    """Raises where the processes don't see the same newest checkpoint."""
    if not distributed.same_everywhere(-1 if newest is None else newest.step):
        raise CheckpointError(
            f"{checkpointer.directory}: the processes see different checkpoints there; "
            f"checkpoint.dir must be one directory that all of them share"
        )


def planned_steps(config: Config, data: TrainingData) -> int:
    """The length of the run: `steps`, or what `data.epochs` gives.

    Raises:
        ConfigError: `steps` is more than the data allow.
    """
    available = None if data.order.total is None else config.batches.steps_to(data.order.total)
    if config.steps is None:
        assert available is not None, "checked by config: steps or data.epochs is given"
        check_steps(config, available)
        return available
    if available is not None and config.steps > available:
        ramp = " after batch_ramp" if config.batch_ramp else ""
        raise ConfigError(
            f"steps={config.steps}, but data.epochs={config.data.epochs} of {data.rows} rows at "
            f"global_batch={config.global_batch}{ramp} allow {available} steps; set steps to at most {available}, "
            f"leave it out, or raise data.epochs"
        )
    return config.steps


def is_complete(meta: Meta, total_steps: int, order: RowOrder, config: Config) -> bool:
    """Whether a checkpoint is the run's last: all steps done, or all data consumed where those were the goal."""
    data_ended = order.total is not None and meta.position >= order.total
    return meta.step >= total_steps or (config.steps is None and data_ended)


def refuse_other_data(data: TrainingData, newest: Meta | None) -> None:
    """Raises where the data differ from those of the checkpoint, or between the processes of this run."""
    if newest is not None and newest.data_hash != data.hash:
        changed = differing_parts(newest.data_hash, data.hash)
        where = f"{data.where} ({', '.join(changed)})" if changed else data.where
        raise ConfigError(
            f"{where}: the data are others than the run was started on (content {data.hash[:12]}, "
            f"the checkpoint has {newest.data_hash[:12]}); give it the old ones, or choose another run_dir"
        )
    agree_on_data(data)


@dataclass(frozen=True)
class Compiled:
    """The executables of a run: the train step, and its inputs, for each size that a batch has."""

    train_step: dict[int, Callable[..., Any]]
    eval_step: Callable[..., Any]
    averaged: Callable[..., Any]
    inputs: dict[int, Any]


def compile_program(
    program: Program, total_steps: int, checkpointer: Checkpointer, recorder: Recorder, clock: Clock
) -> Compiled:
    """Compiles everything that the run will call, and waits until every process has done so."""
    train_step, sizes = {}, program.config.batches.sizes
    inputs = {**program.abstract_inputs(), **clock.abstract_inputs()}
    for size in sizes:
        with recorder.timed("compile", what="train_step", **({"rows": size} if len(sizes) > 1 else {})):
            train_step[size] = program.train_step.lower(program.state, program.batch_of(size), inputs).compile()
    recorder.chose(program.layout.choices)
    eval_step, averaged = program.eval_step, program.averaged
    if program.config.eval.every:
        with recorder.timed("compile", what="eval_step"):
            eval_step = program.eval_step.lower(program.state["params"], program.eval_batch).compile()
            if program.config.ema is not None and program.config.ema.evaluate:
                averaged = program.averaged.lower(program.state["params"], program.state["ema"]).compile()
    with recorder.timed("compile", what="checksums"):
        checkpointer.prepare(program.state)
    distributed.barrier("compiled", timeout=3600)
    return Compiled(train_step, eval_step, averaged, {size: program.inputs(total_steps, size) for size in sizes})


def restore_or_initialise(
    program: Program, checkpointer: Checkpointer, recorder: Recorder, data_hash: str, origin: Saved | None
) -> tuple[Any, Meta]:
    """The state to go on from: the newest good checkpoint's; if there is none at all, a fresh one, or `origin`'s
    parameters with all else fresh."""
    started = time.perf_counter()
    restored = checkpointer.restore_newest(program.state)
    if restored is None:
        config, began_with = program.config, None
        if origin is None:
            state = program.init(program.initial_key())
        else:
            state = program.adopt(restore_part(origin, program.state["params"]))
            began_with = describe(config, origin)
            recorder.adopted(began_with, time.perf_counter() - started)
        meta = Meta(0, position=0, skipped=0, config=config.to_dict(), data_hash=data_hash, origin=began_with)
    else:
        state, meta = restored
        recorder.restored(meta.step, meta.position, time.perf_counter() - started)
    distributed.barrier("state ready", timeout=3600)
    recorder.started(meta.step, meta.position)
    return state, meta


@dataclass(frozen=True)
class _InFlight:
    """A step that was dispatched and not yet read."""

    metrics: dict[str, jax.Array]
    due: Due
    asked: float
    waited: float
    position: int
    size: int
    rows: Any


class Training:
    """The loop. It dispatches a step before it reads the metrics of the one before, so the devices never wait for it.

    Only where something is due (an evaluation, a save, the end) does it read all metrics first: whether a step was
    skipped decides whether its number was reached.
    """

    def __init__(
        self,
        config: Config,
        program: Program,
        compiled: Compiled,
        data: TrainingData,
        checkpointer: Checkpointer,
        recorder: Recorder,
        profile: ProfileWindow,
        clock: Clock,
        state: Any,
        meta: Meta,
        total_steps: int,
    ):
        self.config = config
        self.meta = meta
        self._infos = program.infos
        self._data = data
        self._compiled = compiled
        self._checkpointer = checkpointer
        self._recorder = recorder
        self._profile = profile
        self._state = state
        self._total = total_steps
        self._clock = clock
        self._due = Due()
        self._in_flight: deque[_InFlight] = deque()
        self._read_at = time.perf_counter()
        self._skipped_in_a_row = 0
        self._flops = {size: program.task.flops(size).training for size in config.batches.sizes}
        self._peak = peak_flops(device.device_kind for device in program.mesh.devices.flat)
        self._places = {size: Placement(program.batch_of(size)) for size in config.batches.sizes}
        self._evaluated: tuple[int, dict[str, float]] = (0, {})
        self._evaluate = None
        if data.held_out is not None:
            evaluator = functools.partial(
                Evaluator,
                compiled.eval_step,
                Placement(program.eval_batch),
                rows=program.eval_rows,
                prefetch=config.data.prefetch,
            )
            sets = {name: evaluator(source=given.table) for name, given in data.eval_sets.items()}
            self._evaluate = Evaluations(evaluator(source=data.held_out), sets)
        self._batches = RunBatches(config.batches, data, self._places, meta.position, config.data)

    def run(self) -> None:
        """To the last step, saved."""
        self._profile.begin(self.meta.step, self._state)
        while self.meta.step < self._total and self._dispatch():
            reached = self.meta.step + len(self._in_flight)
            while len(self._in_flight) > (0 if self._is_due(reached) else 1):
                self._read(self._in_flight.popleft())
            if self._is_due(reached) and self.meta.step == reached:
                self._at_boundary()
            self._checkpointer.check()
        self._finish()

    def close(self) -> None:
        """Ends the data pipeline and the profile; a save that is running is finished."""
        self._profile.close()
        self._batches.close()
        self._checkpointer.settle()

    def _dispatch(self) -> bool:
        """Starts the next step; False where finite data have ended."""
        asked = time.perf_counter()
        batch = next(self._batches, None)
        if batch is None:
            return False
        # While the step before still computes, nobody waits for data.
        starved = not self._in_flight or self._in_flight[-1].metrics["loss"].is_ready()  # type: ignore[attr-defined]
        waited = time.perf_counter() - asked if starved else 0.0
        rows = batch.rows.pop(ROW_IDS)
        train_step, inputs = self._compiled.train_step[batch.size], self._compiled.inputs[batch.size]
        placed = self._places[batch.size](batch.rows)
        due = self._clock.ask()
        with self._profile.step(self.meta.step + len(self._in_flight) + 1):
            self._state, metrics = train_step(self._state, placed, {**inputs, **self._clock.inputs(due)})
        self._in_flight.append(_InFlight(metrics, due, asked, waited, batch.position, batch.size, rows))
        return True

    def _read(self, step: _InFlight) -> None:
        """Waits for a dispatched step and takes its numbers."""
        norms, flags = step.metrics.pop("norms", None), step.metrics.pop("flags", None)
        metrics = {name: value.item() for name, value in jax.device_get(step.metrics).items()}
        self._due |= self._clock.answer(step.due, flags)
        read_at = time.perf_counter()
        seconds = read_at - max(self._read_at, step.asked)
        self._read_at = read_at
        skipped = metrics.pop("skipped")
        position = step.position + step.size
        self.meta = replace(self.meta, step=metrics["step"], position=position, skipped=self.meta.skipped + skipped)
        if self.config.data.log_rows:
            rows = self._data.describe_rows(step.rows)
            self._recorder.rows(self.meta.step, step.position, rows, skipped)
        if skipped:
            self._skipped_in_a_row += 1
            self._not_finite(metrics, step.position)
            return
        self._skipped_in_a_row = 0
        if self.config.batch_ramp:
            metrics["global_batch"] = step.size
        metrics |= {"tokens_per_second": metrics["tokens"] / seconds, "step_seconds": seconds}
        if self._peak is not None:
            metrics["mfu"] = model_flops_utilisation(self._flops[step.size], seconds, self._peak)
        self._recorder.step({**metrics, "data_wait": min(step.waited / seconds, 1.0)})
        if norms is not None and self.meta.step % self.config.telemetry.norms_every == 0:
            self._recorder.norms(self.meta.step, name_norms(self._infos, jax.device_get(norms)))

    def _not_finite(self, metrics: dict[str, float], position: int) -> None:
        attempted = self.meta.step + 1
        found = f"step {attempted}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}"
        if self.config.non_finite == "stop":
            raise NonFiniteError(
                f"{found}; the update was not applied and the run stops (non_finite: stop); "
                f"the newest checkpoint is from before; non_finite: skip passes over such batches"
            )
        if self._skipped_in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{found}; {MOST_SKIPPED_IN_A_ROW} batches in a row were skipped, so no batch is the cause; "
                f"the newest checkpoint is from before; start anew with a lower optimizer.learning_rate"
            )
        self._recorder.skipped(attempted, position, f"{found}; update skipped, {self.meta.skipped} so far")

    def _is_due(self, step: int) -> bool:
        due = self._eval_due(step) or self._save_due(step) or self._profile.turns(step)
        return due or step >= self._total or self._due != Due()

    def _eval_due(self, step: int) -> bool:
        return bool(self.config.eval.every) and step % self.config.eval.every == 0

    def _save_due(self, step: int) -> bool:
        return bool(self.config.checkpoint.every) and step % self.config.checkpoint.every == 0

    def _at_boundary(self) -> None:
        step = self.meta.step
        self._profile.end(step, self._state)
        if step >= self._total:
            return
        if self._eval_due(step):
            self._evaluate_now()
        if self._save_due(step) or self._due.save or self._due.end:
            self._save()
        if self._due.end:
            self._checkpointer.close()
            raise RunPaused(
                f"paused at step {step} of {self._total} after max_hours={self.config.max_hours:g}, and saved; "
                f"the same command goes on"
            )
        self._due = Due()
        self._profile.begin(step, self._state)

    def _evaluate_now(self) -> None:
        assert self._evaluate is not None
        with self._recorder.timed("eval", step=self.meta.step) as event:
            values = self._evaluate(self._state["params"])
            event["loss"] = values["loss"]
            if self.config.ema is not None and self.config.ema.evaluate:
                averaged = self._evaluate(self._compiled.averaged(self._state["params"], self._state["ema"]))
                values |= {f"ema_{name}": value for name, value in averaged.items()}
        self._recorder.evaluated(self.meta.step, values)
        finite = {f"eval_{name}": value for name, value in values.items() if math.isfinite(value)}
        self._evaluated = (self.meta.step, finite)

    def _save(self) -> None:
        """With the evaluation of this very step, if there was one, for `keep_best`."""
        step, metrics = self._evaluated
        metrics = metrics if step == self.meta.step else {}
        self._clock.saved()
        self._checkpointer.save(self._state, replace(self.meta, config=self.config.to_dict(), metrics=metrics))

    def _finish(self) -> None:
        """Evaluates and saves the final state, complete before this returns."""
        while self._in_flight:
            self._read(self._in_flight.popleft())
        if self.meta.step < self._total:
            self._data_ended()
        if self._evaluate is not None:
            self._evaluate_now()
        self._save()
        self._checkpointer.close()

    def _data_ended(self) -> None:
        """Skipped batches used up finite data: the goal was the data's end, unless steps were asked for."""
        message = f"the data ended at step {self.meta.step}, after {self.meta.skipped} skipped batches"
        if self.config.steps is not None:
            raise DataError(f"{message}, before steps={self.config.steps}")
        self._recorder.message(message)
