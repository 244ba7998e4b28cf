"""The learning rate over the run: each shape, and how rate and warm-up follow the batch."""

import math
from typing import Any

import jax.numpy as jnp
import pytest

from jaxtrain.config import Config
from jaxtrain.optimizer import learning_rate, schedule_inputs


def config(schedule: dict[str, Any], **keys: Any) -> Config:
    optimizer = {"learning_rate": 0.5, "schedule": schedule, **keys.pop("optimizer", {})}
    return Config.model_validate({"run_dir": "r", "steps": 10, "global_batch": 8, "optimizer": optimizer, **keys})


def rates(schedule: dict[str, Any], steps: int, **keys: Any) -> list[float]:
    """The rate of each update, at a peak of 0.5."""
    inputs = schedule_inputs(config(schedule, **keys), steps)
    return [learning_rate(jnp.int32(step), inputs).item() for step in range(1, steps + 1)]


RISING = [0.5 / 3, 1.0 / 3, 0.5]


def test_cosine_peaks_at_the_end_of_warmup_and_ends_at_its_final_share_with_the_last_step() -> None:
    got = rates({"warmup": 3, "final": 0.1}, 10)
    falling = [0.5 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * i / 7))) for i in range(1, 8)]
    assert got == pytest.approx(RISING + falling, rel=1e-5)
    assert got[-1] == pytest.approx(0.05, rel=1e-6)


def test_linear_falls_in_a_line_to_its_final_share_with_the_last_step() -> None:
    falling = [0.5 * (0.2 + 0.8 * (1 - i / 7)) for i in range(1, 8)]
    assert rates({"kind": "linear", "warmup": 3, "final": 0.2}, 10) == pytest.approx(RISING + falling, rel=1e-5)


@pytest.mark.parametrize(("shape", "left"), [("linear", lambda p: 1 - p), ("sqrt", lambda p: 1 - math.sqrt(p))])
def test_wsd_stays_at_the_peak_until_its_last_share_of_steps(shape: str, left: Any) -> None:
    got = rates({"kind": "wsd", "warmup": 3, "decay": 0.4, "decay_shape": shape, "final": 0.1}, 10)
    falling = [0.5 * (0.1 + 0.9 * left(i / 4)) for i in range(1, 5)]
    assert got == pytest.approx([*RISING, 0.5, 0.5, 0.5, *falling], rel=1e-5)
    assert rates({"kind": "wsd", "decay": 0.4}, 10)[-1] == pytest.approx(0.0, abs=1e-7)


def test_inverse_sqrt_depends_on_the_step_and_not_on_the_length() -> None:
    want = [*RISING, *(0.5 * math.sqrt(3 / step) for step in range(4, 11))]
    assert rates({"kind": "inverse_sqrt", "warmup": 3}, 10) == pytest.approx(want, rel=1e-5)
    assert rates({"kind": "inverse_sqrt", "warmup": 3}, 20)[:10] == pytest.approx(want, rel=1e-5)
    without = [0.5 / math.sqrt(step) for step in range(1, 6)]
    assert rates({"kind": "inverse_sqrt"}, 5) == pytest.approx(without, rel=1e-5)


def test_the_length_of_the_schedule_follows_the_run() -> None:
    for steps in (4, 10, 100):
        assert rates({"final": 0.0}, steps)[-1] == pytest.approx(0.0, abs=1e-7)
        assert rates({"final": 0.2}, steps)[-1] == pytest.approx(0.1, rel=1e-6)


def test_warmup_as_long_as_the_run_ends_at_the_peak() -> None:
    assert rates({"warmup": 4, "final": 0.0}, 4) == pytest.approx([0.125, 0.25, 0.375, 0.5])


def test_without_warmup_the_first_step_of_a_constant_schedule_has_the_peak() -> None:
    assert rates({"kind": "constant"}, 3) == pytest.approx([0.5] * 3)
    assert rates({"kind": "constant", "warmup": 2}, 4) == pytest.approx([0.25, 0.5, 0.5, 0.5])


def test_beyond_its_last_step_a_falling_schedule_stays_at_its_end() -> None:
    for kind in ("cosine", "linear", "wsd"):
        inputs = schedule_inputs(config({"kind": kind, "final": 0.1}), 10)
        assert learning_rate(jnp.int32(15), inputs).item() == pytest.approx(0.05)


FOLLOWING = {"none": (0.5, 4), "linear": (0.5 * 8 / 32, 16), "sqrt": (0.5 * 0.5, 16)}
"""The peak and the warm-up at a batch of 8 for numbers meant for 32."""


@pytest.mark.parametrize("scaling", FOLLOWING)
def test_rate_and_warmup_follow_the_batch(scaling: str) -> None:
    reference = {} if scaling == "none" else {"reference_batch": 32}
    small = config({"warmup": 4}, optimizer={"batch_scaling": scaling, **reference})
    inputs = schedule_inputs(small, 100)
    assert (inputs["peak"].item(), inputs["warmup"].item()) == pytest.approx(FOLLOWING[scaling])
    if reference:
        same = config({"warmup": 4}, global_batch=32, optimizer={"batch_scaling": scaling, **reference})
        assert schedule_inputs(same, 100)["peak"].item() == 0.5
        assert same.warmup_steps == 4
        assert same.warmup_steps * 32 == small.warmup_steps * 8, "as many examples"


def test_a_warmup_that_is_no_whole_number_of_steps_is_rounded_up() -> None:
    scaled = config({"warmup": 4}, global_batch=24, optimizer={"batch_scaling": "linear", "reference_batch": 32})
    assert scaled.warmup_steps == 6
    assert rates({"warmup": 4}, 10, global_batch=24, optimizer={"batch_scaling": "sqrt", "reference_batch": 32})[5] == (
        pytest.approx(0.5 * math.sqrt(24 / 32))
    )


def test_a_warmup_in_tokens_counts_rows_times_their_length() -> None:
    for tokens, steps in [(8 * 32 * 5, 5), (8 * 32 * 5 + 1, 6), (1, 1), (1e3, 4)]:
        assert config({"warmup_tokens": tokens}, data={"sequence": 32}).warmup_steps == steps


def test_in_a_ramp_the_warmup_ends_where_its_examples_are_done_and_each_size_has_its_rate() -> None:
    ramp = [{"steps": 3, "global_batch": 2}, {"steps": 2, "global_batch": 4}]
    optimizer = {"batch_scaling": "linear", "reference_batch": 8}
    ramped = config({"warmup": 2}, batch_ramp=ramp, optimizer=optimizer)
    assert ramped.warmup_steps == 6, "2 × 8 examples: 3 × 2 + 2 × 4 are 14, the sixth step has the rest"
    assert [schedule_inputs(ramped, 10, size)["peak"].item() for size in (2, 4, 8)] == [0.125, 0.25, 0.5]
    assert config({"warmup_tokens": 10 * 32}, batch_ramp=ramp, data={"sequence": 32}).warmup_steps == 4
    assert config({"warmup": 2}, batch_ramp=ramp).warmup_steps == 2
