"""What a supervisor needs of its machine: devices for each slot, a port of its own, a name in nobody's way."""

import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jaxtrain import launch
from jaxtrain.config import Config, load
from jaxtrain.distributed import _cannot_listen
from jaxtrain.errors import ConfigError
from jaxtrain.launchers import local
from jaxtrain.launchers.devices import share_of_devices
from jaxtrain.launchers.local import free_port
from tests.launchers.stand_in import PLAN
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
    with pytest.raises(ConfigError, match="JAX_NUM_CPU_DEVICES=0: at least 1 is needed"):
        share_of_devices(config(tmp_path), 2, 3, {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "0"})


@pytest.mark.skipif(not any(Path(path).glob("jax_cuda12_plugin") for path in sys.path), reason="no CUDA plugin")
def test_gpus_are_divided_among_slots_or_refused(tmp_path: Path) -> None:
    eight = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
    devices, slots = share_of_devices(config(tmp_path), 3, 4, eight)
    assert devices == 2
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["0,1", "2,3", "4,5", "6,7"]
    with pytest.raises(ConfigError, match="8 GPUs don't divide among 3 processes and spares; .* may be 1, 2, 4 or 8"):
        share_of_devices(config(tmp_path), 3, 3, eight)


def short_of_memory(*_: object) -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_a_spare_that_cannot_be_started_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = local.Local(local.Program("json", (), "json", {}), tmp_path, spares=1)
    monkeypatch.setattr(local, "_popen", short_of_memory)
    launcher.refill()
    launcher.close()


def test_the_folder_of_beats_may_be_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    launcher = local.Local(local.Program("json.tool", ("--help",), "json", os.environ), tmp_path / "logs")
    for folder in tmp_path.iterdir():
        folder.rmdir()
    launcher.start(2, [0]).kill()
    launcher.close()


def test_what_cannot_be_started_is_refused_at_first_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plan, started = tmp_path / "run", tmp_path / "plan.json", []
    plan.write_text(json.dumps({"1.0": [["steps", 1], ["save", 1], ["exit", 1]], "*": [["exit", 0]]}))
    monkeypatch.setenv(PLAN, str(plan))
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")
    popen, failing = local._popen, {2}

    def sometimes(*arguments: Any) -> Any:
        started.append(1)
        return short_of_memory() if len(started) in failing else popen(*arguments)

    monkeypatch.setattr(local, "_popen", sometimes)
    (tmp_path / "config.yml").write_text(f"run_dir: {run}\nsteps: 10\nglobal_batch: 12\ndata: {{dir: {tmp_path}}}\n")
    arguments = ["local", "--processes", "1", str(tmp_path / "config.yml")]
    assert launch.main(arguments, "tests.launchers.stand_in", "json") == 0
    assert "launch: can't be started: Cannot allocate memory" in capsys.readouterr().out
    failing.add(len(started) + 1)
    assert launch.main(arguments, "tests.launchers.stand_in", "json") == 2
    assert "--processes 1: can't be started: Cannot" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--processes", "--spares"])
def test_more_processes_than_any_machine_runs_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["local", "--processes", "1", option, "9" * 26, "config.yml"]) == 2
    assert f"argument {option}: must be at most 1024" in capsys.readouterr().err
