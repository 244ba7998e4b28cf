import importlib.util

import pytest

from jaxtrain.config.cluster import load_cluster
from jaxtrain.errors import ConfigError
from jaxtrain.planner import targets
from jaxtrain.planner.targets import compile_only_devices, target_description
from tests.planner.programs import needs_cuda_compiler


@needs_cuda_compiler
@pytest.mark.parametrize(("name", "capability"), [("a100", "8.0"), ("h100", "9.0"), ("h200", "9.0"), ("b200", "10.0")])
def test_every_target_is_accepted_by_the_compiler(name: str, capability: str) -> None:
    devices = compile_only_devices(load_cluster(name), 16)
    assert len(devices) == 16
    assert {device.platform for device in devices} == {"gpu"}
    assert {device.compute_capability for device in devices} == {capability}
    assert len({device.slice_index for device in devices}) <= 2


@needs_cuda_compiler
def test_a_host_may_be_used_in_part() -> None:
    assert len(compile_only_devices(load_cluster("h100"), 4)) == 4


@needs_cuda_compiler
@pytest.mark.parametrize(("devices", "nearest"), [(12, 16), (9, 8), (20, 16)])
def test_devices_that_dont_fill_hosts_are_refused_with_the_nearest_number(devices: int, nearest: int) -> None:
    with pytest.raises(ConfigError, match=f"{devices} devices don't fill hosts of 8; the nearest is {nearest}"):
        compile_only_devices(load_cluster("h100"), devices)


@needs_cuda_compiler
@pytest.mark.parametrize("devices", [0, -8])
def test_no_devices_are_refused(devices: int) -> None:
    with pytest.raises(ConfigError, match="the nearest is 8"):
        compile_only_devices(load_cluster("h100"), devices)


def test_without_the_cuda_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "scripts/setup --cuda" in targets.cuda_compiler_missing()
    with pytest.raises(ConfigError, match="scripts/setup --cuda"):
        compile_only_devices(load_cluster("h100"), 8)


def test_the_description_holds_the_facts_of_the_gpu() -> None:
    text = target_description(load_cluster("b200").gpu)
    for fact in (
        "core_count: 148", "major: 10 minor: 0", "device_memory_size: 191514411008", "memory_bandwidth: 7672320000000",
        "l2_cache_size: 132644864", "clock_rate_ghz: 1.965", "shared_memory_per_block_optin: 232448",
    ):  # fmt: skip
        assert fact in text
