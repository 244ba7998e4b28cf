"""Who is slow: named soon, and nobody else is, whatever the number of devices and the noise of their probes."""

import numpy as np
import pytest

from jaxtrain.resilience.stragglers import Table, scores, slowdown

THRESHOLD, PATIENCE, EVERY = 0.2, 4, 5
"""The defaults of `health`."""


def probes(devices: int, count: int, seed: int, scatter: float = 0.03) -> Table:
    """Times that scatter, with hiccups of up to several times as long in every fiftieth."""
    random = np.random.default_rng(seed)
    times = 5e-3 * np.exp(random.normal(0, scatter, (devices, count)))
    return times * np.where(random.random(times.shape) < 0.02, 1 + random.exponential(1, times.shape), 1)


def named(times: Table, probe: int, hosts: int | None = None) -> set[int]:
    """Who is named after that probe, with what is remembered by then."""
    given = scores(times[:, max(0, probe - 62) : probe + 1], THRESHOLD, ["gpu"] * len(times), hosts or len(times))
    return set(np.flatnonzero(given >= PATIENCE).tolist())


@pytest.mark.parametrize("devices", [2, 8, 1000])
def test_a_rank_slowed_by_30_percent_is_named_within_50_steps_and_no_other(devices: int) -> None:
    for seed in range(20 if devices < 1000 else 2):
        times = probes(devices, 70, seed)
        times[1, 70 - 50 // EVERY :] *= 1.3
        assert named(times, 69) == {1}, seed


@pytest.mark.parametrize("devices", [2, 8, pytest.param(1000, marks=pytest.mark.slow)])
def test_nobody_is_named_in_2000_steps_that_nobody_disturbed(devices: int) -> None:
    for seed in range(3 if devices < 1000 else 1):
        times = probes(devices, 2000 // EVERY, seed)
        assert all(named(times, probe) == set() for probe in range(times.shape[1])), seed


def test_one_hiccup_names_nobody_however_long_and_what_slows_all_alike_neither() -> None:
    times = probes(8, 40, 0)
    times[3, 20] *= 1000
    times[:, 25:] *= 2
    assert all(named(times, probe) == set() for probe in range(40))


def test_several_slow_ones_are_all_named() -> None:
    times = probes(8, 40, 0)
    times[5:, 20:] *= 1.3
    assert named(times, 39) == {5, 6, 7}


def test_of_many_one_that_is_slow_from_the_start_is_named_of_two_none() -> None:
    """Two can't tell which of them is usual."""
    for devices, expected in [(8, {1}), (2, set())]:
        times = probes(devices, 40, 0)
        times[1] *= 1.3
        assert named(times, 39) == expected


def test_of_two_the_one_that_grew_is_named_not_the_one_that_got_faster() -> None:
    times = probes(2, 40, 0)
    times[0, :20] *= 1.3  # a rank that had a bad start
    assert named(times, 39) == set()
    assert named(times, 19) == set()


def test_half_of_the_devices_of_two_hosts_slow_with_their_host() -> None:
    times = probes(8, 40, 0)
    times[4:, 20:] *= 1.3
    assert named(times, 39, hosts=2) == {4, 5, 6, 7}


def test_devices_are_compared_within_their_kind() -> None:
    times = probes(6, 40, 0)
    times[3:] *= 3
    kinds = ["h100", "h100", "h100", "a100", "a100", "a100"]
    assert scores(times, THRESHOLD, kinds, 6).max() < PATIENCE
    assert abs(slowdown(times, kinds, PATIENCE)).max() < 0.1


@pytest.mark.parametrize("devices", [2, 3, 4, 7])
def test_a_time_is_held_against_the_median_of_the_others_alone(devices: int) -> None:
    times = probes(devices, 30, 0)
    times[1, 10:20] = np.nan
    for device in {0, 1, devices - 1}:
        others = np.delete(times, device, axis=0)
        heard = np.isfinite(times[device]) & np.isfinite(others).any(axis=0)
        expected = np.median(np.log(times[device, heard]) - np.nanmedian(np.log(others[:, heard]), axis=0))
        assert slowdown(times, ["gpu"] * devices, 30)[device] == pytest.approx(np.expm1(expected))


def test_one_alone_is_never_slow() -> None:
    times = probes(1, 40, 0)
    times[:, 20:] *= 2
    assert named(times, 39) == set()


def test_probes_that_were_not_heard_of_count_nothing() -> None:
    times = probes(3, 40, 0)
    times[1, 20:] *= 1.3
    times[1, 22:] = np.nan
    times[:, 30] = np.nan
    assert named(times, 39) == set()
    assert scores(times, THRESHOLD, ["gpu"] * 3, 3)[1] == pytest.approx(2, abs=0.2)


def test_the_slowdown_is_told_over_the_last_probes() -> None:
    times = np.full((4, 20), 0.01)
    times[2, 16:] *= 1.25
    assert slowdown(times, ["gpu"] * 4, PATIENCE) == pytest.approx([0, 0, 0.25, 0])
