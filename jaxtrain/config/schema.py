"""What can be configured: one frozen class a section, one field a key.

The defaults together describe the quickstart's small decoder, so a new configuration starts from something that trains
anywhere; `run_dir` alone has none. A limit on one key stands at the key; what several keys must satisfy together stands
in `checks.py`. Keys, defaults and descriptions are published as JSON schema by `python -m jaxtrain.schema`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, Strict


def setting(default: Any, description: str, *, may_change: bool = False, **limits: Any) -> Any:
    """A key of the configuration; `may_change` says whether a resumed run may have another value than it began with."""
    return Field(default, description=description, json_schema_extra={"may_change_on_resume": may_change}, **limits)


def section(cls: type["Section"], description: str) -> Any:
    """A key that holds a section; leaving it out leaves every key below at its default."""
    return Field(default_factory=cls, description=description)


def _filled_in(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    return value


def expand_home(path: str | Path) -> Path:
    """The path with `~` replaced; ValueError with the reason where no file can have this name."""
    if "\0" in str(path):
        raise ValueError("holds a null character, which no path can have")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError("begins with a home directory that is not known here; write the path in full") from None


def _local_path(value: object) -> object:
    if not isinstance(value, str | Path):
        return value
    if "://" in str(value):  # Path would make a directory named `gs:` of it
        raise ValueError("is a URL; a local or mounted directory is needed")
    return expand_home(_filled_in(str(value)))


def _choose_by_default(key: str, choice: str) -> Callable[[object], object]:
    """Let a section that doesn't say which variant it is be the usual one."""

    def choose(value: object) -> object:
        return {key: choice, **value} if isinstance(value, Mapping) else value

    return choose


LocalPath = Annotated[Path, Strict(False), BeforeValidator(_local_path)]
Count = Annotated[int, Field(le=2**31 - 1)]
"""A number that devices count with: int32."""
Seconds = Annotated[int, Field(le=2_000_000)]
"""A time limit: as milliseconds it is still an int32."""
Address = Annotated[str, AfterValidator(_filled_in)]


class Section(BaseModel):
    """A mapping of the configuration: unknown keys and values of another type are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class MeshConfig(Section):
    """Devices along each mesh axis, outermost first; one axis may be -1: whatever devices the others leave."""

    pipeline: Count = setting(1, "Devices along the pipeline; only 1 is supported so far.", may_change=True, ge=-1)
    data: Count = setting(
        -1, "Devices that hold a full copy and divide the batch; -1: all left.", may_change=True, ge=-1
    )
    fsdp: Count = setting(1, "Devices that divide the batch and the parameters; -1: all left.", may_change=True, ge=-1)
    expert: Count = setting(1, "Devices that divide the experts; only 1 is supported so far.", may_change=True, ge=-1)
    context: Count = setting(1, "Devices that divide the sequence; only 1 is supported so far.", may_change=True, ge=-1)
    tensor: Count = setting(1, "Devices that divide each matrix; -1: all left.", may_change=True, ge=-1)


class ShardingConfig(Section):
    """How strictly parameters must be spread over the mesh."""

    allow_replicated: bool = setting(
        False,
        "Allow more than 2 % of the parameter bytes to lie unsharded on a mesh with fsdp or tensor above 1.",
        may_change=True,
    )


class RopeScaling(Section):
    """Llama 3's stretching of rotary frequencies to sequences longer than those of pre-training."""

    factor: float = setting(..., "Factor by which low frequencies are slowed down.", ge=1)
    low_frequency_factor: float = setting(
        ..., "Frequencies with fewer turns than this within original_sequence are slowed down fully.", gt=0
    )
    high_frequency_factor: float = setting(
        ..., "Frequencies with more turns than this within original_sequence stay as they are.", gt=0
    )
    original_sequence: Count = setting(..., "Sequence length of pre-training, in tokens.", gt=0)


class RopeConfig(Section):
    """Rotary position embedding."""

    theta: float = setting(10000.0, "Base of the rotary wave lengths.", gt=0)
    scaling: RopeScaling | None = setting(None, "Llama 3's frequency scaling; null: none.")


class LossConfig(Section):
    """What is added to the cross-entropy, and in what pieces it is computed."""

    z: float = setting(0.0, "Weight of the squared log-partition (z-loss); 0: none.", ge=0)
    label_smoothing: float = setting(0.0, "Share of the target spread evenly over the vocabulary.", ge=0, lt=1)
    chunk: Count = setting(2048, "Tokens per device whose logits exist at the same time.", may_change=True, gt=0)


class DecoderConfig(Section):
    """A decoder-only transformer; the default sizes are the quickstart's."""

    family: Literal["decoder"] = setting("decoder", "Model family.")
    vocab: Count = setting(8192, "Rows of the embedding: the largest token id plus one, or more.", gt=0)
    layers: Count = setting(4, "Transformer layers.", gt=0)
    embed: Count = setting(256, "Width of the residual stream.", gt=0)
    heads: Count = setting(8, "Query heads.", gt=0)
    kv_heads: Count | None = setting(None, "Key and value heads, a divisor of heads; null: as many as heads.", gt=0)
    head_dim: Count | None = setting(None, "Width of a head, even; null: embed / heads.", gt=0)
    mlp: Count = setting(1024, "Width of the gated feed-forward layer.", gt=0)
    activation: Literal["silu", "gelu"] = setting("silu", "Activation of the feed-forward gate: SwiGLU or GeGLU.")
    norm_epsilon: float = setting(1e-5, "Added to the mean square in RMSNorm.", gt=0)
    rope: RopeConfig = section(RopeConfig, "How attention is told positions.")
    qk_norm: bool = setting(False, "Normalise queries and keys in each head.")
    window: Count | None = setting(None, "Sliding-window attention: tokens seen, itself included; null: all.", gt=0)
    logit_softcap: float | None = setting(None, "Output logits are bent to within plus or minus this; null: not.", gt=0)
    bias: Literal["none", "qkv", "all"] = setting("none", "Projections that have a bias.")
    tied_embeddings: bool = setting(False, "Use the embedding as the output head too.")
    dropout: float = setting(0.0, "Share of activations dropped while training.", ge=0, lt=1)
    initial_scale: float = setting(0.02, "Standard deviation of initial weights.", gt=0)
    loss: LossConfig = section(LossConfig, "The training loss.")

    @property
    def resolved_kv_heads(self) -> int:
        """Key and value heads with null replaced by `heads`."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def resolved_head_dim(self) -> int:
        """Width of a head with null replaced by `embed / heads`."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim


class DataConfig(Section):
    """What is read, and how it becomes batches."""

    dir: LocalPath = setting(Path("data/python-stdlib"), "Directory of the prepared data set.", may_change=True)
    source: Literal["python_stdlib"] | None = setting(
        None,
        "Source from which `dir` is prepared on first use: the running Python's standard library; null: it is there.",
        may_change=True,
    )
    vocab: Count | None = setting(
        None, "Vocabulary of the tokenizer that is trained when source prepares; null: model.vocab.", gt=0
    )
    held_out: float = setting(0.02, "Share of documents held out for evaluation when source prepares.", ge=0, lt=1)
    sequence: Count = setting(256, "Tokens in a row.", gt=0)
    pack: bool = setting(True, "Put several documents in a row, kept apart by segment ids; false: one, padded.")
    shuffle: bool = setting(True, "Read rows in an order drawn from the seed, new in each epoch.")
    epochs: Count | None = setting(None, "Passes over the data set; null: repeat for ever.", gt=0)
    workers: Count = setting(0, "Loader processes; 0: threads of the trainer.", may_change=True, ge=0, le=1000)
    prefetch: Count = setting(2, "Batches prepared ahead of the step.", may_change=True, ge=0, le=1000)
    log_rows: bool = setting(False, "Write the row ids of each step to RUN/rows-PROCESS.jsonl.", may_change=True)


class CosineSchedule(Section):
    """Linear warm-up, then half a cosine down to a share of the peak at the last step."""

    kind: Literal["cosine"] = setting("cosine", "Shape of the learning rate over the run.")
    warmup: Count = setting(0, "Steps of linear warm-up.", ge=0)
    final: float = setting(0.1, "Learning rate of the last step as a share of the peak.", ge=0, le=1)


class ConstantSchedule(Section):
    """Linear warm-up, then always the peak."""

    # Only the usual variant may leave out its name: without this, a section without one would match both.
    kind: Literal["constant"] = setting(..., "Shape of the learning rate over the run.")
    warmup: Count = setting(0, "Steps of linear warm-up.", ge=0)


Schedule = Annotated[
    CosineSchedule | ConstantSchedule,
    Field(discriminator="kind"),
    BeforeValidator(_choose_by_default("kind", "cosine")),
]


class AdamWConfig(Section):
    """AdamW with decoupled weight decay."""

    name: Literal["adamw"] = setting("adamw", "Optimizer.")
    learning_rate: float = setting(3e-4, "Peak learning rate.", ge=0)
    b1: float = setting(0.9, "Decay of the first moment per step.", ge=0, lt=1)
    b2: float = setting(0.95, "Decay of the second moment per step.", ge=0, lt=1)
    epsilon: float = setting(1e-8, "Added to the root of the second moment.", gt=0)
    weight_decay: float = setting(0.1, "Decoupled decay, times the learning rate; norms and biases have none.", ge=0)
    clip: float | None = setting(1.0, "Largest global gradient norm; null: no clipping.", gt=0)
    schedule: Schedule = section(CosineSchedule, "Learning rate over the run, as a share of the peak.")


class SgdConfig(Section):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = setting(..., "Optimizer.")
    learning_rate: float = setting(3e-4, "Peak learning rate.", ge=0)
    momentum: float = setting(0.9, "Decay of the momentum per step; 0: none.", ge=0, lt=1)
    weight_decay: float = setting(0.0, "Decoupled decay, times the learning rate; norms and biases have none.", ge=0)
    clip: float | None = setting(1.0, "Largest global gradient norm; null: no clipping.", gt=0)
    schedule: Schedule = section(CosineSchedule, "Learning rate over the run, as a share of the peak.")


OptimizerConfig = Annotated[
    AdamWConfig | SgdConfig,
    Field(discriminator="name"),
    BeforeValidator(_choose_by_default("name", "adamw")),
]


class EvalConfig(Section):
    """Evaluation on the held-out documents during the run."""

    every: Count = setting(
        0, "Steps between evaluations, and one after the final step; 0: none.", may_change=True, ge=0
    )
    batch: Count | None = setting(None, "Examples evaluated at a time; null: global_batch.", may_change=True, gt=0)


class CheckpointConfig(Section):
    """What is saved, where and how often."""

    every: Count = setting(100, "Steps between saves; 0: only the final step, saved always.", may_change=True, ge=0)
    dir: LocalPath | None = setting(None, "Directory of the checkpoints; null: run_dir/checkpoints.", may_change=True)
    keep: Count = setting(3, "Newest checkpoints that are kept.", may_change=True, gt=0)


class DistributedConfig(Section):
    """How several processes find each other; all null: from the environment, or one process."""

    coordinator: Address | None = setting(None, "HOST:PORT of process 0.", may_change=True)
    processes: Count | None = setting(None, "Processes in the run.", may_change=True, gt=0)
    process_id: Count | None = setting(None, "This process's number, from 0.", may_change=True, ge=0)
    start_timeout: Seconds = setting(300, "Seconds to wait for all processes at start.", may_change=True, gt=0)
    heartbeat_timeout: Seconds = setting(
        100, "Seconds of silence after which a process is dead.", may_change=True, gt=0
    )


class Config(Section):
    """One run, complete: what to train, on which data, on which mesh."""

    run_dir: LocalPath = setting(..., "Directory of the run: config, metrics, events, checkpoints.", may_change=True)
    steps: Count | None = setting(None, "Optimizer updates in the whole run; null: as many as data.epochs give.", gt=0)
    seed: int = setting(0, "Seed of initial weights, data order and dropout.", ge=0, lt=2**32)
    global_batch: Count = setting(16, "Examples per update, over all devices.", gt=0)
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
    remat: Literal["none", "full"] = setting(
        "none", "Layer activations that the backward pass computes again instead of storing.", may_change=True
    )
    non_finite: Literal["stop", "skip"] = setting(
        "stop", "A loss or gradient that is not finite ends the run, or skips the update.", may_change=True
    )
    compile_cache: LocalPath | None = setting(
        Path("~/.cache/jaxtrain/compile"), "Directory of compiled programs; null: none.", may_change=True
    )
    mesh: MeshConfig = section(MeshConfig, "The device mesh.")
    sharding: ShardingConfig = section(ShardingConfig, "Rules for spreading parameters over the mesh.")
    model: DecoderConfig = section(DecoderConfig, "The model.")
    data: DataConfig = section(DataConfig, "The data set.")
    optimizer: OptimizerConfig = section(AdamWConfig, "The optimizer.")
    eval: EvalConfig = section(EvalConfig, "Evaluation during the run.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Checkpoints.")
    distributed: DistributedConfig = section(DistributedConfig, "Several processes.")

    _origins: Mapping[str, str] = PrivateAttr(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        """Equal values are equal, wherever they were written."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(tuple(value for _, value in self))

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
    def eval_batch(self) -> int:
        """Examples evaluated at a time, with null replaced by `global_batch`."""
        return self.global_batch if self.eval.batch is None else self.eval.batch

    @property
    def data_vocab(self) -> int:
        """Vocabulary of the tokenizer that `data.source` trains, with null replaced by `model.vocab`."""
        return self.model.vocab if self.data.vocab is None else self.data.vocab

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value as plain data, as JSON and YAML can hold it."""
        return self.model_dump(mode="json")
