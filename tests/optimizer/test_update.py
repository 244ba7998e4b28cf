"""The direction of each optimizer: published formulas by hand, by role, and one layer at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import AdamWConfig, LionConfig, OptimizerConfig, RoleFactors, SgdConfig
from jaxtrain.models.parameters import ParameterInfo, Role
from jaxtrain.optimizer import make_optimizer

ROLES: dict[str, tuple[Role, bool]] = {
    "up": ("matrix", True),
    "table": ("embedding", True),
    "projection": ("head", True),
    "gate": ("router", True),
    "scale": ("norm", False),
    "shift": ("bias", False),
    "features": ("table", False),
}
"""Each role, and whether it decays."""
INFOS = {name: ParameterInfo((3, 2), (None, None), role) for name, (role, _) in ROLES.items()}
RATES = (0.1, 0.2, 0.05)


def arrays(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.standard_normal((3, 2)).astype(np.float32) for name in ROLES}


def updated(config: OptimizerConfig) -> dict[str, np.ndarray]:
    """Parameters after three updates with different gradients and rates."""
    params: Any = jax.tree.map(jnp.asarray, arrays(0))
    optimizer = make_optimizer(config, INFOS)
    state = optimizer.init(params)
    for step, rate in enumerate(RATES):
        direction, state = optimizer.update(jax.tree.map(jnp.asarray, arrays(1 + step)), state, params)
        params = jax.tree.map(lambda value, change, rate=rate: value - rate * change, params, direction)
    return params


def test_adamw_equals_its_published_formula_and_decays_by_role_only() -> None:
    got = updated(AdamWConfig(b1=0.8, b2=0.9, epsilon=1e-3, weight_decay=0.3))
    for name, (_, decays) in ROLES.items():
        weight = arrays(0)[name].astype(np.float64)
        first, second = np.zeros((3, 2)), np.zeros((3, 2))
        for step, rate in enumerate(RATES):
            gradient = arrays(1 + step)[name]
            first = 0.8 * first + 0.2 * gradient
            second = 0.9 * second + 0.1 * gradient**2
            unbiased = first / (1 - 0.8 ** (step + 1)), second / (1 - 0.9 ** (step + 1))
            weight -= rate * (unbiased[0] / (np.sqrt(unbiased[1]) + 1e-3) + (0.3 * weight if decays else 0))
        np.testing.assert_allclose(got[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


def test_sgd_equals_momentum_by_hand_and_decays_by_role_only() -> None:
    got = updated(SgdConfig(name="sgd", momentum=0.7, weight_decay=0.3))
    for name, (_, decays) in ROLES.items():
        weight, momentum = arrays(0)[name].astype(np.float64), np.zeros((3, 2))
        for step, rate in enumerate(RATES):
            momentum = arrays(1 + step)[name] + 0.7 * momentum
            weight -= rate * (momentum + (0.3 * weight if decays else 0))
        np.testing.assert_allclose(got[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


def test_lion_equals_its_published_formula_and_decays_by_role_only() -> None:
    got = updated(LionConfig(name="lion", b1=0.8, b2=0.95, weight_decay=0.3))
    for name, (_, decays) in ROLES.items():
        weight, momentum = arrays(0)[name].astype(np.float64), np.zeros((3, 2))
        for step, rate in enumerate(RATES):
            gradient = arrays(1 + step)[name]
            weight -= rate * (np.sign(0.8 * momentum + 0.2 * gradient) + (0.3 * weight if decays else 0))
            momentum = 0.95 * momentum + 0.05 * gradient
        np.testing.assert_allclose(got[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_roles_factor_multiplies_its_learning_rate_decay_included() -> None:
    plain = AdamWConfig(weight_decay=0.3)
    factors = RoleFactors(embedding=0.5, norm=0.0)
    got, want = one_update(plain.model_copy(update={"factors": factors})), one_update(plain)
    for name, (role, _) in ROLES.items():
        np.testing.assert_allclose(got[name], getattr(factors, role) * want[name], rtol=1e-6, err_msg=name)


def one_update(config: OptimizerConfig) -> Any:
    params = jax.tree.map(jnp.asarray, arrays(0))
    optimizer = make_optimizer(config, INFOS)
    return optimizer.update(jax.tree.map(jnp.asarray, arrays(1)), optimizer.init(params), params)[0]


def test_the_optimizer_state_is_nested_dictionaries_by_name() -> None:
    assert set(make_optimizer(AdamWConfig(), INFOS).init(arrays(0))) == {"adam", "decay"}
    assert set(make_optimizer(SgdConfig(name="sgd"), INFOS).init(arrays(0))) == {"momentum", "decay"}
