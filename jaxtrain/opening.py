"""A run is opened: its data, its directory, its checkpoints; what doesn't fit together is refused, by all processes."""

from dataclasses import dataclass

import jax

from jaxtrain import distributed
from jaxtrain.checkpoint import Checkpointer, LocalTier, Meta, Saved
from jaxtrain.config import Config, check_steps
from jaxtrain.continuation import own_checkpoints, refuse_foreign_run
from jaxtrain.errors import ConfigError, refusing_os_errors
from jaxtrain.evaluation import refuse_unknown_metric
from jaxtrain.origin import agree_on_origin, describe, find_origin, remarks
from jaxtrain.program import Program
from jaxtrain.recorder import Recorder
from jaxtrain.resilience.watchdog import Watchdog
from jaxtrain.resilience.whereabouts import here
from jaxtrain.run_directory import RunDirectory
from jaxtrain.same_run import refuse_other_checkpoints, refuse_other_data
from jaxtrain.telemetry.events import read_events
from jaxtrain.training_data import TrainingData, open_data, refuse_other_fields


@dataclass(frozen=True)
class Opened:
    """A run that may begin, or go on.

    Attributes:
        newest: of the newest complete checkpoint; None: the run begins.
        origin: what it begins with by `init_from`.
        evaluation_left: whether an earlier start left off evaluating at the step of its last save.
    """

    program: Program
    data: TrainingData
    total_steps: int
    recorder: Recorder
    checkpointer: Checkpointer
    newest: Meta | None
    origin: Saved | None
    evaluation_left: bool

    def is_complete(self) -> bool:
        """Whether the newest checkpoint, read and verified, is the run's last, with nothing left to evaluate.

        All steps are done, or all data consumed where those were the goal.
        """
        newest, total = self.newest, self.data.order.total
        if newest is None or self.evaluation_left:
            return False
        data_ended = self.program.config.steps is None and total is not None and newest.position >= total
        if newest.step < self.total_steps and not data_ended:
            return False
        with here.phase("restore"):
            verified = self.checkpointer.restore_newest(self.program.state)
        return verified is not None and verified[1] == newest


def open_training_data(program: Program) -> TrainingData:
    """The data of the config, prepared where they must be, as the program wants them."""
    with here.phase("prepare"), distributed.together("open the data set"):
        data = open_data(program.config)
        refuse_other_fields(data, program.batch)
        refuse_unknown_metric(program, data.eval_sets)
    return data


def open_run(
    program: Program, data: TrainingData, total_steps: int, recorder: Recorder, watchdog: Watchdog, seconds: float
) -> Opened:
    """Refuses what doesn't fit to what is there, and then begins to write.

    Args:
        seconds: since this start began.

    Raises:
        JaxtrainError: it can't begin or go on so; nothing is written then.
    """
    config = program.config
    directory = RunDirectory(config.run_dir)

    def saved(step: int, seconds: float, stall: float) -> None:
        recorder.saved(step, seconds, stall)
        watchdog.saved(step)

    checkpointer = Checkpointer(config.checkpoint_dir.absolute(), config.checkpoint, saved, config.watchdog.save)
    with distributed.together("go on with what is in run_dir"):
        newest = checkpointer.newest_meta()
        refuse_foreign_run(config, directory, newest)
        origin = find_origin(config, program)
    refuse_other_checkpoints(checkpointer, newest)
    refuse_other_data(data, newest)
    agree_on_origin(config, origin)
    distributed.barrier("config checked", config.distributed.start_timeout)
    with distributed.together("write to run_dir"):
        open_recorder(recorder, program, data.hash, newest, origin, seconds)
        for line in data.summary.splitlines():
            recorder.message(line)
        with refusing_os_errors(f"checkpoint.dir={config.checkpoint_dir}", "choose one that can be written"):
            checkpointer.claim()
            if jax.process_index() == 0:
                own_checkpoints(config)
    watchdog.recording()
    use_local_disks(config, directory, checkpointer, recorder)
    left = evaluation_left(newest, directory)
    return Opened(program, data, total_steps, recorder, checkpointer, newest, origin, left)


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


def evaluation_left(newest: Meta | None, directory: RunDirectory) -> bool:
    """Whether an earlier start left off evaluating at the step of its last save, and none has done it since."""
    if newest is None or not newest.abandoned:
        return False
    done = any(event["kind"] == "eval" and event.get("step") == newest.step for event in read_events(directory.events))
    return not distributed.from_first(int(done))


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
