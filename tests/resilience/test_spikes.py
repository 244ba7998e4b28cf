"""What counts as a spike, and what doesn't."""

import json
import math
import random
from collections.abc import Iterable, Sequence

import pytest

from jaxtrain.config import SpikesConfig
from jaxtrain.errors import DivergedError
from jaxtrain.resilience.spikes import UNLIMITED, Numbers, Spike, SpikeDetector, loss_limit, norm_limit

WARN = SpikesConfig()


def judge(numbers: Iterable[Numbers], config: SpikesConfig = WARN) -> list[tuple[int, Spike]]:
    """(attempt, spike) of a loop that dispatches one step ahead; nothing is skipped."""
    detector, found = SpikeDetector(config, {}), []
    limits = [detector.limits(unread=0)]
    for step, each in enumerate(numbers, start=1):
        limits.append(detector.limits(unread=1))
        spike = detector.take(step, each, limits[step - 1], applied=True)
        if spike is not None:
            found.append((step, spike))
    return found


def learning(steps: int, seed: int, noise: float = 0.05, tail: bool = False) -> list[Numbers]:
    """A run like a small decoder's: the loss falls steeply and then slowly, the norm rises in a warm-up and falls."""
    draw = random.Random(seed)
    numbers = []
    for step in range(1, steps + 1):
        level = 2.5 + 7.0 * math.exp(-step / 40) + 1.5 * (1 + step / 100) ** -0.5
        norm = 0.3 + 2.0 * math.exp(-step / 30) + (0.8 if 15 < step < 25 else 0.0)
        heavy = draw.expovariate(1.0) if tail else 0.0
        numbers.append(
            Numbers(
                level * (1 + noise * draw.gauss(0, 1)) + 0.3 * heavy,
                norm * math.exp(0.25 * draw.gauss(0, 1) + 0.2 * heavy),
            )
        )
    return numbers


RUNS: dict[str, list[Numbers]] = {
    "small noise": learning(2000, 0, 0.002),
    "usual noise": learning(2000, 1),
    "much noise": learning(2000, 2, 0.2),
    "a heavy tail": learning(2000, 3, tail=True),
    "constant": [Numbers(2.0, 1.0)] * 2000,
    "constant, then a little different": [Numbers(2.0, 1.0)] * 200 + [Numbers(2.1, 1.3)] * 200,
    "zero": [Numbers(0.0, 0.0)] * 200,
    "negative": [Numbers(-number.loss, number.grad_norm) for number in learning(2000, 4)][::-1],
    "learned by heart": [
        Numbers(10 ** random.Random(step).gauss(-4, 0.7), 10 ** random.Random(-step).gauss(-3, 0.7))
        for step in range(2000)
    ],
    "a batch that grows": [
        Numbers(3 + draw.gauss(0, 0.3 / size), math.exp(draw.gauss(0, 0.3)) / size)
        for size, draw in [(size, random.Random(100 * size + step)) for size in (1, 2, 4, 8) for step in range(500)]
    ],
    "a batch that shrinks": [
        Numbers(3 + draw.gauss(0, 0.1 / size), math.exp(draw.gauss(0, 0.3)) / size)
        for size, draw in [(size, random.Random(100 * size + step)) for size in (2, 1) for step in range(500)]
    ],
    "one batch in six is of harder data": [
        Numbers(draw.gauss(5, 0.1) if draw.random() < 1 / 6 else draw.gauss(2, 0.05), 1.0)
        for draw in [random.Random(step) for step in range(2000)]
    ],
}


@pytest.mark.parametrize("name", RUNS)
def test_what_is_usual_alarms_nobody(name: str) -> None:
    assert judge(RUNS[name]) == []


@pytest.mark.parametrize("name", ["small noise", "usual noise", "a heavy tail", "constant"])
@pytest.mark.parametrize("at", [300, 1500])
def test_a_spike_of_either_number_is_seen_and_named(name: str, at: int) -> None:
    usual = RUNS[name]
    high = [*usual[:at], Numbers(10 * usual[at].loss, usual[at].grad_norm), *usual[at + 1 :]]
    steep = [*usual[:at], Numbers(usual[at].loss, 1000 * usual[at].grad_norm), *usual[at + 1 :]]
    for numbers, over in [(high, "loss"), (steep, "grad_norm")]:
        ((step, spike),) = judge(numbers)
        assert (step, spike.over, spike.action) == (at + 1, (over,), "warn")
        assert f"{getattr(numbers[at], over):.4g}, above" in str(spike)


def test_nothing_is_judged_before_there_is_something_to_judge_by() -> None:
    assert judge([*[Numbers(2.0, 1.0)] * 60, Numbers(1e6, 1e6)]) == []


def test_the_policy_of_each_number_is_its_own() -> None:
    usual = RUNS["usual noise"][:300]
    config = SpikesConfig(loss="off", grad_norm="skip")
    assert judge([*usual, Numbers(100.0, usual[-1].grad_norm)], config) == []
    ((_, spike),) = judge([*usual, Numbers(100.0, 1e3)], config)
    assert (spike.over, spike.action) == (("grad_norm",), "skip")
    ((_, spike),) = judge([*usual, Numbers(100.0, 1e3)], SpikesConfig(loss="rewind", grad_norm="warn"))
    assert (spike.over, spike.action) == (("loss", "grad_norm"), "rewind")


def test_a_limit_is_so_many_deviations_of_the_noise() -> None:
    draw = random.Random(0)
    losses = [draw.gauss(3, 0.1) for _ in range(2000)]
    assert loss_limit(losses, 10) == pytest.approx(4, abs=0.25), "as a loss 4.0, as its logarithm a little more"
    norms = [math.exp(draw.gauss(0, 0.3)) for _ in range(2000)]
    assert norm_limit(norms, 10) == pytest.approx(math.exp(3), rel=0.2)


@pytest.mark.parametrize("boundaries", [{3}, {50, 51, 52}, set(range(1, 400, 7)), set(range(1, 400))])
def test_limits_do_not_depend_on_where_the_loop_stands_still_or_is_killed(boundaries: set[int]) -> None:
    numbers = [*learning(300, 5), Numbers(50.0, 20.0), *learning(90, 6)]
    assert _limits(numbers, boundaries) == _limits(numbers, set())


def _limits(numbers: Sequence[Numbers], boundaries: set[int]) -> list[Numbers]:
    """The limits of each attempt; at a boundary all is read and the run killed and resumed; spikes are skipped."""
    config = SpikesConfig(loss="skip", grad_norm="skip")
    detector, limits, read = SpikeDetector(config, {}), [], 0
    for attempt in range(len(numbers)):
        limits.append(detector.limits(unread=attempt - read))
        while read <= attempt - (0 if attempt + 1 in boundaries else 1):
            over = numbers[read].loss > limits[read].loss
            detector.take(read + 1, numbers[read], limits[read], applied=not over)
            read += 1
        if attempt + 1 in boundaries:
            detector = SpikeDetector(config, json.loads(json.dumps(detector.state())))
    return limits


def test_a_spike_that_was_skipped_is_no_measure_for_later_ones() -> None:
    detector = SpikeDetector(SpikesConfig(loss="skip", in_a_row=100), {})
    usual, spike = Numbers(2.0, 1.0), Numbers(20.0, 1.0)
    for step in range(1, 101):
        detector.take(step, usual, UNLIMITED, applied=True)
    for _ in range(50):
        found = detector.take(101, spike, detector.limits(unread=0), applied=False)
        assert found is not None
        assert found.action == "skip"


def test_interventions_without_quiet_steps_between_end_the_run() -> None:
    detector = SpikeDetector(SpikesConfig(loss="skip", in_a_row=3), {})
    detector.intervene(100, "loss 9")
    for step in range(101, 120):
        detector.take(step, Numbers(2.0, 1.0), UNLIMITED, applied=True)
    detector.intervene(119, "loss 9")
    detector = SpikeDetector(SpikesConfig(loss="skip", in_a_row=3), detector.state())
    with pytest.raises(DivergedError, match=r"step 130: loss 9; 3 interventions .*spikes.in_a_row") as error:
        detector.intervene(130, "loss 9")
    assert error.value.exit_code == 13


def test_quiet_steps_begin_the_count_anew() -> None:
    detector = SpikeDetector(SpikesConfig(loss="skip", in_a_row=2), {})
    for step in range(1, 200):
        detector.take(step, Numbers(2.0, 1.0), UNLIMITED, applied=True)
        if step % 25 == 0:
            detector.intervene(step + 1, "loss 9")


def test_a_rewind_does_not_forget_how_often_there_was_one() -> None:
    detector = SpikeDetector(SpikesConfig(loss="rewind", in_a_row=3), {})
    at_checkpoint = detector.state()
    for step in (300, 310):
        detector.intervene(step, "loss 9")
        detector = detector.after_rewind(at_checkpoint)
        for again in range(200, step):
            detector.take(again, Numbers(2.0, 1.0), UNLIMITED, applied=True)
    with pytest.raises(DivergedError, match="3 interventions"):
        detector.intervene(305, "loss 9")
