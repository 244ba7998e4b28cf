"""The keys of `optimizer` and `ema`: the update rule, the learning rate over the run, the average of the weights."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxtrain.config.base import Count, Names, Section, choose_by_default, section, setting


class _Schedule(Section):
    kind: str
    warmup: Count = setting(0, "Steps of linear warm-up.", ge=0)
    warmup_tokens: float | None = setting(
        None, "Linear warm-up as so many tokens (rows times data.sequence) in place of steps; null: by warmup.", gt=0
    )


class CosineSchedule(_Schedule):
    """Linear warm-up, then half a cosine down to a share of the peak at the last step."""

    kind: Literal["cosine"] = setting("cosine", "Shape of the learning rate over the run.")
    final: float = setting(0.1, "Learning rate of the last step as a share of the peak.", ge=0, le=1)


# Only the usual variant may leave out its name: without this, a section without one would match all.
class LinearSchedule(_Schedule):
    """Linear warm-up, then a straight line down to a share of the peak at the last step."""

    kind: Literal["linear"] = setting(..., "Shape of the learning rate over the run.")
    final: float = setting(0.1, "Learning rate of the last step as a share of the peak.", ge=0, le=1)


class ConstantSchedule(_Schedule):
    """Linear warm-up, then always the peak."""

    kind: Literal["constant"] = setting(..., "Shape of the learning rate over the run.")


class StableSchedule(_Schedule):
    """Warm-up, stable, decay: the peak until the last part of the run falls to a share of it (arXiv 2404.06395)."""

    kind: Literal["wsd"] = setting(..., "Shape of the learning rate over the run.")
    final: float = setting(0.0, "Learning rate of the last step as a share of the peak.", ge=0, le=1)
    decay: float = setting(0.2, "Share of the run's steps, the last ones, in which the rate falls.", gt=0, le=1)
    decay_shape: Literal["linear", "sqrt"] = setting(
        "linear", "Falling in a straight line, or as 1 - sqrt (arXiv 2405.18392)."
    )

    def decay_steps(self, steps: int) -> int:
        """Updates of the decay in a run of so many."""
        return max(1, round(self.decay * steps))


class InverseSqrtSchedule(_Schedule):
    """Linear warm-up, then the peak times sqrt(warm-up / step), whatever the length of the run (arXiv 1706.03762)."""

    kind: Literal["inverse_sqrt"] = setting(..., "Shape of the learning rate over the run.")


Schedule = Annotated[
    CosineSchedule | LinearSchedule | ConstantSchedule | StableSchedule | InverseSqrtSchedule,
    Field(discriminator="kind"),
    BeforeValidator(choose_by_default("kind", "cosine")),
]


class RoleFactors(Section):
    """What the learning rate is multiplied by, for each role that a parameter can have."""

    matrix: float = setting(1.0, "For the matrices of the layers.", ge=0)
    embedding: float = setting(1.0, "For embeddings.", ge=0)
    head: float = setting(1.0, "For the output head.", ge=0)
    norm: float = setting(1.0, "For scales of norms.", ge=0)
    bias: float = setting(1.0, "For biases.", ge=0)
    router: float = setting(1.0, "For routers of experts.", ge=0)
    table: float = setting(1.0, "For sparse tables.", ge=0)


class _Optimizer(Section):
    name: str
    learning_rate: float = setting(3e-4, "Peak learning rate.", ge=0)
    weight_decay: float = setting(0.1, "Decoupled decay, times the learning rate; norms and biases have none.", ge=0)
    clip: float | None = setting(1.0, "Largest global gradient norm; null: no clipping.", gt=0)
    factors: RoleFactors = section(RoleFactors, "Learning rate of each role, as a multiple.")
    frozen: Names = setting(
        (), "Names or patterns (`embed.*`) of parameters that are never updated; names as in the start-up table."
    )
    batch_scaling: Literal["none", "linear", "sqrt"] = setting(
        "none", "How learning rate and warm-up follow the batch: rate times B / reference_batch, or its root."
    )
    reference_batch: Count | None = setting(
        None, "Examples per update that learning_rate and warmup are meant for; needed with batch_scaling.", gt=0
    )
    schedule: Schedule = section(CosineSchedule, "Learning rate over the run, as a share of the peak.")


class AdamWConfig(_Optimizer):
    """AdamW with decoupled weight decay (arXiv 1711.05101)."""

    name: Literal["adamw"] = setting("adamw", "Optimizer.")
    b1: float = setting(0.9, "Decay of the first moment per step.", ge=0, lt=1)
    b2: float = setting(0.95, "Decay of the second moment per step.", ge=0, lt=1)
    epsilon: float = setting(1e-8, "Added to the root of the second moment.", gt=0)


class SgdConfig(_Optimizer):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = setting(..., "Optimizer.")
    weight_decay: float = setting(0.0, "Decoupled decay, times the learning rate; norms and biases have none.", ge=0)
    momentum: float = setting(0.9, "Decay of the momentum per step; 0: none.", ge=0, lt=1)


class AdafactorConfig(_Optimizer):
    """Adafactor: the second moment of a matrix as one number a row and one a column (arXiv 1804.04235)."""

    name: Literal["adafactor"] = setting(..., "Optimizer.")
    learning_rate: float = setting(1e-2, "Peak learning rate; with parameter_scale relative to the weights.", ge=0)
    weight_decay: float = setting(0.0, "Decoupled decay, times the learning rate; norms and biases have none.", ge=0)
    decay_exponent: float = setting(
        0.8, "The second moment decays by 1 - step to the minus this, so that it needs no bias correction.", gt=0, le=1
    )
    factored_from: Count = setting(128, "Smaller side of the smallest matrix whose second moment is factored.", gt=0)
    update_clip: float | None = setting(
        1.0, "Largest root mean square of a matrix's update, before the learning rate; null: no limit.", gt=0
    )
    parameter_scale: bool = setting(
        True, "Multiply each matrix's update by the root mean square of its weights (at least 1e-3)."
    )


class LionConfig(_Optimizer):
    """Lion: the sign of a momentum (arXiv 2302.06675); wants a smaller rate and a larger decay than AdamW."""

    name: Literal["lion"] = setting(..., "Optimizer.")
    learning_rate: float = setting(1e-4, "Peak learning rate.", ge=0)
    weight_decay: float = setting(0.3, "Decoupled decay, times the learning rate; norms and biases have none.", ge=0)
    b1: float = setting(0.9, "Share of the momentum in the update's direction.", ge=0, lt=1)
    b2: float = setting(0.99, "Decay of the momentum per step.", ge=0, lt=1)


class MuonConfig(_Optimizer):
    """Muon: the orthogonalised momentum of each matrix of the layers; everything else has AdamW.

    https://kellerjordan.github.io/posts/muon, arXiv 2502.16982
    """

    name: Literal["muon"] = setting(..., "Optimizer.")
    momentum: float = setting(0.95, "Decay of the matrices' momentum per step.", ge=0, lt=1)
    iterations: Count = setting(5, "Newton-Schulz iterations.", gt=0)
    update_scale: Literal["rms", "width"] = setting(
        "rms", "Size of a matrix's update: 0.2 sqrt(max(in, out)), as large as AdamW's, or sqrt(max(1, out / in))."
    )
    b1: float = setting(0.9, "AdamW's decay of the first moment per step.", ge=0, lt=1)
    b2: float = setting(0.95, "AdamW's decay of the second moment per step.", ge=0, lt=1)
    epsilon: float = setting(1e-8, "AdamW's, added to the root of the second moment.", gt=0)


OptimizerConfig = Annotated[
    AdamWConfig | SgdConfig | AdafactorConfig | LionConfig | MuonConfig,
    Field(discriminator="name"),
    BeforeValidator(choose_by_default("name", "adamw")),
]


class EmaConfig(Section):
    """An exponential moving average of the weights, kept beside them."""

    decay: float = setting(
        0.999, "Share of the average that a step keeps, once 1 / (1 - decay) steps are done.", gt=0, lt=1
    )
    evaluate: bool = setting(True, "Evaluate the average too, as eval_ema_NAME.", may_change=True)
