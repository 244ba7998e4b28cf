"""The direction of an update, before the learning rate: optax, told by role what a parameter is."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxtrain.config import (
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    MuonConfig,
    OptimizerConfig,
    RoleFactors,
    SgdConfig,
)
from jaxtrain.models.parameters import ParameterInfo, Role
from jaxtrain.optimizer.adafactor import clip_by_rms, scale_by_factored_rms, scale_by_parameter_rms
from jaxtrain.optimizer.frozen import complete, pick, trainable
from jaxtrain.optimizer.muon import is_muons, scale_by_muon

DECAYED_ROLES: frozenset[Role] = frozenset({"matrix", "embedding", "head", "router"})
"""Weight decay is for what multiplies activations; norms, biases and sparse tables are left alone."""

Named = tuple[str, optax.GradientTransformation]


def make_optimizer(config: OptimizerConfig, infos: Any) -> optax.GradientTransformation:
    """The update direction before the learning rate; its state is a dictionary by name.

    It works on the parameters that are trained: gradients and parameters have None where `infos` says frozen.
    Decay is decoupled (arXiv 1711.05101): decay · weight is added to the direction, after Adam's or the momentum's.
    Clipping and the learning rate are the step's: it needs the norm and the rate for its metrics anyway.
    """
    decayed = trainable(jax.tree.map(lambda info: info.role in DECAYED_ROLES, infos), infos)
    parts = [*_direction(config, infos), ("decay", optax.add_decayed_weights(config.weight_decay, decayed))]
    if config.factors != RoleFactors():
        parts.append(("factors", _scale_by_role(config, infos)))
    return optax.named_chain(*parts)


def _direction(config: OptimizerConfig, infos: Any) -> list[Named]:
    match config:
        case AdamWConfig():
            return [("adam", optax.scale_by_adam(config.b1, config.b2, config.epsilon))]
        case SgdConfig():
            return [("momentum", optax.trace(config.momentum))]
        case LionConfig():
            return [("lion", optax.scale_by_lion(config.b1, config.b2))]
        case AdafactorConfig():
            parts = [("adafactor", scale_by_factored_rms(config, infos))]
            if config.update_clip is not None:
                parts.append(("update_clip", clip_by_rms(config.update_clip, infos)))
            if config.parameter_scale:
                parts.append(("parameter_scale", scale_by_parameter_rms(infos)))
            return parts
        case MuonConfig():
            adam = optax.scale_by_adam(config.b1, config.b2, config.epsilon)
            return [
                ("muon", _only(is_muons, scale_by_muon(config, infos), infos)),
                ("adam", _only(lambda info: not is_muons(info), adam, infos)),
            ]


def _only(
    wanted: Callable[[ParameterInfo], bool], inner: optax.GradientTransformation, infos: Any
) -> optax.GradientTransformation:
    """`inner` for the parameters that are wanted; the updates of the others pass through."""

    def init(params: Any) -> Any:
        return inner.init(pick(params, infos, wanted))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changed, state = inner.update(pick(updates, infos, wanted), state, pick(params, infos, wanted))
        return complete(changed, updates), state

    return optax.GradientTransformation(init, update)


def _scale_by_role(config: OptimizerConfig, infos: Any) -> optax.GradientTransformation:
    """The direction, decay included, times the role's factor of the learning rate."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def one(info: ParameterInfo, change: Any) -> Any:
            factor = getattr(config.factors, info.role)
            return change if change is None or factor == 1 else factor * change

        return jax.tree.map(one, infos, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
