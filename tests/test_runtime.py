"""What is decided before JAX wakes up, seen from a process that starts with it."""

import json
import subprocess
import sys
from pathlib import Path

from tests.runs import ROOT, environment, write_tiny

CHILD = """
import json, sys
from jaxtrain import runtime
from jaxtrain.config import load
runtime.configure(load(sys.argv[1], sys.argv[2:]))
import os, jax
print(json.dumps({
    "flags": os.environ["XLA_FLAGS"].split(),
    "cache": jax.config.jax_compilation_cache_dir if jax.config.jax_enable_compilation_cache else None,
    "devices": jax.device_count(),
}))
"""


def configured(folder: Path, *overrides: str) -> dict[str, object]:
    config = write_tiny(folder, folder / "data")
    command = [sys.executable, "-c", CHILD, str(config), *overrides]
    output = subprocess.run(command, env=environment(2), cwd=ROOT, text=True, capture_output=True, check=True).stdout
    result = json.loads(output)
    assert isinstance(result, dict)
    return result


def test_deterministic_adds_its_flag_to_those_of_the_user(tmp_path: Path) -> None:
    told = configured(tmp_path, "deterministic=true", f"compile_cache={tmp_path / 'cache'}")
    assert told["flags"] == ["--xla_force_host_platform_device_count=2", "--xla_gpu_deterministic_ops=true"]
    assert told["devices"] == 2
    assert str(told["cache"]).startswith(str(tmp_path / "cache"))


def test_without_a_compile_cache_there_is_none_even_where_the_environment_names_one(tmp_path: Path) -> None:
    assert "JAX_COMPILATION_CACHE_DIR" in environment(2)
    told = configured(tmp_path, "compile_cache=null")
    assert told["cache"] is None
    assert told["flags"] == ["--xla_force_host_platform_device_count=2"]
