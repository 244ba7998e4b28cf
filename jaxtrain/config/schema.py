"""What can be configured: one frozen class a section, one field a key.

The defaults together describe a small decoder like the quickstart's, so a new configuration starts from something that
trains anywhere; `run_dir` alone has none. A limit on one key stands at the key; what several keys must satisfy together
stands in `checks/`. Keys, defaults and descriptions are published as JSON schema by `python -m jaxtrain.schema`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import PrivateAttr, Strict, model_validator

from jaxtrain.config.base import (
    Address,
    Count,
    LocalPath,
    Names,
    OpenSection,
    RunName,
    Seconds,
    Section,
    section,
    setting,
)
from jaxtrain.config.batches import BatchPlan
from jaxtrain.config.checkpoint import CheckpointConfig
from jaxtrain.config.data import SET_NAME, DataConfig, OwnDataConfig, TokenDataConfig, TokenRowsConfig, may_name_a_set
from jaxtrain.config.model import DecoderConfig, ModelConfig, OwnModelConfig
from jaxtrain.config.optimizer import AdamWConfig, EmaConfig, OptimizerConfig
from jaxtrain.config.resilience import HealthConfig, SpikesConfig, WatchdogConfig


class MeshConfig(Section):
    """Devices along each mesh axis, outermost first; one axis may be -1: whatever devices the others leave."""

    pipeline: Count = setting(1, "Stages that divide the layers; -1: all left.", may_change=True, ge=-1)
    data: Count = setting(
        -1, "Devices that hold a full copy and divide the batch; -1: all left.", may_change=True, ge=-1
    )
    fsdp: Count = setting(1, "Devices that divide the batch and the parameters; -1: all left.", may_change=True, ge=-1)
    expert: Count = setting(1, "Devices that divide the experts; only 1 is supported so far.", may_change=True, ge=-1)
    context: Count = setting(1, "Devices that divide the sequence; only 1 is supported so far.", may_change=True, ge=-1)
    tensor: Count = setting(1, "Devices that divide each matrix; -1: all left.", may_change=True, ge=-1)


class FsdpConfig(Section):
    """How weights that `fsdp` divides come together."""

    gather: Literal["step", "microbatch"] = setting(
        "microbatch",
        "In a step of several micro-batches, gather weights and scatter gradients for each, or once: less to send, but "
        "whole weights and their gradients in memory, divided by tensor and pipeline alone.",
        may_change=True,
    )


class PipelineConfig(Section):
    """The order in which stages work on micro-batches."""

    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b"] = setting(
        "1f1b", "All forwards first, one forward and one backward in turn, or that with several chunks a stage.",
        may_change=True,
    )  # fmt: skip
    chunks: Count = setting(1, "Pieces of each stage, with interleaved_1f1b.", may_change=True, gt=0)


class ShardingConfig(Section):
    """How strictly parameters must be spread over the mesh."""

    zero: Literal[0, 1, 2] = setting(
        0,
        "What mesh.data divides beside rows: nothing, the optimizer's state, or gradients too (ZeRO; stage 3 is fsdp).",
        may_change=True,
    )

    allow_replicated: bool = setting(
        False,
        "Allow more than 2 % of the parameter bytes to lie unsharded on a mesh with fsdp or tensor above 1.",
        may_change=True,
    )
    rules: dict[str, list[Literal["fsdp", "tensor"]]] = setting(
        {}, "Logical axes of somebody's own task, each with the mesh axes that split it.", may_change=True
    )


class RampPart(Section):
    """Some steps at another batch size."""

    steps: Count = setting(..., "Steps of this size.", gt=0)
    global_batch: Count = setting(..., "Examples per update.", gt=0)


class EvalSets(OpenSection):
    """Data sets to evaluate on beside the held-out documents: a name of one's own, and the directory."""

    __pydantic_extra__: dict[str, LocalPath]
    own_keys_may_change = True

    @model_validator(mode="after")
    def _named_well(self) -> Self:
        for name in self.own_keys:
            if not may_name_a_set(name):
                raise ValueError(f"holds the name {name}; {SET_NAME}")
        return self


class EvalConfig(Section):
    """Evaluation on the held-out documents during the run."""

    every: Count = setting(
        0, "Steps between evaluations, and one after the final step; 0: none.", may_change=True, ge=0
    )
    batch: Count | None = setting(None, "Examples evaluated at a time; null: global_batch.", may_change=True, gt=0)
    sets: EvalSets = section(EvalSets, "More data sets to evaluate on, by name: the metrics are called eval_NAME_loss.")


class TelemetryConfig(Section):
    """What a run writes down beside its metrics, events and logs."""

    tensorboard: bool = setting(True, "Write TensorBoard files to run_dir/tensorboard.", may_change=True)
    norms_every: Count = setting(
        0, "Steps between lines of norms.jsonl: gradient, weight and update of each layer; 0: none.",
        may_change=True, ge=0,
    )  # fmt: skip


class ProfileConfig(Section):
    """A window of steps that JAX's profiler traces, to run_dir/profile."""

    start: Count | None = setting(None, "First step that is traced; null: none.", may_change=True, gt=0)
    steps: Count = setting(3, "Steps that are traced.", may_change=True, gt=0)


class DistributedConfig(Section):
    """How several processes find each other; all null: from the environment, or one process."""

    coordinator: Address | None = setting(None, "HOST:PORT of process 0.", may_change=True)
    processes: Count | None = setting(None, "Processes in the run.", may_change=True, gt=0)
    process_id: Count | None = setting(None, "This process's number, from 0.", may_change=True, ge=0)
    start_timeout: Seconds = setting(300, "Seconds to wait for all processes at start.", may_change=True, gt=0)
    heartbeat_timeout: Seconds = setting(
        100, "Seconds of silence after which a process is dead, and all others end.", may_change=True, ge=5
    )


class Config(Section):
    """One run, complete: what to train, on which data, on which mesh."""

    run_dir: LocalPath = setting(..., "Directory of the run: config, metrics, events, checkpoints.", may_change=True)
    steps: Count | None = setting(
        None,
        "Optimizer updates in the whole run; null: as many as data.epochs give. May change on resume where that leaves "
        "the learning rate of every update done as it was.",
        gt=0,
    )
    max_hours: float | None = setting(
        None, "Hours after which this start saves and ends with exit code 75; null: no limit.", may_change=True, gt=0
    )
    grace_seconds: Seconds = setting(
        30, "Seconds to save and leave in after SIGTERM, SIGUSR1 or Ctrl-C.", may_change=True, gt=0
    )
    init_from: RunName | None = setting(
        None, "RUN or RUN@STEP whose parameters a new run begins with, its newest step or that one; null: random ones."
    )
    seed: int = setting(0, "Seed of initial weights, data order and dropout.", ge=0, lt=2**32)
    global_batch: Count = setting(16, "Examples per update, over all devices.", gt=0)
    batch_ramp: Annotated[tuple[RampPart, ...], Strict(False)] = setting(
        (), "Sizes before global_batch, as a list of {steps, global_batch}; empty: global_batch from the first step."
    )
    microbatch: Count | None = setting(
        None, "Examples per device and pass; null: the device's whole share in one pass.", may_change=True, gt=0
    )
    log_every: Count = setting(10, "Steps between lines of progress.", may_change=True, gt=0)
    precision: Literal["float32", "bfloat16"] = setting(
        "float32", "Type of the computation; master weights and optimizer moments are float32 always."
    )
    deterministic: bool = setting(
        False, "Bit-identical repeats on GPUs, at some cost in speed; on CPUs they are anyway.", may_change=True
    )
    resume: bool = setting(True, "Go on with a run that run_dir holds; false: refuse such a run_dir.", may_change=True)
    remat: Literal["none", "full", "dots", "named"] = setting(
        "none",
        "How much of a layer is computed again in the backward pass: nothing; all but its input; all but the results "
        "of matrix products with weights; all but what remat_save and remat_offload name.",
        may_change=True,
    )
    remat_save: Names = setting((), "Tensors that remat: named keeps on the device.", may_change=True)
    remat_offload: Names = setting((), "Tensors that remat: named keeps in the host's pinned memory.", may_change=True)
    non_finite: Literal["stop", "skip", "rewind"] = setting(
        "stop",
        "A loss or gradient that is not finite ends the run, skips the update, or is gone back from as spikes.rewind_* "
        "say.",
        may_change=True,
    )
    compile_cache: LocalPath | None = setting(
        Path("~/.cache/jaxtrain/compile"),
        "Directory of compiled programs, best one that all hosts see, since process 0 writes for all; null: none.",
        may_change=True,
    )
    cpu_devices: Count | None = setting(
        None,
        "Devices that JAX makes of the processor; null: one a core, as far as they divide the batch, on the default "
        "mesh.",
        may_change=True,
        gt=0,
    )
    mesh: MeshConfig = section(MeshConfig, "The device mesh.")
    sharding: ShardingConfig = section(ShardingConfig, "Rules for spreading parameters over the mesh.")
    fsdp: FsdpConfig = section(FsdpConfig, "When weights that fsdp divides are gathered.")
    pipeline: PipelineConfig = section(PipelineConfig, "The schedule of a mesh with stages.")
    model: ModelConfig = section(DecoderConfig, "The model.")
    data: DataConfig = section(TokenDataConfig, "The data set.")
    optimizer: OptimizerConfig = section(AdamWConfig, "The optimizer.")
    ema: EmaConfig | None = setting(None, "Moving average of the weights; null: none.")
    eval: EvalConfig = section(EvalConfig, "Evaluation during the run.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Checkpoints.")
    telemetry: TelemetryConfig = section(TelemetryConfig, "What is written down.")
    profile: ProfileConfig = section(ProfileConfig, "The profiler's window.")
    distributed: DistributedConfig = section(DistributedConfig, "Several processes.")
    watchdog: WatchdogConfig = section(WatchdogConfig, "Limits beyond which a part of the run is stuck.")
    spikes: SpikesConfig = section(SpikesConfig, "Numbers that are finite and far too large.")
    health: HealthConfig = section(HealthConfig, "Whether each device computes right numbers, as fast as the others.")

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Equal values are equal, wherever they were written."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    @property
    def origins(self) -> Mapping[str, str]:
        """Where each key was written, as `FILE:LINE` or the override itself; keys left at their default are missing."""
        return self._origins

    def with_origins(self, origins: Mapping[str, str]) -> Self:
        """The same configuration, knowing where its keys were written."""
        copy = self.model_copy()
        copy._origins = dict(origins)
        return copy

    @property
    def checkpoint_dir(self) -> Path:
        """Where checkpoints lie."""
        return self.run_dir / "checkpoints" if self.checkpoint.dir is None else self.checkpoint.dir

    @property
    def batches(self) -> BatchPlan:
        """Which batch size holds where."""
        return BatchPlan.of([(part.steps, part.global_batch) for part in self.batch_ramp], self.global_batch)

    @property
    def warmup_steps(self) -> int:
        """Updates of warm-up, from whatever unit they are given in; rounded up.

        Tokens are counted as rows times `data.sequence`. With `batch_scaling` the warm-up takes as many examples as
        `warmup` steps of `reference_batch` have, so that it gets shorter as the batch grows.
        """
        schedule, reference = self.optimizer.schedule, self.optimizer.reference_batch
        if schedule.warmup_tokens is not None:
            assert self.sequence is not None, "checked: tokens can be counted"
            return self.batches.steps_to(math.ceil(schedule.warmup_tokens / self.sequence))
        if self.optimizer.batch_scaling != "none" and reference is not None:
            return self.batches.steps_to(schedule.warmup * reference)
        return schedule.warmup

    @property
    def eval_batch(self) -> int:
        """Examples evaluated at a time, with null replaced by `global_batch`."""
        return self.global_batch if self.eval.batch is None else self.eval.batch

    @property
    def model_vocab(self) -> int | None:
        """Token ids that the model has rows for; None where its keys don't say."""
        if isinstance(self.model, OwnModelConfig):
            vocab = self.model.own_keys.get("vocab")
            return vocab if isinstance(vocab, int) else None
        return self.model.vocab if isinstance(self.model, DecoderConfig) else None

    @property
    def sequence(self) -> int | None:
        """Tokens in a row; None where the data's keys don't say."""
        if isinstance(self.data, OwnDataConfig):
            given = self.data.own_keys.get("sequence")
            return given if type(given) is int and given > 0 else None
        return self.data.sequence if isinstance(self.data, TokenRowsConfig) else None

    @property
    def data_vocab(self) -> int | None:
        """Vocabulary of the tokenizer that `data.source` trains, with null replaced by the model's."""
        given = self.data.vocab if isinstance(self.data, TokenDataConfig) else None
        return self.model_vocab if given is None else given

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value as plain data, as JSON and YAML can hold it."""
        return self.model_dump(mode="json")
