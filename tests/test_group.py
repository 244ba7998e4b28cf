"""Several processes are one run or none: what can't be a group is refused, and no process waits for one that failed."""

import socket
from pathlib import Path

import pytest

from jaxtrain import distributed
from jaxtrain.config import DistributedConfig, load
from jaxtrain.errors import ConfigError
from jaxtrain.loop import refuse_other_configs
from tests.runs import start, write_tiny

GROUPS = {
    "no port": ({"JAX_COORDINATOR_ADDRESS": "node0", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "HOST:PORT"),
    "no numbers": ({"JAX_COORDINATOR_ADDRESS": "node0:1"}, "JAX_NUM_PROCESSES"),
    "no coordinator": ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, "would train alone"),
    "no processes": (
        {"JAX_COORDINATOR_ADDRESS": "node0:1", "JAX_NUM_PROCESSES": "0", "JAX_PROCESS_ID": "0"},
        "process 0 of 0",
    ),
    "one too many": (
        {"JAX_COORDINATOR_ADDRESS": "node0:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
        "process 2 of 2",
    ),
    "no number in SLURM's": ({"SLURM_STEP_NUM_TASKS": "abc"}, "SLURM_STEP_NUM_TASKS=abc is not a number"),
    "no such port": (
        {"JAX_COORDINATOR_ADDRESS": "node0:99999", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
        "can't listen",
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_what_cannot_be_a_group_is_refused_before_anybody_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, words = GROUPS[name]
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=words):
        distributed.initialize(DistributedConfig())


def test_a_port_in_use_is_refused_by_its_number() -> None:
    with socket.create_server(("", 0)) as other:
        address = f"localhost:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}: process 0 can't listen there"):
            distributed.initialize(DistributedConfig(coordinator=address, processes=2, process_id=0))


def test_processes_may_have_a_mixture_in_other_directories_but_no_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mixture.yml"
    path.write_text("run_dir: r\nsteps: 1\ndata: {kind: mixture, mixture: {a: {dir: a, weight: 1}}}\n")
    compared: list[tuple[int, ...]] = []
    monkeypatch.setattr(distributed, "differing", lambda mine: compared.append(tuple(mine)))
    for override in ("data.mixture.a.dir=a", "data.mixture.a.dir=elsewhere", "data.mixture.a.weight=2"):
        refuse_other_configs(load(path, [override]))
    here, elsewhere, heavier = compared
    assert here == elsewhere != heavier


DISAGREEMENTS = {
    "config": ("seed=3", "different configs (here: seed=0)", "different configs (here: seed=3)"),
    "optimizer": ("optimizer.name=sgd", "optimizer.name=adamw", "optimizer.name=sgd"),
    "data": ("data.dir=nowhere", "another process could not open the data set", "nowhere: no such directory"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_processes_that_disagree_all_end_at_once_with_exit_code_2(name: str, tmp_path: Path, tiny_data: Path) -> None:
    override, *words = DISAGREEMENTS[name]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = [f"distributed.coordinator=localhost:{port}", "distributed.processes=2", "mesh.data=2"]
    arguments = [str(write_tiny(tmp_path, tiny_data)), *group]
    processes = [
        start([*arguments, "distributed.process_id=0"]),
        start([*arguments, "distributed.process_id=1", override]),
    ]
    try:
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output, word in zip(processes, outputs, words, strict=True):
        assert process.returncode == 2, output
        (line,) = [line for line in output.splitlines() if line.startswith("error: ")]
        assert word in line
    assert not (tmp_path / "run").exists()
