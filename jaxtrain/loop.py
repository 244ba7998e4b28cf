"""One run's story: build, open the data, restore or initialise, compile, train to the goal, save."""

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxtrain import distributed
from jaxtrain.agreement import Agreement, Requests, now
from jaxtrain.checkpoint import Checkpointer, LocalTier, Meta, Pace, Saved, restore_part
from jaxtrain.config import Config, check_steps
from jaxtrain.continuation import own_checkpoints, refuse_foreign_run
from jaxtrain.data import RowOrder
from jaxtrain.errors import ConfigError, refusing_os_errors
from jaxtrain.evaluation import refuse_unknown_metric
from jaxtrain.origin import agree_on_origin, describe, find_origin, remarks
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
from jaxtrain.same_run import refuse_other_checkpoints, refuse_other_configs, refuse_other_data
from jaxtrain.spike_guard import SpikeGuard
from jaxtrain.telemetry.events import read_events
from jaxtrain.telemetry.timeline import Timeline
from jaxtrain.training import Compiled, Training
from jaxtrain.training_data import TrainingData, open_data, refuse_other_fields


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
    with Watchdog(config, directory.crash, directory.events, signals) as watchdog:
        _run(config, devices, now() if started is None else started, directory, watchdog)


def _run(
    config: Config, devices: Sequence[jax.Device], started: float, directory: RunDirectory, watchdog: Watchdog
) -> None:
    refuse_other_configs(config)
    program = build(config, devices)
    with here.phase("prepare"), distributed.together("open the data set"):
        data = open_data(config)
        refuse_other_fields(data, program.batch)
        refuse_unknown_metric(program, data.eval_sets)
    total_steps = planned_steps(config, data)
    with Recorder(directory, config, total_steps) as recorder, watchdog.explaining():

        def saved(step: int, seconds: float, stall: float) -> None:
            recorder.saved(step, seconds, stall)
            watchdog.saved(step)

        checkpointer = Checkpointer(config.checkpoint_dir.absolute(), config.checkpoint, saved)
        with distributed.together("go on with what is in run_dir"):
            newest = checkpointer.newest_meta()
            refuse_foreign_run(config, directory, newest)
            origin = find_origin(config, program)
        refuse_other_checkpoints(checkpointer, newest)
        refuse_other_data(data, newest)
        agree_on_origin(config, origin)
        distributed.barrier("config checked", config.distributed.start_timeout)
        with distributed.together("write to run_dir"):
            open_recorder(recorder, program, data.hash, newest, origin, now() - started)
            for line in data.summary.splitlines():
                recorder.message(line)
            with refusing_os_errors(f"checkpoint.dir={config.checkpoint_dir}", "choose one that can be written"):
                checkpointer.claim()
                if jax.process_index() == 0:
                    own_checkpoints(config)
        watchdog.recording()
        use_local_disks(config, directory, checkpointer, recorder)
        left = evaluation_left(newest, directory)
        if newest is not None and is_complete(newest, total_steps, data.order, config) and not left:
            with here.phase("restore"):
                verified = checkpointer.restore_newest(program.state)
            if verified is not None and verified[1] == newest:
                recorder.already_complete(newest.step)
                return
            del verified
        agreement = Agreement(config, program.mesh, started)
        guard = SpikeGuard(config, program.layout)
        follow_cost(config, directory, checkpointer, recorder, agreement)
        probe = compile_probe(program, recorder)
        compiled = compile_program(program, total_steps, checkpointer, recorder, agreement, guard)
        state, meta = restore_or_initialise(program, checkpointer, recorder, data.hash, origin)
        watchdog.restored(meta.step)
        profile = ProfileWindow(config.profile, directory.profile(jax.process_index()), recorder.profiled)
        timeline = Timeline(directory.timeline, jax.process_index(), jax.process_count(), after=meta.step)
        health = None if probe is None else watch_health(probe, timeline, config, directory, recorder, agreement)
        training = Training(
            config,
            program,
            compiled,
            data,
            checkpointer,
            recorder,
            profile,
            agreement,
            watchdog,
            guard,
            timeline,
            health,
            state,
            meta,
            total_steps,
        )
        leave = functools.partial(agreement.request, Requests(preempt=True))
        with contextlib.closing(training), watchdog.looping(leave), here.phase("step"):
            training.run(evaluate_first=left)
        recorder.completed(training.meta.step)


def use_local_disks(config: Config, directory: RunDirectory, checkpointer: Checkpointer, recorder: Recorder) -> None:
    """With `checkpoint.local`, opens that tier."""
    rules = config.checkpoint.local
    if rules is None:
        return
    folder = rules.dir.absolute() / distributed.texts(directory.identity() if jax.process_index() == 0 else "")[0]
    setting = f"checkpoint.local.dir={rules.dir}"
    with distributed.together("write to checkpoint.local.dir"), refusing_os_errors(setting, "choose another one"):
        folder.mkdir(parents=True, exist_ok=True)
    tier = LocalTier(folder, config.distributed, recorder.saved_locally)
    if not tier.has_copies:
        recorder.message(f"{setting} is one disk for all processes: if it is lost, so are all checkpoints on it")
    checkpointer.use_local(tier)


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


def open_recorder(
    recorder: Recorder, program: Program, data_hash: str, newest: Meta | None, origin: Saved | None, seconds: float
) -> None:
    """Starts to write, with what the run began with, what is new about its length, and what may be a mistake.

    Args:
        seconds: since this start began.
    """
    config = program.config
    began_with = newest.origin if newest is not None else describe(config, origin) if origin is not None else None
    recorder.open(program, data_hash, newest.step if newest is not None else 0, began_with, seconds)
    if newest is not None and newest.config.get("steps") != config.steps:
        recorder.message(f"steps was {newest.config.get('steps')} and is {config.steps} now")
    for remark in remarks(config, origin, data_hash) if origin is not None else ():
        recorder.message(remark)


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


def evaluation_left(newest: Meta | None, directory: RunDirectory) -> bool:
    """Whether an earlier start left off evaluating at the step of its last save, and none has done it since."""
    if newest is None or not newest.abandoned:
        return False
    done = any(event["kind"] == "eval" and event["step"] == newest.step for event in read_events(directory.events))
    return not distributed.from_first(int(done))


def compile_program(
    program: Program,
    total_steps: int,
    checkpointer: Checkpointer,
    recorder: Recorder,
    agreement: Agreement,
    guard: SpikeGuard,
) -> Compiled:
    """Compiles everything that the run will call, and waits until every process has done so."""
    train_step, sizes = {}, program.config.batches.sizes
    inputs = {**program.abstract_inputs(), **agreement.abstract_inputs(), **guard.abstract_inputs()}
    for size in sizes:
        rows = {"rows": size} if len(sizes) > 1 else {}
        with here.phase("compile"), recorder.timed("compile", what="train_step", **rows):
            train_step[size] = program.train_step.lower(program.state, program.batch_of(size), inputs).compile()
    recorder.chose(program.layout.choices)
    eval_step, averaged = program.eval_step, program.averaged
    if program.config.eval.every:
        with here.phase("compile"), recorder.timed("compile", what="eval_step"):
            eval_step = program.eval_step.lower(program.state["params"], program.eval_batch).compile()
            if program.config.ema is not None and program.config.ema.evaluate:
                averaged = program.averaged.lower(program.state["params"], program.state["ema"]).compile()
    with here.phase("compile"), recorder.timed("compile", what="checksums"):
        checkpointer.prepare(program.state)
    with here.phase("compile"):
        distributed.barrier("compiled")
    return Compiled(train_step, eval_step, averaged, {size: program.inputs(total_steps, size) for size in sizes})


def compile_probe(program: Program, recorder: Recorder) -> Probe | None:
    """The probe of this process's devices, where `health.policy` wants one."""
    if program.config.health.policy == "off":
        return None
    mine = [device for device in program.mesh.devices.flat if device.process_index == jax.process_index()]
    with recorder.timed("compile", what="probe"):
        return Probe(mine)


def watch_health(
    probe: Probe, timeline: Timeline, config: Config, directory: RunDirectory, recorder: Recorder, agreement: Agreement
) -> Health:
    """What probes the devices and judges them; process 0 may then ask all to end without a bad host."""

    def stop() -> None:
        agreement.request(Requests(exclude=True))

    return Health(config.health, probe, Channel(), timeline, recorder.health, stop, directory.excluded)


def restore_or_initialise(
    program: Program, checkpointer: Checkpointer, recorder: Recorder, data_hash: str, origin: Saved | None
) -> tuple[Any, Meta]:
    """The state to go on from: the newest good checkpoint's; if there is none at all, a fresh one, or `origin`'s
    parameters with all else fresh."""
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
        meta = Meta(0, position=0, skipped=0, config=config.to_dict(), data_hash=data_hash, origin=began_with)
    else:
        state, meta = restored
        recorder.restored(meta.step, meta.position, time.perf_counter() - started, checkpointer.tier)
    with here.phase("restore"):
        distributed.barrier("state ready")
    recorder.started(meta.step, meta.position)
    return state, meta
