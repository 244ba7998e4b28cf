"""What is measured between two trainings, on arrays made by hand."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from jaxtrain.verification.certificate import Certificate, Check, HandedOver, Trained, compare

STEPS = 3
STACKED = frozenset({"layers.w"})


def training() -> Trained:
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    shapes = {"embed": (8, 4), "layers.w": (3, 5, 4), "head": (4,)}
    initial = {name: draw(*shape) for name, shape in shapes.items()}
    gradients = tuple({name: draw(*shape) for name, shape in shapes.items()} for _ in range(STEPS))
    final = {name: array + 0.1 * draw(*array.shape) for name, array in initial.items()}
    return Trained(initial, gradients, final, losses=(3.0, 2.0, 1.0), norms=(5.0, 4.0, 3.0))


def handed(alone: Trained) -> HandedOver:
    """The last step as one device does it."""
    start = {name: 0.5 * (alone.initial[name.removeprefix("ema.")] + array) for name, array in alone.final.items()}
    return HandedOver(start, alone.gradients[-1], alone.final)


def checks(other: Trained, alone: Trained | None = None, last: HandedOver | None = None) -> dict[str, Check]:
    alone = alone or training()
    return {check.what: check for check in compare(alone, other, last or handed(alone), STACKED, 1e-5)}


def failed(other: Trained, alone: Trained | None = None, last: HandedOver | None = None) -> list[str]:
    return [what for what, check in checks(other, alone, last).items() if not check.passed]


def changed(arrays: dict[str, np.ndarray], name: str, index: tuple[int, ...], factor: float) -> dict[str, np.ndarray]:
    copy = arrays[name].copy()
    copy[index] *= np.float32(factor)
    return {**arrays, name: copy}


def test_a_training_is_equal_to_itself() -> None:
    assert [check.difference for check in checks(training()).values()] == [0.0] * 11
    assert list(checks(training())) == [
        "initial parameters",
        "loss of step 1", "gradient norm of step 1", "gradients of step 1",
        "loss of step 2", "loss of step 3", "gradient norm of step 2", "gradient norm of step 3",
        "parameters after step 3", "gradients of step 3 from the same state", "update of step 3 from the same state",
    ]  # fmt: skip


def test_one_bit_of_one_initial_parameter_is_seen() -> None:
    run = training()
    array = run.initial["layers.w"].copy()
    array[1, 2, 3] = np.nextafter(array[1, 2, 3], np.float32(9))
    check = checks(replace(run, initial={**run.initial, "layers.w": array}))["initial parameters"]
    assert not check.passed
    assert check.where == "layers.w"
    assert 0 < check.difference < 1e-6


def test_a_zero_of_another_sign_is_another_initial_parameter() -> None:
    zero = training()
    zero.initial["head"][:] = 0
    minus = replace(zero, initial={**zero.initial, "head": -zero.initial["head"]})
    assert failed(minus, alone=zero) == ["initial parameters"]


@pytest.mark.parametrize(("factor", "fails"), [(1 + 5e-6, False), (1 + 5e-5, True)])
def test_a_loss_may_differ_by_the_tolerance_and_no_more(factor: float, fails: bool) -> None:
    run = training()
    assert failed(replace(run, losses=(3.0, 2.0 * factor, 1.0))) == (["loss of step 2"] if fails else [])


def test_the_gradient_norm_may_differ_more_once_parameters_do() -> None:
    run = training()
    assert failed(replace(run, norms=(5.0, 4.0 * (1 + 5e-5), 3.0))) == []
    assert failed(replace(run, norms=(5.0 * (1 + 5e-5), 4.0, 3.0))) == ["gradient norm of step 1"]


def test_the_gradient_of_a_single_layer_of_a_stacked_parameter_is_named() -> None:
    run = training()
    first = changed(run.gradients[0], "layers.w", (1,), 1.01)
    check = checks(replace(run, gradients=(first, *run.gradients[1:])))["gradients of step 1"]
    assert check.where == "layers.w[1]"
    assert check.difference == pytest.approx(0.01, rel=1e-4)


def test_an_update_is_compared_with_what_the_updates_did_and_not_with_the_parameter() -> None:
    run = training()
    final = {**run.final, "head": run.final["head"] + 1e-2 * (run.final["head"] - run.initial["head"])}
    check = checks(replace(run, final=final))["parameters after step 3"]
    assert (check.where, check.passed) == ("head", False)
    assert check.difference == pytest.approx(1e-2, rel=1e-3)


def test_a_step_from_the_same_state_is_compared_more_strictly_than_what_steps_have_led_to() -> None:
    run = training()
    final = {**run.final, "head": run.final["head"] + 3e-4 * (run.final["head"] - run.initial["head"])}
    assert failed(replace(run, final=final)) == []
    last = handed(run)
    assert failed(run, last=replace(last, final=final)) == ["update of step 3 from the same state"]
    gradients = changed(last.gradients, "layers.w", (2,), 1 + 1e-4)
    check = checks(run, last=replace(last, gradients=gradients))["gradients of step 3 from the same state"]
    assert (check.where, check.passed) == ("layers.w[2]", False)


def with_noise(scale: float) -> Trained:
    """The gradient of one parameter is rounding alone, and the optimizer made steps of it."""
    run = training()
    noise = scale * np.random.default_rng(1).standard_normal((STEPS, 4)).astype(np.float32)
    gradients = tuple({**each, "head": row} for each, row in zip(run.gradients, noise, strict=True))
    return replace(run, gradients=gradients, final={**run.final, "head": run.initial["head"] + np.sign(noise).sum(0)})


def test_a_parameter_whose_gradient_is_rounding_alone_is_left_out_and_named() -> None:
    found = checks(with_noise(-1e-9), alone=with_noise(1e-9))
    assert all(check.passed for check in found.values())
    assert found["parameters after step 3"].left_out == ("head",)


def test_a_parameter_with_a_small_gradient_is_compared() -> None:
    assert failed(with_noise(-1e-2), alone=with_noise(1e-2)) == ["gradients of step 1", "parameters after step 3"]


def test_a_parameter_that_only_gets_a_gradient_later_is_compared() -> None:
    run = training()
    zero = {**run.gradients[0], "embed": np.zeros((8, 4), np.float32)}
    late = replace(run, gradients=(zero, *run.gradients[1:]))
    assert checks(late, alone=late)["parameters after step 3"].left_out == ()


def test_a_frozen_parameter_must_not_move() -> None:
    run = training()
    gradients = tuple({name: array for name, array in each.items() if name != "head"} for each in run.gradients)
    frozen = replace(run, gradients=gradients, final={**run.final, "head": run.initial["head"]})
    assert failed(frozen, alone=frozen) == []
    moved = replace(frozen, final={**run.final, "head": run.initial["head"] + np.float32(1e-6)})
    check = checks(moved, alone=frozen)["parameters after step 3"]
    assert (check.where, check.difference) == ("head", math.inf)


def test_the_average_of_the_weights_is_compared_too() -> None:
    run = training()
    averaged = replace(run, final={**run.final, **{f"ema.{name}": array for name, array in run.final.items()}})
    assert failed(averaged, alone=averaged) == []
    other = replace(averaged, final=changed(averaged.final, "ema.layers.w", (2,), 1.001))
    assert checks(other, alone=averaged)["parameters after step 3"].where == "ema.layers.w[2]"


def test_a_gradient_that_is_no_number_is_the_largest_difference() -> None:
    run = training()
    first = changed(run.gradients[0], "layers.w", (1, 2, 3), math.nan)
    check = checks(replace(run, gradients=(first, *run.gradients[1:])))["gradients of step 1"]
    assert (check.where, check.difference) == ("layers.w[1]", math.inf)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_passes_nothing_and_is_null_in_json(value: float) -> None:
    run = training()
    check = checks(replace(run, losses=(value, 2.0, 1.0)))["loss of step 1"]
    assert not check.passed
    data = Certificate({}, 1, STEPS, "", {}, {}, (check,), {}).as_data()
    assert json.loads(json.dumps(data, allow_nan=False))["checks"][0] | {"what": ""} == {
        "what": "", "difference": None, "tolerance": 1e-5, "one_device": 3.0, "mesh": None, "where": "",
        "left_out": [], "passed": False,
    }  # fmt: skip
    assert data["passed"] is False
