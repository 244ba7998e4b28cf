"""The keys of `optimizer`: the update rule and the learning rate over the run."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxtrain.config.base import Count, Section, choose_by_default, section, setting


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
    BeforeValidator(choose_by_default("kind", "cosine")),
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
    BeforeValidator(choose_by_default("name", "adamw")),
]
