"""What a supervisor needs of its machine: devices for each slot, a port of its own, a name in nobody's way."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config import Config, load
from jaxtrain.distributed import _cannot_listen
from jaxtrain.errors import ConfigError
from jaxtrain.launchers.devices import share_of_devices
from jaxtrain.launchers.local import free_port
from tests.runs import ROOT

SMALL = """
import re, sys, time
began = time.perf_counter()
import jaxtrain.launch
seconds = time.perf_counter() - began
most = re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]
print(seconds, int(most) // 1024, *sorted({"jax", "numpy", "orbax"} & set(sys.modules)))
"""


def config(folder: Path, *overrides: str) -> Config:
    path = folder / "config.yml"
    path.write_text("run_dir: r\nsteps: 5\ndata: {dir: d}\n")
    return load(path, overrides)


def test_the_supervisor_is_a_small_process_without_jax() -> None:
    printed = subprocess.run([sys.executable, "-c", SMALL], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, mebibytes, *libraries = printed.stdout.split()
    assert libraries == []
    assert float(seconds) < 5
    assert int(mebibytes) < 100


def test_a_port_that_is_held_is_given_to_nobody_and_free_for_who_asks_for_it() -> None:
    held = free_port()
    number = held.getsockname()[1]
    assert _cannot_listen(number) is None
    others = [socket.socket() for _ in range(200)]
    for other in others:
        other.bind(("", 0))
    assert number not in {other.getsockname()[1] for other in others}
    for other in (held, *others):
        other.close()


def test_virtual_devices_are_those_that_the_environment_or_the_config_says(tmp_path: Path) -> None:
    forced = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    assert share_of_devices(config(tmp_path), 2, 3, forced) == (4, [])
    assert share_of_devices(config(tmp_path), 2, 3, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}) == (2, [])
    told = [{"JAX_NUM_CPU_DEVICES": "3"}] * 3
    assert share_of_devices(config(tmp_path, "cpu_devices=3"), 2, 3, {"JAX_PLATFORMS": "cpu"}) == (3, told)
    assert share_of_devices(config(tmp_path), 2, 3, {"JAX_PLATFORMS": "cpu"})[0] == 1


@pytest.mark.skipif(not any(Path(path).glob("jax_cuda12_plugin") for path in sys.path), reason="no CUDA plugin")
def test_gpus_are_divided_among_slots_or_refused(tmp_path: Path) -> None:
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    devices, slots = share_of_devices(config(tmp_path), 3, 4, eight)
    assert devices == 2
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0,1", "2,3", "4,5", "6,7"]
    with pytest.raises(ConfigError, match="8 GPUs don't divide among 3 processes and spares; .* may be 1, 2, 4 or 8"):
        share_of_devices(config(tmp_path), 3, 3, eight)
