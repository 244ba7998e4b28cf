"""What is decided before JAX wakes up, seen from a process that starts with it."""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest

from jaxtrain.runtime import cpu_devices, drop_torn_programs
from tests.runs import ROOT, environment, tiny_config, write_tiny

ENVIRONMENT = environment(2, optimised=True)

CHILD = """
import json, sys
from jaxtrain import runtime
from jaxtrain.config import load
runtime.configure(load(sys.argv[1], sys.argv[2:]))
import os, jax
print(json.dumps({
    "flags": os.environ.get("XLA_FLAGS", "").split(),
    "cache": jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None,
    "devices": jax.device_count(),
}))
"""


LATE_CHILD = "import jax\n" + CHILD


def configured(
    folder: Path, *overrides: str, environment: Mapping[str, str] = ENVIRONMENT, child: str = CHILD
) -> dict[str, object]:
    config = write_tiny(folder, folder / "data")
    command = [sys.executable, "-c", child, str(config), *overrides]
    output = subprocess.run(command, env=environment, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    result = json.loads(output)
    assert isinstance(result, dict)
    return result


def test_deterministic_adds_its_flag_to_those_of_the_user(tmp_path: Path) -> None:
    told = configured(tmp_path, "deterministic=true", f"compile_cache={tmp_path / 'cache'}")
    assert told["flags"] == ["--xla_force_host_platform_device_count=2", "--xla_gpu_deterministic_ops=true"]
    assert told["devices"] == 2
    assert str(told["cache"]).startswith(str(tmp_path / "cache"))


def test_without_a_compile_cache_there_is_none_even_where_the_environment_names_one(tmp_path: Path) -> None:
    assert "JAX_COMPILATION_CACHE_DIR" in ENVIRONMENT
    told = configured(tmp_path, "compile_cache=null")
    assert told["cache"] is None
    assert told["flags"] == ["--xla_force_host_platform_device_count=2"]


@pytest.mark.parametrize(
    ("overrides", "cores", "devices"),
    [
        ([], 2, 2),
        ([], 6, 4),  # of 8 rows
        (["eval.batch=6"], 8, 2),
        (["microbatch=4"], 8, 2),
        (["mesh.tensor=2"], 8, 1),
        (["mesh.data=1"], 8, 1),
        (["batch_ramp=[{steps: 1, global_batch: 6}]"], 4, 2),
        (["cpu_devices=8", "mesh.tensor=2"], 2, 8),
        (["distributed.coordinator=host:1234", "distributed.processes=2", "distributed.process_id=0"], 8, 1),
    ],
)
def test_the_default_mesh_has_a_device_for_each_core_as_far_as_they_divide_the_batches(
    overrides: list[str], cores: int, devices: int, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, tmp_path / "data", *overrides)
    assert cpu_devices(config, cores) == devices


def test_jax_makes_the_devices_unless_the_environment_has_decided(tmp_path: Path) -> None:
    assert configured(tmp_path, "cpu_devices=3")["devices"] == 2
    undecided = {name: value for name, value in ENVIRONMENT.items() if name != "XLA_FLAGS"}
    assert configured(tmp_path, "cpu_devices=3", environment=undecided)["devices"] == 3


def test_a_command_that_needed_jax_to_read_its_config_gets_the_same(tmp_path: Path) -> None:
    alone = {name: value for name, value in ENVIRONMENT.items() if not name.startswith(("JAX_", "XLA_"))}
    alone["JAX_PLATFORMS"] = "cpu"
    asked = ["cpu_devices=3", f"compile_cache={tmp_path / 'cache'}"]
    early, late = (configured(tmp_path, *asked, environment=alone, child=child) for child in (CHILD, LATE_CHILD))
    assert late == early
    assert late["devices"] == 3
    assert str(late["cache"]).startswith(str(tmp_path / "cache"))
    assert configured(tmp_path, "compile_cache=null", environment=alone, child=LATE_CHILD)["cache"] is None


def test_compiled_programs_that_a_killed_process_left_half_written_are_dropped(tmp_path: Path) -> None:
    whole = zlib.compress(os.urandom(3 * 2**20))
    altered = bytearray(whole)
    altered[2**20] ^= 1
    contents = {
        "whole-cache": whole,
        "torn-cache": whole[: 2**21],
        "altered-cache": bytes(altered),
        "empty-cache": b"",
        "zstandard-cache": b"\x28\xb5\x2f\xfd and more",
        "other": b"\x78",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    drop_torn_programs(tmp_path)
    left = {"whole-cache", "zstandard-cache", "other", "looked-through"}
    assert {path.name for path in tmp_path.iterdir()} == left
    (tmp_path / "old-cache").write_bytes(b"\x78")
    os.utime(tmp_path / "old-cache", (1e9, 1e9))
    (tmp_path / "new-cache").write_bytes(b"\x78")
    drop_torn_programs(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*left, "old-cache"}, "only new ones are read"
    drop_torn_programs(tmp_path / "nowhere")
