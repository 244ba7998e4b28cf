"""The loop over steps: dispatch ahead, read one step late, evaluate and save where something is due."""

import functools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxtrain.agreement import Agreement, Requests
from jaxtrain.batches import RunBatches
from jaxtrain.checkpoint import Meta
from jaxtrain.data import ROW_IDS
from jaxtrain.errors import BadHostError, DataError, NonFiniteError, RunPaused
from jaxtrain.evaluation import Evaluations, Evaluator
from jaxtrain.norms import name_norms
from jaxtrain.opening import Opened
from jaxtrain.placement import Placement
from jaxtrain.profiler import ProfileWindow
from jaxtrain.resilience.health import Health
from jaxtrain.resilience.preemption import Abandoned
from jaxtrain.resilience.spikes import Numbers
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.resilience.whereabouts import DEVICES, here
from jaxtrain.spike_guard import Return, SpikeGuard
from jaxtrain.telemetry.timeline import Timeline
from jaxtrain.telemetry.utilisation import model_flops_utilisation, peak_flops

MOST_SKIPPED_IN_A_ROW = 100
"""With `non_finite: skip`; the state is unchanged meanwhile, so more would follow without end."""


@dataclass(frozen=True)
class Compiled:
    """The executables of a run: the train step, and its inputs, for each size that a batch has."""

    train_step: dict[int, Callable[..., Any]]
    eval_step: Callable[..., Any]
    averaged: Callable[..., Any]
    inputs: dict[int, Any]


@dataclass(frozen=True)
class Tools:
    """What a training has beside its program, its data and what it writes."""

    agreement: Agreement
    guard: SpikeGuard
    watchdog: Watchdog
    timeline: Timeline
    profile: ProfileWindow
    health: Health | None


def make_evaluations(run: Opened, compiled: Compiled, watchdog: Watchdog) -> Evaluations | None:
    """What evaluates parameters on all that is held out; None where nothing is."""
    program, data = run.program, run.data
    if data.held_out is None:
        return None
    evaluator = functools.partial(
        Evaluator,
        compiled.eval_step,
        Placement(program.eval_batch),
        rows=program.eval_rows,
        prefetch=program.config.data.prefetch,
        before_a_batch=watchdog.abandon_together().before_a_batch,
    )
    sets = {name: evaluator(source=given.table) for name, given in data.eval_sets.items()}
    return Evaluations(evaluator(source=data.held_out), sets)


@dataclass(frozen=True)
class _InFlight:
    """A step that was dispatched and not yet read."""

    metrics: dict[str, jax.Array]
    due: Requests
    limits: Numbers
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

    def __init__(self, run: Opened, compiled: Compiled, tools: Tools, state: Any, meta: Meta):
        program, config = run.program, run.program.config
        self.config = config
        self.meta = meta
        self._infos = program.infos
        self._abstract_state = program.state
        self._state = state
        self._total = run.total_steps
        self._data = run.data
        self._recorder = run.recorder
        self._checkpointer = run.checkpointer
        self._evaluation_left = run.evaluation_left
        self._compiled = compiled
        self._agreement = tools.agreement
        self._guard = tools.guard
        self._watchdog = tools.watchdog
        self._timeline = tools.timeline
        self._profile = tools.profile
        self._health = tools.health
        self._guard.resume(meta.spikes)
        self._way_back: Return | None = None
        self._due = Requests()
        self._in_flight: deque[_InFlight] = deque()
        self._read_at = time.perf_counter()
        self._probing = 0.0
        # On a CPU the call that dispatches a step may also compute it, and wait in it for other processes.
        self._computes_when_called = program.mesh.devices.flat[0].platform == "cpu"
        self._skipped_in_a_row = 0
        self._flops = {size: program.task.flops(size).training for size in config.batches.sizes}
        self._peak = peak_flops(device.device_kind for device in program.mesh.devices.flat)
        self._places = {size: Placement(program.batch_of(size)) for size in config.batches.sizes}
        self._evaluated: tuple[int, dict[str, float]] = (0, {})
        self._evaluate = make_evaluations(run, compiled, tools.watchdog)
        self._batches = self._open_batches(meta.position)

    def _open_batches(self, position: int) -> RunBatches:
        return RunBatches(self.config.batches, self._data, self._places, position, self.config.data)

    def run(self) -> None:
        """To the last step, saved."""
        self.meta = replace(self.meta, abandoned=False)
        if self._evaluation_left and self.meta.step < self._total:  # else it is done behind the last step anyway
            self._evaluate_now()
            self._leave_if_asked()
        self._probe()
        self._profile.begin(self.meta.step, self._state)
        while self.meta.step < self._total and self._dispatch():
            reached = self.meta.step + len(self._in_flight)
            while len(self._in_flight) > (0 if self._is_due(reached) else 1):
                self._read(self._in_flight.popleft())
                if self._way_back is not None:
                    self._rewind(self._way_back)
            if self._is_due(reached) and self.meta.step == reached:
                self._at_boundary()
            self._checkpointer.check()
            if self._health is not None and self._health.due() and reached < self._total:
                self._probe()
        self._finish()

    def close(self) -> None:
        """Ends the data pipeline and the profile; a save that is running is finished."""
        if self._health is not None:
            self._health.close()
        self._timeline.close()
        self._profile.close()
        self._batches.close()
        with here.phase("save"):
            self._checkpointer.settle()

    def _dispatch(self) -> bool:
        """Starts the next step; False where finite data have ended."""
        asked = time.perf_counter()
        with here.phase("data"):
            batch = next(self._batches, None)
        if batch is None:
            return False
        # While the step before still computes, nobody waits for data.
        starved = not self._in_flight or self._in_flight[-1].metrics["loss"].is_ready()  # type: ignore[attr-defined]
        waited = time.perf_counter() - asked if starved else 0.0
        self._timeline.add("data", waited)
        rows = batch.rows.pop(ROW_IDS)
        train_step, inputs = self._compiled.train_step[batch.size], self._compiled.inputs[batch.size]
        placed = self._places[batch.size](batch.rows)
        due, limits = self._agreement.ask(), self._guard.limits(unread=len(self._in_flight))
        inputs = {**inputs, **self._agreement.inputs(due), **self._guard.inputs(limits)}
        called = time.perf_counter()
        with self._profile.step(self.meta.step + len(self._in_flight) + 1), here.wait(DEVICES):
            self._state, metrics = train_step(self._state, placed, inputs)
        if self._computes_when_called:
            self._timeline.add("device", time.perf_counter() - called)
        self._in_flight.append(_InFlight(metrics, due, limits, asked, waited, batch.position, batch.size, rows))
        return True

    def _read(self, step: _InFlight) -> None:
        """Waits for a dispatched step and takes its numbers."""
        norms, flags = step.metrics.pop("norms", None), step.metrics.pop("flags", None)
        asked = time.perf_counter()
        with here.wait(DEVICES):
            metrics = {name: value.item() for name, value in jax.device_get(step.metrics).items()}
        self._due |= self._agreement.answer(step.due, flags)
        read_at = time.perf_counter()
        passed = read_at - max(self._read_at, step.asked)
        self._read_at = read_at
        seconds, self._probing = passed - self._probing, 0.0
        self._timeline.add("device", read_at - asked)
        here.finished(metrics["step"], seconds)
        skipped = metrics.pop("skipped")
        position = step.position + step.size
        self.meta = replace(self.meta, step=metrics["step"], position=position, skipped=self.meta.skipped + skipped)
        self._timeline.step(self.meta.step, passed)
        if self.config.data.log_rows:
            rows = self._data.describe_rows(step.rows)
            self._recorder.rows(self.meta.step, step.position, rows, skipped)
        self._recorder.took(self.meta.step, seconds, min(step.waited, seconds))
        numbers = Numbers(metrics["loss"], metrics["grad_norm"])
        if not skipped:
            self._record(metrics, norms, step, seconds)
        if numbers.finite:
            self._skipped_in_a_row = 0
            self._judge(numbers, step, skipped)
        else:
            self._skipped_in_a_row += 1
            self._not_finite(numbers, step.position)

    def _record(self, metrics: dict[str, float], norms: jax.Array | None, step: _InFlight, seconds: float) -> None:
        if self.config.batch_ramp:
            metrics["global_batch"] = step.size
        metrics |= {"tokens_per_second": metrics["tokens"] / seconds, "step_seconds": seconds}
        if self._peak is not None:
            metrics["mfu"] = model_flops_utilisation(self._flops[step.size], seconds, self._peak)
        self._recorder.step({**metrics, "data_wait": min(step.waited / seconds, 1.0)})
        if norms is not None and self.meta.step % self.config.telemetry.norms_every == 0:
            self._recorder.norms(self.meta.step, name_norms(self._infos, jax.device_get(norms)))

    def _judge(self, numbers: Numbers, step: _InFlight, skipped: bool) -> None:
        attempted = self.meta.step + skipped
        spike = self._guard.detector.take(attempted, numbers, step.limits, applied=not skipped)
        if spike is None:
            return
        if spike.action == "rewind":
            self._way_back = self._find_way_back(attempted, step.position)
        nowhere = spike.action == "rewind" and self._way_back is None
        self._recorder.spike(attempted, step.position, spike, nowhere)
        if spike.action != "warn":
            self._guard.detector.intervene(attempted, str(spike))

    def _find_way_back(self, attempted: int, position: int) -> Return | None:
        with here.phase("save"):  # which is waited for, where one still runs
            return self._guard.way_back(attempted, position, self._data.order, self._checkpointer)

    def _probe(self) -> None:
        """Probes the devices once they have done what was dispatched, which is read no earlier for it."""
        if self._health is None:
            return
        asked = time.perf_counter()
        with here.wait(DEVICES):
            jax.block_until_ready(self._state)
            waited = time.perf_counter() - asked
            probing = self._health.probe(self.meta.step + len(self._in_flight))
        if self._in_flight:  # else it is between steps, in no step's time
            self._probing += probing
            self._timeline.add("device", waited)
            self._timeline.add("probe", probing)

    def _not_finite(self, numbers: Numbers, position: int) -> None:
        attempted = self.meta.step + 1
        found = f"step {attempted}: loss {numbers.loss}, gradient norm {numbers.grad_norm}"
        self._guard.detector.pass_over()
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
        if self.config.non_finite == "rewind":
            self._guard.detector.intervene(attempted, f"loss {numbers.loss}, gradient norm {numbers.grad_norm}")
            self._way_back = self._find_way_back(attempted, position)

    def _rewind(self, way: Return) -> None:
        """Back to an earlier state, and on behind the data that hurt; steps in flight are forgotten."""
        started, left = time.perf_counter(), self.meta.step
        self._way_back, self._evaluated = None, (0, {})
        self._in_flight.clear()
        self._batches.close()
        self._state = None  # let go before the other is read, or both would have to fit
        self._recorder.progress()
        with here.phase("restore"):
            self._state, meta = self._checkpointer.go_back_to(way.step, self._abstract_state)
        self._guard.rewound(meta.spikes)
        self.meta = replace(meta, position=way.position)
        self._batches = self._open_batches(way.position)
        self._recorder.rewound(left, meta.step, meta.position, way.position, time.perf_counter() - started)

    def _is_due(self, step: int) -> bool:
        due = self._eval_due(step) or self._save_due(step) or self._local_save_due(step) or self._profile.turns(step)
        return due or step >= self._total or self._due != Requests()

    def _eval_due(self, step: int) -> bool:
        return bool(self.config.eval.every) and step % self.config.eval.every == 0

    def _save_due(self, step: int) -> bool:
        return bool(self.config.checkpoint.every) and step % self.config.checkpoint.every == 0

    def _local_save_due(self, step: int) -> bool:
        local = self.config.checkpoint.local
        return local is not None and bool(local.every) and step % local.every == 0

    def _at_boundary(self) -> None:
        step = self.meta.step
        self._recorder.progress()
        self._profile.end(step, self._state)
        if step >= self._total:
            return
        if self._eval_due(step):
            self._evaluate_now()
        if self._save_due(step) or self._due.save:
            self._save(patient=False)
        elif self._local_save_due(step) or self._due.save_locally:
            self._save_locally()
        self._leave_if_asked()
        self._due = Requests()
        self._profile.begin(step, self._state)

    def _leave_if_asked(self) -> None:
        """Raises RunPaused or BadHostError, with everything saved, where this is the step to leave at."""
        if not (self._due.end or self._due.preempt or self._due.exclude):
            return
        self._save()
        with here.phase("save"):
            self._checkpointer.close()
        if self._due.exclude:
            raise BadHostError(
                f"stopped at step {self.meta.step} of {self._total}, and saved: a host is bad (health.policy: stop); "
                f"{self.config.run_dir}/excluded.json names it; the same command goes on, without it"
            )
        why = self._watchdog.told() if self._due.preempt else f"max_hours={self.config.max_hours:g}"
        left = "; its evaluation was left off" if self.meta.abandoned else ""
        raise RunPaused(
            f"paused at step {self.meta.step} of {self._total} after {why}, and saved{left}; the same command goes on"
        )

    def _evaluate_now(self) -> None:
        """Where the processes are told to leave meanwhile, the evaluation is left off, to be done by the next start."""
        try:
            if self._due.preempt:
                raise Abandoned
            with here.phase("eval"):
                self._evaluate_to_the_end()
        except Abandoned:
            self._due |= Requests(preempt=True)
            self.meta = replace(self.meta, abandoned=True)

    def _evaluate_to_the_end(self) -> None:
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

    def _save(self, *, patient: bool = True) -> None:
        """With the evaluation of this very step, if there was one, for `keep_best`.

        One that isn't the last is left out where a slow storage hasn't taken the one before.
        """
        step, metrics = self._evaluated
        metrics = metrics if step == self.meta.step else {}
        self._agreement.saved()
        with here.phase("save"):
            saved = self._checkpointer.save(self._state, self._meta_to_save(metrics), patient=patient)
        if not saved:
            waited = f"the save before still runs, after checkpoint.patience={self.config.checkpoint.patience} s"
            self._recorder.left_out(self.meta.step, f"{waited}; the storage is slower than saves are due")

    def _save_locally(self) -> None:
        self._agreement.saved_locally()
        with here.phase("save"):
            saved = self._checkpointer.save_locally(self._state, self._meta_to_save({}))
        if not saved:
            self._recorder.left_out(self.meta.step, "the save to the hosts' own disks before still runs")

    def _meta_to_save(self, metrics: dict[str, float]) -> Meta:
        spikes = self._guard.detector.state()
        return replace(self.meta, config=self.config.to_dict(), metrics=metrics, spikes=spikes)

    def _finish(self) -> None:
        """Evaluates and saves the final state, complete before this returns."""
        while self._in_flight:
            self._read(self._in_flight.popleft())
        self._recorder.progress()
        if self.meta.step < self._total:
            self._data_ended()
        if self._evaluate is not None:
            self._evaluate_now()
            if self.meta.abandoned:
                self._leave_if_asked()
        self._save()
        with here.phase("save"):
            self._checkpointer.close()

    def _data_ended(self) -> None:
        """Skipped batches used up finite data: the goal was the data's end, unless steps were asked for."""
        message = f"the data ended at step {self.meta.step}, after {self.meta.skipped} skipped batches"
        if self.config.steps is not None:
            raise DataError(f"{message}, before steps={self.config.steps}")
        self._recorder.message(message)
