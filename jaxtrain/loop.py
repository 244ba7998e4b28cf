"""One run's story: build, open the data, restore or initialise, compile, train to the goal, save."""

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxtrain import distributed
from jaxtrain.agreement import Agreement, Requests, now
from jaxtrain.checkpoint import Checkpointer, Meta, Pace, restore_part
from jaxtrain.config import Config
from jaxtrain.executables import compile_or_load
from jaxtrain.opening import Opened, open_run, open_training_data, planned_steps
from jaxtrain.origin import describe
from jaxtrain.profiler import ProfileWindow
from jaxtrain.program import Program, build
from jaxtrain.recorder import Recorder
from jaxtrain.resilience.channel import Channel
from jaxtrain.resilience.health import Health
from jaxtrain.resilience.preemption import Signals
from jaxtrain.resilience.probe import Probe
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.resilience.whereabouts import here
from jaxtrain.run_directory import RunDirectory
from jaxtrain.same_run import refuse_other_configs
from jaxtrain.spike_guard import SpikeGuard
from jaxtrain.telemetry.events import read_events
from jaxtrain.telemetry.timeline import Timeline
from jaxtrain.training import Compiled, Tools, Training


def run(
    config: Config, devices: Sequence[jax.Device], started: float | None = None, signals: Signals | None = None
) -> None:
    """Trains `config` on `devices` to its goal, from wherever its run directory stands.

    Returns only when the goal is reached.

    Args:
        started: when this start of the run began, by `agreement.now()`, for `max_hours`; None: now.
        signals: what may tell this process to leave.

    Raises:
        JaxtrainError: with the exit code that says why it wasn't.
    """
    directory = RunDirectory(config.run_dir)
    with Watchdog(config, directory.crash, directory.events, signals) as watchdog, watchdog.explaining():
        _run(config, devices, now() if started is None else started, watchdog)


def _run(config: Config, devices: Sequence[jax.Device], started: float, watchdog: Watchdog) -> None:
    refuse_other_configs(config)
    program = build(config, devices)
    data = open_training_data(program)
    total_steps = planned_steps(config, data)
    directory = RunDirectory(config.run_dir)
    with Recorder(directory, config, total_steps) as recorder, watchdog.explaining():
        opened = open_run(program, data, total_steps, recorder, watchdog, now() - started)
        if opened.newest is not None and opened.is_complete():
            recorder.already_complete(opened.newest.step)
            return
        checkpointer = opened.checkpointer
        agreement = Agreement(config, program.mesh, started)
        guard = SpikeGuard(config, program.layout)
        follow_cost(config, directory, checkpointer, recorder, agreement)
        probe = compile_probe(program, recorder)
        compiled = compile_program(program, total_steps, checkpointer, recorder, agreement, guard)
        state, meta = restore_or_initialise(opened)
        watchdog.restored(meta.step)
        timeline = Timeline(directory.timeline, jax.process_index(), jax.process_count(), after=meta.step)
        watchdog.at_end(timeline.write)
        tools = Tools(
            agreement,
            guard,
            watchdog,
            timeline,
            profile=ProfileWindow(config.profile, directory.profile(jax.process_index()), recorder.profiled),
            health=None if probe is None else watch_health(probe, timeline, config, directory, recorder, agreement),
        )
        training = Training(opened, compiled, tools, state, meta)
        leave = functools.partial(agreement.request, Requests(preempt=True))
        with contextlib.closing(training), watchdog.looping(leave), here.phase("step"):
            training.run()
        recorder.completed(training.meta.step)


def compile_program(
    program: Program,
    total_steps: int,
    checkpointer: Checkpointer,
    recorder: Recorder,
    agreement: Agreement,
    guard: SpikeGuard,
) -> Compiled:
    """Compiles everything that the run will call, and waits until every process has done so."""
    sizes, devices = program.config.batches.sizes, list(program.mesh.devices.flat)
    train_step: dict[int, Callable[..., Any]] = {}
    inputs = {**program.abstract_inputs(), **agreement.abstract_inputs(), **guard.abstract_inputs()}
    for size in sizes:
        rows = {"rows": size} if len(sizes) > 1 else {}
        with here.phase("compile"), recorder.timed("compile", what="train_step", **rows):
            lowered = program.train_step.lower(program.state, program.batch_of(size), inputs)
            train_step[size] = compile_or_load(lowered, devices)
    recorder.chose(program.layout.choices)
    eval_step: Callable[..., Any] = program.eval_step
    averaged: Callable[..., Any] = program.averaged
    if program.config.eval.every:
        with here.phase("compile"), recorder.timed("compile", what="eval_step"):
            lowered = program.eval_step.lower(program.state["params"], program.eval_batch)
            eval_step = compile_or_load(lowered, devices)
            if program.config.ema is not None and program.config.ema.evaluate:
                lowered = program.averaged.lower(program.state["params"], program.state["ema"])
                averaged = compile_or_load(lowered, devices)
    with here.phase("compile"), recorder.timed("compile", what="checksums"):
        checkpointer.prepare(program.state)
    waiting = recorder.timed("compile", what="others") if jax.process_count() > 1 else contextlib.nullcontext()
    with here.phase("compile"), waiting:
        distributed.barrier("compiled")
    return Compiled(train_step, eval_step, averaged, {size: program.inputs(total_steps, size) for size in sizes})


def restore_or_initialise(run: Opened) -> tuple[Any, Meta]:
    """The state to go on from: the newest good checkpoint's; if there is none at all, a fresh one, or `origin`'s
    parameters with all else fresh."""
    program, checkpointer, recorder, origin = run.program, run.checkpointer, run.recorder, run.origin
    started = time.perf_counter()
    with here.phase("restore"):
        restored = checkpointer.restore_newest(program.state)
    if restored is None:
        config, began_with = program.config, None
        if origin is None:
            with here.phase("compile"):
                state = program.init(program.initial_key())
        else:
            with here.phase("restore"):
                state = program.adopt(restore_part(origin, program.state["params"]))
            began_with = describe(config, origin)
            recorder.adopted(began_with, time.perf_counter() - started)
        meta = Meta(0, position=0, skipped=0, config=config.to_dict(), data_hash=run.data.hash, origin=began_with)
    else:
        state, meta = restored
        recorder.restored(meta.step, meta.position, time.perf_counter() - started, checkpointer.tier)
    with here.phase("restore"):
        distributed.barrier("state ready")
    recorder.started(meta.step, meta.position)
    return state, meta


def follow_cost(
    config: Config, directory: RunDirectory, checkpointer: Checkpointer, recorder: Recorder, agreement: Agreement
) -> None:
    """With `checkpoint.interval: auto`, lets what saves cost decide how often they come."""
    if config.checkpoint.interval is None:
        return
    hosts = distributed.hosts()
    if jax.process_index() == 0:
        events = read_events(directory.events)
        pace = Pace(config.checkpoint, hosts, events, now, agreement.save_every, recorder.paced)
        checkpointer.tell(pace.saved)


def compile_probe(program: Program, recorder: Recorder) -> Probe | None:
    """The probe of this process's devices, where `health.policy` wants one."""
    if program.config.health.policy == "off":
        return None
    mine = [device for device in program.mesh.devices.flat if device.process_index == jax.process_index()]
    with here.phase("compile"), recorder.timed("compile", what="probe"):
        return Probe(mine)


def watch_health(
    probe: Probe, timeline: Timeline, config: Config, directory: RunDirectory, recorder: Recorder, agreement: Agreement
) -> Health:
    """What probes the devices and judges them; process 0 may then ask all to end without a bad host."""
    stop = functools.partial(agreement.request, Requests(exclude=True))
    return Health(config.health, probe, Channel(), timeline, recorder.health, stop, directory.excluded)
