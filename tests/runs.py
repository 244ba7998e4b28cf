"""Tiny trainings for tests: in this process on some of the virtual devices, or in real processes of their own."""

import functools
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxtrain import loop
from jaxtrain.checkpoint import list_checkpoints
from jaxtrain.config import Config, load
from jaxtrain.data import host_batches
from jaxtrain.models.parameters import named_leaves
from jaxtrain.placement import Placement
from jaxtrain.program import Program, build
from jaxtrain.recorder import Recorder
from jaxtrain.sharding import MESH_AXES, Layout, make_mesh
from jaxtrain.telemetry.jsonl import read
from jaxtrain.training_data import open_data
from tests.flags import FAST_COMPILATION, virtual_devices

ROOT = Path(__file__).resolve().parents[1]
COMPILE_CACHE = ROOT / ".cache" / "compile"
PROGRAM = ("-m", "jaxtrain.train")

TINY = """
run_dir: {run_dir}
steps: 10
global_batch: 8
compile_cache: {cache}
model: {{vocab: 256, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}}
data: {{dir: {data}, sequence: 32}}
optimizer: {{learning_rate: 1e-2}}
checkpoint: {{every: 5}}
health: {{policy: off}}
"""

STRAIGHT = ["model.dropout=0.5", "data.log_rows=true"]
"""The overrides of the fixture `straight`."""

FAMILIES: dict[str, list[str]] = {
    "decoder": [],
    "vit": ["model={family: vit, layers: 2, embed: 64, heads: 4, mlp: 384, shift: 1}", "data={kind: digits}"],
    "own": [
        "model={target: 'scripts.own_task:Regression', width: 64}",
        "data={target: 'scripts.own_task:make_data', rows: 512}",
    ],
}
"""Name to the overrides that make the tiny run one of that family; `own` is the example in scripts/."""


class Straight(Protocol):
    """The fixture `straight`."""

    def __call__(self, mesh: str, family: str = "decoder") -> Path:
        """The directory of a run of that family on that mesh, left alone."""


def straight_overrides(family: str) -> list[str]:
    """The overrides of the fixture `straight` for a family: the example has no dropout."""
    return [*FAMILIES[family], *(STRAIGHT if family != "own" else STRAIGHT[1:])]


GPIPE = ["pipeline.schedule=gpipe"]
INTERLEAVED = ["pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"]
MESHES: dict[str, tuple[int, list[str]]] = {
    "one device": (1, []),
    "data=8": (8, ["mesh.data=8"]),
    "fsdp=8": (8, ["mesh.fsdp=8"]),
    "tensor=2": (2, ["mesh.tensor=2"]),
    "tensor=4": (4, ["mesh.tensor=4", "model.kv_heads=4"]),
    "data=2 fsdp=2 tensor=2": (8, ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]),
    "data=4 zero=1": (4, ["mesh.data=4", "sharding.zero=1"]),
    "data=2 fsdp=2 zero=2": (4, ["mesh.data=2", "mesh.fsdp=2", "sharding.zero=2", "microbatch=1"]),
    "data=2 fsdp=2 gathered once": (4, ["mesh.data=2", "mesh.fsdp=2", "fsdp.gather=step", "microbatch=1"]),
    "data=2 fsdp=2 tensor=2 zero=2": (8, ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "sharding.zero=2"]),
    "pipeline=2": (2, ["mesh.pipeline=2", "microbatch=2"]),
    "pipeline=4 uneven": (4, ["mesh.pipeline=4", "microbatch=1", "model.layers=5"]),
    "pipeline=2 fsdp=2 two chunks": (
        4, ["mesh.pipeline=2", "mesh.fsdp=2", *INTERLEAVED, "microbatch=1", "model.layers=4"],
    ),
    "pipeline=2 data=2 tensor=2 zero=1": (
        8, ["mesh.pipeline=2", "mesh.data=2", "mesh.tensor=2", "sharding.zero=1", "microbatch=1", *GPIPE],
    ),
    "pipeline=2 fsdp=2 tensor=2 gathered once": (
        8, ["mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2", "fsdp.gather=step", "microbatch=1"],
    ),
}  # fmt: skip
"""Name to (devices, overrides); tensor=4 needs four key heads, and four stages four layers."""


def tolerance(mesh: str) -> float:
    """How far a loss may be from that of one device, in float32 (law 2)."""
    return 1e-4 if "pipeline" in mesh else 1e-5


def make_layout(**axis_sizes: int) -> Layout:
    """The standard rules on a mesh of these sizes, over the first of the virtual devices."""
    sizes = {**dict.fromkeys(MESH_AXES, 1), **axis_sizes}
    return Layout.on(make_mesh(sizes, jax.devices()[: math.prod(sizes.values())]))


def write_tiny(folder: Path, data: Path, extra: str = "") -> Path:
    """A config file for a tiny run in `folder`/run on the data set `data`."""
    path = folder / "tiny.yml"
    path.write_text(TINY.format(run_dir=folder / "run", cache=COMPILE_CACHE, data=data) + extra)
    return path


def tiny_config(folder: Path, data: Path, *overrides: str) -> Config:
    """The loaded config of `write_tiny` with overrides."""
    return load(write_tiny(folder, data), list(overrides))


@dataclass
class Trained:
    """What some steps in this process left.

    Attributes:
        first: the optimizer's state after the first update, by name: a first moment is the gradient, clipped, times
            what is the same for all parameters.
    """

    program: Program
    state: Any
    metrics: list[dict[str, float]]
    first: dict[str, np.ndarray]

    @property
    def losses(self) -> np.ndarray:
        return np.array([metrics["loss"] for metrics in self.metrics])

    def parameters(self) -> dict[str, np.ndarray]:
        return {name: np.asarray(leaf) for name, leaf in named_leaves(self.state["params"]).items()}


def train_steps(config: Config, steps: int, devices: int = 1, state: Any = None) -> Trained:
    """The train step called directly, without loop, files or checkpoints."""
    program = build(config, jax.devices()[:devices])
    data = open_data(config)
    rows = Placement(program.batch).rows
    batches = host_batches(data.table, data.order, config.global_batch, rows, prefetch=0)
    return train_on(program, itertools.islice(batches, steps), loop.planned_steps(config, data), state)


def train_on(
    program: Program, batches: Iterable[Mapping[str, np.ndarray]], steps: int = 10, state: Any = None
) -> Trained:
    """One update for each of these host batches, within a run of `steps`."""
    place = Placement(program.batch)
    state = program.init(program.initial_key()) if state is None else state
    inputs = program.inputs(steps)
    metrics, first = [], {}
    for batch in batches:
        state, values = program.train_step(state, place(batch), inputs)
        metrics.append({name: value.item() for name, value in jax.device_get(values).items()})
        first = first or {name: np.array(leaf) for name, leaf in named_leaves(state["optimizer"]).items()}
    return Trained(program, state, metrics, first)


def assert_same_first_moments(split: Trained, alone: Trained, tolerance: float = 1e-5) -> None:
    """Every parameter's gradient in the first step, as the optimizer has it, differs by so much of its norm at most."""
    assert split.first.keys() == alone.first.keys()
    for name, want in alone.first.items():
        error = np.linalg.norm(split.first[name] - want) / max(np.linalg.norm(want), 1e-30)
        assert error <= tolerance, f"{name}: {error}"


def make_batches(count: int) -> list[dict[str, np.ndarray]]:
    """Packed rows of two or three documents of mostly small ids, so that there is something to learn.

    Some tokens aren't counted, in some rows none is.
    """
    random = np.random.default_rng(0)
    batches = []
    for _ in range(count):
        tokens = (256 * random.random((8, 33)) ** 4).astype(np.int32)
        starts = random.random((8, 32)) < 0.06
        starts[:, 0] = True
        segments = starts.cumsum(1)
        first = np.maximum.accumulate(np.where(starts, np.arange(32), 0), axis=1)
        weights = (random.random((8, 32)) < 0.9) * (np.arange(8) < random.integers(4, 9))[:, None]
        batches.append(
            {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "segments": segments,
                "positions": np.arange(32) - first,
                "weights": weights,
            }
        )
    return batches


@functools.cache
def tiny_program(devices: int, *overrides: str) -> Program:
    """The tiny config's program, compiled once for all tests that ask for it; for `train_on`, since it has no data."""
    with tempfile.TemporaryDirectory() as folder:
        config = tiny_config(Path(folder), Path(folder) / "data", *overrides)
    return build(config, jax.devices()[:devices])


def run_here(config: Config, devices: int = 1) -> list[dict[str, Any]]:
    """The whole run, loop and files included, in this process; returns its metrics."""
    loop.run(config, jax.devices()[:devices])
    return read(config.run_dir / "metrics.jsonl")


def step_losses(run_dir: Path) -> dict[int, float]:
    """Step to training loss; a step that stands twice fails the test."""
    lines = [line for line in read(run_dir / "metrics.jsonl") if "loss" in line]
    losses = {line["step"]: line["loss"] for line in lines}
    assert len(losses) == len(lines), "a step stands twice in metrics.jsonl"
    return losses


def environment(devices: int, optimised: bool = False) -> dict[str, str]:
    """The environment of a child process with so many virtual devices; `optimised`: it compiles as users do."""
    flags = virtual_devices(devices) if optimised else f"{virtual_devices(devices)} {FAST_COMPILATION}"
    # numpy's threads would be there before a program that imports it says which thread takes signals.
    threads = {"OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **threads, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}


def start(
    arguments: Sequence[str],
    devices: int = 1,
    program: Sequence[str] = PROGRAM,
    optimised: bool = False,
    **options: Any,
) -> subprocess.Popen[str]:
    """`python -m jaxtrain.train` (or another program) as a real process; stdout and stderr are one pipe."""
    command = [sys.executable, *program, *arguments]
    variables = environment(devices, optimised)
    return subprocess.Popen(
        command, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )


def train(
    arguments: Sequence[str],
    devices: int = 1,
    timeout: int = 180,
    program: Sequence[str] = PROGRAM,
    optimised: bool = False,
) -> tuple[int, str]:
    """Runs it to its end; returns exit code and output."""
    process = start(arguments, devices, program, optimised)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def start_group(
    arguments: Sequence[str], processes: int = 2, devices: int = 4, program: Sequence[str] = PROGRAM
) -> list[subprocess.Popen[str]]:
    """One run in several real processes of `devices` virtual devices each."""
    return start_each([arguments] * processes, devices, program)


def start_each(
    arguments: Sequence[Sequence[str]], devices: int = 4, program: Sequence[str] = PROGRAM, optimised: bool = False
) -> list[subprocess.Popen[str]]:
    """As `start_group`, each process with arguments of its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = [f"distributed.coordinator=localhost:{port}", f"distributed.processes={len(arguments)}"]
    return [
        start([*own, *group, f"distributed.process_id={index}"], devices, program, optimised)
        for index, own in enumerate(arguments)
    ]


def train_group(
    arguments: Sequence[str],
    processes: int = 2,
    devices: int = 4,
    timeout: int = 240,
    program: Sequence[str] = PROGRAM,
    optimised: bool = False,
) -> list[tuple[int, str]]:
    """Runs a group to its end; returns each process's exit code and output."""
    return train_each([arguments] * processes, program, devices, timeout, optimised)


def train_each(
    arguments: Sequence[Sequence[str]],
    program: Sequence[str] = PROGRAM,
    devices: int = 4,
    timeout: int = 240,
    optimised: bool = False,
) -> list[tuple[int, str]]:
    """As `train_group`, of processes that are given different arguments."""
    group = start_each(arguments, devices, program, optimised)
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in group]
    finally:
        for process in group:
            process.kill()
    return [(process.returncode, output) for process, output in zip(group, outputs, strict=True)]


def kill_when(condition: Callable[[], bool], group: Sequence[subprocess.Popen[str]], victim: int = 0) -> None:
    """SIGKILLs one process of a run as soon as the run's files show `condition`, then the others.

    Raises:
        AssertionError: a process ended before.
    """
    while not condition():
        for process in group:
            if process.poll() is not None:
                raise AssertionError(
                    f"ended with {process.returncode} before it could be killed:\n{process.stdout.read()}"
                )
        time.sleep(0.02)
    for process in [group[victim], *(other for other in group if other is not group[victim])]:
        process.kill()
        process.communicate()
    assert group[victim].returncode == -signal.SIGKILL, "it had ended by itself"


class Crash(Exception):
    """Stands for a process that dies."""


@contextmanager
def crash_after(step: int) -> Iterator[None]:
    """The run inside dies when the numbers of `step` are written, before anything else is done at that step."""
    record = Recorder.step

    def dying(recorder: Recorder, metrics: dict[str, Any]) -> None:
        record(recorder, metrics)
        if metrics["step"] == step:
            raise Crash

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        patch.setattr(Recorder, "step", dying)
        yield


def stopped_copy(run_dir: Path, folder: Path, step: int = 5) -> Path:
    """`folder`/run: a finished run as it would be if it had died right after `step` was saved."""
    copy = folder / "run"
    shutil.copytree(run_dir, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    for log in [copy / "metrics.jsonl", *copy.glob("rows-*.jsonl")]:
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    (copy / "events.jsonl").unlink()
    return copy


def read_checkpoint(run_dir: Path, step: int) -> dict[str, np.ndarray]:
    """A checkpoint's arrays by name, read by Orbax alone."""
    with ocp.StandardCheckpointer() as checkpointer:
        plain = checkpointer.restore((run_dir / "checkpoints" / str(step) / "state").absolute())
    return {name: np.asarray(leaf) for name, leaf in named_leaves(plain).items()}


def checkpoint_meta(run_dir: Path, step: int) -> dict[str, Any]:
    """A checkpoint's description."""
    (file,) = (path for path in (run_dir / "checkpoints" / str(step) / "meta").iterdir() if path.name == "metadata")
    return dict(json.loads(file.read_text()))


def checkpoint_steps(run_dir: Path) -> list[int]:
    """The complete checkpoints of a run, rising."""
    return sorted(list_checkpoints(run_dir / "checkpoints").steps)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind, over all starts."""
    return [event for event in read(run_dir / "events.jsonl") if event["kind"] == kind]


def row_log(run_dir: Path, process: int = 0) -> dict[int, list[int]]:
    """Step to the rows that a process consumed for it; a step that stands twice fails the test."""
    lines = read(run_dir / f"rows-{process}.jsonl")
    rows = {line["step"]: line["rows"] for line in lines}
    assert len(rows) == len(lines), "a step stands twice in the row log"
    return rows


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes; empty where there is none."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
