import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import AdamWConfig, ConstantSchedule, CosineSchedule, OptimizerConfig, Schedule, SgdConfig
from jaxtrain.models.parameters import ParameterInfo, Role
from jaxtrain.optimizer import learning_rate, make_optimizer, schedule_inputs
from jaxtrain.step import clip_by_norm

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


def test_the_optimizer_state_is_nested_dictionaries_by_name() -> None:
    assert set(make_optimizer(AdamWConfig(), INFOS).init(arrays(0))) == {"adam", "decay"}
    assert set(make_optimizer(SgdConfig(name="sgd"), INFOS).init(arrays(0))) == {"momentum", "decay"}


def rates(schedule: Schedule, steps: int, peak: float = 0.5) -> list[float]:
    inputs = schedule_inputs(AdamWConfig(learning_rate=peak, schedule=schedule), steps)
    return [learning_rate(jnp.int32(step), inputs).item() for step in range(1, steps + 1)]


def test_cosine_peaks_at_the_end_of_warmup_and_ends_at_its_final_share_with_the_last_step() -> None:
    got = rates(CosineSchedule(warmup=3, final=0.1), 10)
    rising = [0.5 / 3, 1.0 / 3, 0.5]
    falling = [0.5 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 7))) for i in range(1, 8)]
    assert got == pytest.approx(rising + falling, rel=1e-5)
    assert got[-1] == pytest.approx(0.05, rel=1e-6)


def test_the_length_of_the_schedule_follows_the_run() -> None:
    for steps in (4, 10, 100):
        assert rates(CosineSchedule(final=0.0), steps)[-1] == pytest.approx(0.0, abs=1e-7)
        assert rates(CosineSchedule(final=0.2), steps)[-1] == pytest.approx(0.1, rel=1e-6)


def test_warmup_as_long_as_the_run_ends_at_the_peak() -> None:
    assert rates(CosineSchedule(warmup=4, final=0.0), 4) == pytest.approx([0.125, 0.25, 0.375, 0.5])


def test_without_warmup_the_first_step_of_a_constant_schedule_has_the_peak() -> None:
    assert rates(ConstantSchedule(kind="constant"), 3) == pytest.approx([0.5] * 3)
    assert rates(ConstantSchedule(kind="constant", warmup=2), 4) == pytest.approx([0.25, 0.5, 0.5, 0.5])


def test_beyond_its_last_step_cosine_stays_at_its_end() -> None:
    inputs = schedule_inputs(AdamWConfig(learning_rate=0.5, schedule=CosineSchedule(final=0.1)), 10)
    assert learning_rate(jnp.int32(15), inputs).item() == pytest.approx(0.05)


def test_clipping_scales_all_gradients_alike_and_only_down() -> None:
    gradients = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    clipped = clip_by_norm(gradients, jnp.float32(5.0), 1.0)
    assert (clipped["a"].item(), clipped["b"].item()) == pytest.approx((0.6, 0.8))
    assert clip_by_norm(gradients, jnp.float32(5.0), 6.0) == gradients
    assert clip_by_norm(gradients, jnp.float32(5.0), None) is gradients


def test_clipping_a_gradient_of_zero_leaves_zero() -> None:
    assert clip_by_norm({"a": jnp.zeros(2)}, jnp.float32(0.0), 1.0)["a"].tolist() == [0.0, 0.0]
