"""Loader workers as real processes of a real program.

The program's workers inherit its standard output: reading that to its end returns when all of them are gone.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import multiprocessing, os, sys, traceback
import numpy as np
from jaxtrain.data import Order, RowTable, host_batches, open_dataset
from jaxtrain.errors import DataError
from tests.factories import digest

class Where:
    '''Tells where it is assembled.'''
    def __len__(self):
        return 100
    def assemble(self, row_ids):
        import jax
        cpu_only = os.environ.get("JAX_PLATFORMS") == jax.config.jax_platforms == "cpu"
        return {"pid": np.full(len(row_ids), os.getpid()), "cpu_only": np.full(len(row_ids), cpu_only)}

class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__("needs two arguments")
        self.two = two
    def __reduce__(self):
        if multiprocessing.parent_process() is None:
            return Unpicklable, (1, self.two)
        return Unpicklable, (1,)

class Failing:
    def __init__(self, error):
        self.error = error
    def __len__(self):
        return 100
    def assemble(self, row_ids):
        if 35 in row_ids:
            raise self.error
        return {"value": row_ids}

class Wide:
    '''Batches larger than a pipe holds.'''
    def __len__(self):
        return 100
    def assemble(self, row_ids):
        return {"value": np.zeros((len(row_ids), 100_000))}

class Announced:
    '''Opens a named pipe when it is assembled.'''
    def __init__(self, fifo, never=None):
        self.fifo, self.never = fifo, never
    def __len__(self):
        return 100
    def assemble(self, row_ids):
        open(self.fifo, "w").close()
        if self.never:
            open(self.never).close()  # nobody writes to it
        return {"value": row_ids}

def batches(table, workers, start=0, shuffle=True, epochs=2):
    order = Order(len(table), 0, shuffle, epochs)
    return host_batches(table, order, 8, np.arange(8), start, workers, 4)

def show(*words):
    print(*words, flush=True)

def tokens(directory):
    return RowTable(open_dataset(directory), "train", 8, True, 256)

def digests(directory, *pairs):
    for pair in pairs:
        workers, start = pair.split(":")
        show(digest(list(batches(tokens(directory), int(workers), int(start)))))

def where():
    started = batches(Where(), 2)
    assert "JAX_PLATFORMS" not in os.environ
    loaded = list(started)
    show(len({pid for batch in loaded for pid in batch["pid"]}), all(batch["cpu_only"].all() for batch in loaded))

def forget(directory):
    global kept
    lost, kept = (batches(tokens(directory), 1, epochs=None) for _ in range(2))
    next(lost), next(kept)

def ahead(fifo):
    os.mkfifo(fifo)
    started = batches(Announced(fifo), 1)
    open(fifo).close()
    started.close()

def stuck(fifo, never, then):
    os.mkfifo(fifo), os.mkfifo(never)
    started = batches(Announced(fifo, never), 1)
    open(fifo).close()
    show("stuck")
    if then == "close":
        started.close()
    else:
        sys.stdin.readline()

def wait(directory=None):
    loading = batches(tokens(directory) if directory else Wide(), 2, epochs=None)
    next(loading), next(loading)
    show(*(child.pid for child in multiprocessing.active_children()))
    sys.stdin.readline()
    show(digest([next(loading) for _ in range(20)]))
    loading.close()

def fail():
    for error in (DataError("id 300"), Unpicklable(1, 2), KeyError("mass")):
        failing = batches(Failing(error), 1, shuffle=False)
        show([int(next(failing)["row_ids"][0]) for _ in range(4)])
        for _ in range(2):
            try:
                next(failing)
            except Exception as raised:
                story = traceback.format_exception_only(raised)
                show(type(raised).__name__, str(raised).splitlines()[-1], "in assemble" in "".join(story))
        failing.close()

if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
"""

TIME_LIMIT = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.factories import make_dataset, make_documents

    folder = tmp_path_factory.mktemp("worker")
    (folder / "program.py").write_text(PROGRAM)
    make_dataset(folder / "data", make_documents([25] * 40), shard_tokens=300)
    return folder


def start(directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}"}
    environment.pop("JAX_PLATFORMS", None)
    return subprocess.Popen(
        [sys.executable, "-m", "program", *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]", line: str = "") -> tuple[str, str]:
    """Standard output and error to their ends, when the program and all its workers are gone."""
    try:
        return process.communicate(line, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


def run(directory: Path, *arguments: str) -> list[str]:
    """What the program printed, after it and all its workers have ended without an error or a warning."""
    process = start(directory, *arguments)
    output, errors = finish(process)
    assert (process.returncode, errors) == (0, "")
    return output.splitlines()


@pytest.mark.slow
def test_workers_give_the_same_batches_and_leave_no_process(directory: Path) -> None:
    # From the start, from the second epoch, and more workers than batches are left.
    runs = ["0:0", "2:0", "0:120", "1:120", "0:235", "3:235"]
    digests = run(directory, "digests", str(directory / "data"), *runs)
    assert len(set(digests)) == 3
    assert digests[0::2] == digests[1::2]


@pytest.mark.slow
def test_workers_assemble_and_keep_off_the_devices(directory: Path) -> None:
    assert run(directory, "where") == ["2 True"]


@pytest.mark.slow
def test_workers_begin_before_the_first_batch_is_asked_for(directory: Path) -> None:
    run(directory, "ahead", str(directory / "fifo"))


@pytest.mark.slow
def test_workers_end_with_a_program_that_forgets_to_close(directory: Path) -> None:
    run(directory, "forget", str(directory / "data"))


@pytest.mark.slow
def test_an_error_in_a_worker_comes_out_in_its_place_with_its_story_and_stays(directory: Path) -> None:
    before = "[0, 8, 16, 24]"
    assert run(directory, "fail") == [
        *[before, *["DataError id 300 False"] * 2],
        *[before, *["RuntimeError __mp_main__.Unpicklable: needs two arguments True"] * 2],
        *[before, *["KeyError 'mass' True"] * 2],
    ]


@pytest.mark.slow
def test_closing_does_not_wait_for_a_batch_that_never_comes(directory: Path, tmp_path: Path) -> None:
    run(directory, "stuck", str(tmp_path / "fifo"), str(tmp_path / "never"), "close")


@pytest.mark.slow
def test_a_stuck_worker_ends_when_the_program_is_killed(directory: Path, tmp_path: Path) -> None:
    process = start(directory, "stuck", str(tmp_path / "fifo"), str(tmp_path / "never"), "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "stuck\n"
    process.kill()
    finish(process)


@pytest.mark.slow
def test_workers_end_when_the_program_is_killed(directory: Path) -> None:
    process = start(directory, "wait", str(directory / "data"))
    assert process.stdout is not None
    assert len(process.stdout.readline().split()) == 2
    process.kill()
    finish(process)


@pytest.mark.slow
def test_workers_leave_it_to_the_program_when_to_stop(directory: Path) -> None:
    process = start(directory, "wait", str(directory / "data"))
    assert process.stdout is not None
    for worker in process.stdout.readline().split():
        os.kill(int(worker), signal.SIGTERM)
        os.kill(int(worker), signal.SIGINT)
    output, errors = finish(process, "go on\n")
    assert (process.returncode, errors) == (0, "")
    assert len(output.split()[-1]) == 64


@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_not_a_hang(directory: Path) -> None:
    process = start(directory, "wait")
    assert process.stdout is not None
    for worker in process.stdout.readline().split():
        os.kill(int(worker), signal.SIGKILL)
    _, errors = finish(process, "go on\n")
    assert process.returncode == 1
    assert "RuntimeError: data worker 0 of 2 died with exit code -9" in errors
