"""Exit code 0 means that the goal was reached; each other code says why not, in words that a person can act on."""

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxtrain.errors import CheckpointError, storing
from jaxtrain.recorder import Recorder
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry.events import EventLog
from jaxtrain.telemetry.metrics import MetricsWriter
from jaxtrain.train import main
from tests import faults
from tests.factories import make_dataset, make_documents
from tests.runs import (
    MESHES,
    STRAIGHT,
    Straight,
    checkpoint_steps,
    content,
    environment,
    events,
    start,
    step_losses,
    stopped_copy,
    train,
    train_group,
    write_tiny,
)


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets variables for JAX; they go with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def fails(arguments: list[str], code: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one message of a command that ends with `code` and leaves `folder` as it was."""
    before = content(folder)
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.out + shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("error: ") == 1
    assert content(folder) == before
    return shown.err


BAD_CONFIGS = {
    "unknown key": ("optimzer: {learning_rate: 1}\n", [], ["optimzer", "optimizer"]),
    "repeated key": ("seed: 1\nseed: 2\n", [], ["seed", "twice"]),
    "wrong type": ("seed: many\n", [], ["seed", "many"]),
    "unknown override": ("", ["optimizer.learning_rat=1"], ["optimizer.learning_rat", "learning_rate"]),
    "not YAML": ("model: [\n", [], ["tiny.yml"]),
    "contradiction": ("", ["model.heads=3"], ["model.heads=3", "kv_heads"]),
    "mesh": ("", ["mesh.data=3"], ["mesh.data=3", "8"]),
    "batch over mesh": ("", ["global_batch=6"], ["global_batch=6"]),
    "no end": ("", ["steps=null"], ["steps", "data.epochs"]),
    "more steps than data": ("", ["steps=50", "data.epochs=1"], ["steps=50", "data.epochs=1"]),
    "no data": ("", ["data.dir=nowhere"], ["nowhere"]),
    "vocabulary": ("", ["model.vocab=100"], ["model.vocab", "100", "256"]),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_bad_request_prints_one_message_and_touches_nothing(
    name: str, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    extra, overrides, words = BAD_CONFIGS[name]
    path = write_tiny(tmp_path, tiny_data, extra)
    if overrides == ["steps=50", "data.epochs=1"]:
        path.write_text(path.read_text().replace("steps: 10\n", ""))
    message = fails([str(path), *overrides], 2, tmp_path, capsys)
    for word in words:
        assert word in message


def test_a_missing_config_file_is_a_bad_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "none.yml" in fails([str(tmp_path / "none.yml")], 2, tmp_path, capsys)


def test_a_foreign_run_directory_is_a_bad_request(
    straight: Straight, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_copy(straight("data=8"), tmp_path)
    arguments = [str(write_tiny(tmp_path, tiny_data)), *STRAIGHT, *MESHES["data=8"][1]]
    assert "resume is false" in fails([*arguments, "resume=false"], 2, tmp_path, capsys)
    assert "model.embed" in fails([*arguments, "model.embed=96"], 2, tmp_path, capsys)


def test_a_reached_goal_is_exit_code_0_and_nothing_on_stderr(
    straight: Straight, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = stopped_copy(straight("data=8"), tmp_path)
    assert main([str(write_tiny(tmp_path, tiny_data)), *STRAIGHT, *MESHES["data=8"][1]]) == 0
    shown = capsys.readouterr()
    assert f"complete: 10 steps in {run_dir}" in shown.out
    assert shown.err == ""
    assert events(run_dir, "stop")[-1]["exit_code"] == 0


def test_unreadable_checkpoints_are_exit_code_4(
    straight: Straight, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = stopped_copy(straight("data=8"), tmp_path)
    (run_dir / "checkpoints" / "5" / "meta" / "metadata").unlink()
    assert main([str(write_tiny(tmp_path, tiny_data)), *STRAIGHT, *MESHES["data=8"][1]]) == 4
    error = capsys.readouterr().err
    assert "none of the checkpoints that are there can be read (5)" in error
    assert "Traceback" not in error


def test_bad_data_found_while_training_are_exit_code_5(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = make_documents([20] * 16)
    documents[3][2] = 300
    make_dataset(tmp_path / "data", documents, vocab=301, claimed_vocab=256)
    assert main([str(write_tiny(tmp_path, tmp_path / "data")), "data.pack=false"]) == 5
    error = capsys.readouterr().err
    assert "token id 300" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("name", ["MemoryError", "RuntimeError", "SystemExit"])
def test_a_crash_keeps_its_traceback_in_the_log_and_on_stderr(
    name: str, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recorder, "step", Recorder.step)  # put back when the test ends
    faults.raise_at(name, step=3)
    assert main([str(write_tiny(tmp_path, tiny_data))]) == 1
    log = (tmp_path / "run" / "logs" / "process-0.log").read_text()
    for text in (capsys.readouterr().err, log):
        assert f"{name}: injected at step 3" in text
        assert "Traceback (most recent call last)" in text
        assert "in _read" in text, "the line that failed is not shown"
    (stop,) = events(tmp_path / "run", "stop")
    assert (stop["exit_code"], stop["reason"]) == (1, f"{name}: injected at step 3")
    assert logging.getLogger().level == logging.WARNING, "the log is closed again"


@pytest.mark.slow
def test_an_interrupt_is_one_line_and_exit_code_75_and_the_run_resumes(tmp_path: Path, tiny_data: Path) -> None:
    arguments = [str(write_tiny(tmp_path, tiny_data).rename(tmp_path / "long.yml"))]
    text = (tmp_path / "long.yml").read_text().replace("steps: 10", "steps: 600")
    (tmp_path / "long.yml").write_text(text.replace("every: 5", "every: 50"))
    process = start(arguments)
    seen = iter(process.stdout.readline, "")  # type: ignore[union-attr]
    while not next(seen).startswith("step 60/"):
        pass
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    run_dir = tmp_path / "run"
    newest = checkpoint_steps(run_dir)[-1]
    (line,) = [line for line in output.splitlines() if line.startswith("paused")]
    assert line == f"paused at step {newest} of 600 after SIGINT to process 0, and saved; the same command goes on"
    assert newest == max(step_losses(run_dir)) >= 60
    assert events(run_dir, "stop")[-1]["exit_code"] == 75
    code, output = train(arguments)
    assert code == 0, output
    assert f"resumed after step {newest}" in output
    assert sorted(step_losses(run_dir)) == list(range(1, 601))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_bad_request_of_one_process_alone_leaves_none_waiting(victim: int, tmp_path: Path, tiny_data: Path) -> None:
    """As on a host where the data are not mounted: it says what is wrong, and the other that it wasn't itself."""
    arguments = [str(write_tiny(tmp_path, tiny_data)), "mesh.fsdp=8", "distributed.heartbeat_timeout=10"]
    results = train_group([f"no-data={victim}", *arguments], timeout=90, program=("-m", "tests.faults"))
    code, output = results[victim]
    assert code == 2, output
    assert "error: injected" in output
    code, output = results[1 - victim]
    assert code == 2, output
    assert "error: another process could not open the data set" in output


@pytest.mark.slow
@pytest.mark.parametrize("present", [0, 1])
def test_a_missing_worker_is_exit_code_6_and_names_the_setting(present: int, tmp_path: Path, tiny_data: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = [f"distributed.coordinator=localhost:{port}", "distributed.processes=2"]
    group += [f"distributed.process_id={present}", "distributed.start_timeout=5"]
    code, output = train([str(write_tiny(tmp_path, tiny_data)), *group], timeout=60)
    assert code == 6, output
    (message,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert f"process {present} of 2" in message
    assert ("1 of 2 processes came" in message) == (present == 0)
    assert "distributed.start_timeout=5" in message
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


IN_THE_WAY = {
    "run_dir is a file": ["run_dir={folder}/file"],
    "run_dir is below a file": ["run_dir={folder}/file/run"],
    "checkpoint.dir is a file": ["checkpoint.dir={folder}/file"],
    "checkpoints below a pattern": ['run_dir="{folder}/a[b]"'],
    "compile_cache is a file": ["compile_cache={folder}/file"],
    "data.dir is below a file": ["data.dir={folder}/file/data", "data.source=python_stdlib", "model.vocab=300"],
}


@pytest.mark.parametrize("name", IN_THE_WAY)
def test_a_place_that_cannot_be_written_is_a_bad_request_that_names_its_key(
    name: str, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    overrides = [text.format(folder=tmp_path) for text in IN_THE_WAY[name]]
    assert main([str(write_tiny(tmp_path, tiny_data)), *overrides]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    key = IN_THE_WAY[name][0].partition("=")[0]
    assert key in error or "run_dir or checkpoint.dir" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "config.yml", "run.json", "logs/process-0.log"])
def test_a_directory_in_the_place_of_a_file_of_the_run_is_a_bad_request_that_names_it(
    file: str, straight: Straight, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stopped_copy(straight("one device"), tmp_path) / file
    path.unlink(missing_ok=True)
    path.mkdir()
    assert main([str(write_tiny(tmp_path, tiny_data)), *STRAIGHT]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"run_dir={tmp_path / 'run'}: " in line
    assert str(path) in line


def test_a_directory_where_another_process_trains_is_a_bad_request(
    straight: Straight, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = stopped_copy(straight("data=8"), tmp_path)
    arguments = [str(write_tiny(tmp_path, tiny_data)), *STRAIGHT, *MESHES["data=8"][1]]
    with RunDirectory(run_dir).claim():
        assert "another process trains here" in fails(arguments, 2, tmp_path, capsys)
    assert main(arguments) == 0


def test_a_full_disk_does_not_take_the_place_of_the_error_that_ends_the_run(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(log: EventLog, kind: str, /, **fields: object) -> None:
        if kind == "stop":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Recorder, "step", Recorder.step)
    monkeypatch.setattr(EventLog, "write", full)
    faults.raise_at("RuntimeError", step=3)
    assert main([str(write_tiny(tmp_path, tiny_data))]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1] == "RuntimeError: injected at step 3"
    assert "No space left" not in error
    assert logging.getLogger().level == logging.WARNING, "the log is closed again"


@pytest.mark.parametrize("written", [MetricsWriter, EventLog])
def test_a_full_disk_under_any_file_of_the_run_ends_it_as_one_under_a_checkpoint(
    written: type, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = written.write  # type: ignore[attr-defined]

    def full(file: object, *kind: str, **fields: object) -> None:
        if fields.get("step") == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, *kind, **fields)

    monkeypatch.setattr(written, "write", full)
    assert main([str(write_tiny(tmp_path, tiny_data))]) == 4
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(f"error: run_dir={tmp_path / 'run'}: No space left on device; mend that")
    assert "Traceback" not in error


def test_what_another_start_may_not_meet_again_is_told_from_what_it_will() -> None:
    for number, code in ((errno.EROFS, 4), (errno.EIO, 12), (errno.ESTALE, 12)):
        with pytest.raises(CheckpointError, match=r"run_dir=r: f: .*same command goes on") as found, storing("r"):
            raise OSError(number, os.strerror(number), "f")
        assert found.value.exit_code == code


@pytest.mark.slow
def test_a_save_that_fails_in_the_background_ends_the_process_at_once(tmp_path: Path, tiny_data: Path) -> None:
    arguments = ["no-saves=3", str(write_tiny(tmp_path, tiny_data)), "steps=40"]
    code, output = train(arguments, timeout=60, program=("-m", "tests.faults"))
    assert code == 4, output
    assert "Traceback" not in output
    assert "save failed" in output
    assert "Traceback" in (tmp_path / "run" / "logs" / "process-0.log").read_text()


@pytest.mark.slow
def test_devices_that_are_not_there_are_a_bad_request(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny(tmp_path, tiny_data)
    command = [sys.executable, "-m", "jaxtrain.train", str(path)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    in_a_group = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}
    for group in ({}, in_a_group):
        variables = {**environment(1), "JAX_PLATFORMS": "nonsense", **group}
        result = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith("error: JAX_PLATFORMS=nonsense: JAX finds no such device")
        assert "Traceback" not in result.stderr


def test_a_host_whose_name_is_not_resolved_is_told_so(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unresolved() -> None:
        raise RuntimeError("Unable to initialize backend 'cpu': [enforce fail at gloo/transport/tcp/device.cc:99] -2")

    monkeypatch.setattr(jax, "devices", unresolved)
    error = fails([str(write_tiny(tmp_path, tiny_data))], 2, tmp_path, capsys)
    assert f"by the name of this host, {socket.gethostname()}" in error
