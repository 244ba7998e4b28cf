import contextlib
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.telemetry.tensorboard import TensorBoardWriter, drop_steps_after, event_files
from tests.event_files import crc32c, read_events, read_scalars, read_texts


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "tensorboard"


def write_steps(directory, steps, resume_step=0, value=1.0):
    writer = TensorBoardWriter(directory, resume_step, "seed: 0\n")
    for step in steps:
        writer.write(step, {"train/loss": value})
    writer.close()
    return writer.path


def steps_of(directory, tag="train/loss"):
    return [step for step, _ in read_scalars(directory)[tag]]


def test_the_readers_checksum_is_castagnolis():
    assert crc32c(b"123456789") == 0xE3069283


def test_each_value_is_readable_as_soon_as_it_is_written(directory):
    writer = TensorBoardWriter(directory, 0, "seed: 0\n")
    writer.write(1, {"train/loss": 2.5, "train/tokens": 136})
    assert read_scalars(directory) == {"train/loss": [(1, 2.5)], "train/tokens": [(1, 136.0)]}
    writer.close()


def test_the_config_stands_there_as_a_text(directory):
    TensorBoardWriter(directory, 0, "seed: 0\nmesh:\n  data: 8\n").close()
    assert read_texts(directory) == [(1, "config/text_summary", "    seed: 0\n    mesh:\n      data: 8\n")]


def test_a_resumed_run_leaves_one_value_per_step(directory):
    write_steps(directory, range(1, 9), value=1.0)
    write_steps(directory, range(6, 13), resume_step=5, value=2.0)
    assert read_scalars(directory)["train/loss"] == [(n, 1.0) for n in range(1, 6)] + [(n, 2.0) for n in range(6, 13)]
    assert [step for step, _, _ in read_texts(directory)] == [1, 6]


def test_a_start_that_wrote_nothing_that_is_kept_leaves_no_file(directory):
    write_steps(directory, range(1, 6))
    for _ in range(3):
        write_steps(directory, [6, 7], resume_step=5)
    assert len(event_files(directory)) == 2
    assert steps_of(directory) == [1, 2, 3, 4, 5, 6, 7]


def test_a_new_start_keeps_nothing(directory):
    write_steps(directory, [1, 2])
    write_steps(directory, [1])
    assert steps_of(directory) == [1]
    assert len(event_files(directory)) == 1


def test_an_open_tensorboard_is_told_to_forget_the_steps_that_come_again(directory):
    write_steps(directory, [6], resume_step=5)
    marks = [
        (event.step, event.session_log.status) for event in read_events(directory) if event.HasField("session_log")
    ]
    assert marks == [(6, 1)]


def test_files_sort_in_the_order_of_the_starts_whatever_the_clock_says(directory, monkeypatch):
    first = write_steps(directory, [1])
    ahead = first.rename(directory / "events.out.tfevents.9000000000.other-host")
    second = write_steps(directory, [2], resume_step=1)
    third = write_steps(directory, [3], resume_step=2)
    assert event_files(directory) == [ahead, second, third]


@pytest.mark.parametrize("tail", [b"\x07", b"\x20\0\0\0\0\0\0\0", b"\0" * 4096, bytes(range(60, 160))], ids=len)
def test_what_a_crash_left_at_the_end_of_a_file_goes_on_resume(directory, tail):
    path = write_steps(directory, [1, 2, 3])
    good = path.read_bytes()
    path.write_bytes(good + tail)
    write_steps(directory, [4], resume_step=3)
    assert path.read_bytes() == good
    assert steps_of(directory) == [1, 2, 3, 4]


def test_a_record_cut_in_the_middle_goes_on_resume(directory):
    path = write_steps(directory, [1, 2, 3])
    os.truncate(path, path.stat().st_size - 3)
    write_steps(directory, [4], resume_step=3)
    assert steps_of(directory) == [1, 2, 4]


def test_files_of_others_are_left_alone(directory):
    directory.mkdir(parents=True)
    (directory / "notes.txt").write_text("mine")
    drop_steps_after(directory, 0)
    assert (directory / "notes.txt").read_text() == "mine"


def test_nan_and_infinity_are_written_as_they_are(directory):
    writer = TensorBoardWriter(directory, 0, "")
    writer.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300})
    writer.close()
    values = {tag: value for tag, [(_, value)] in read_scalars(directory).items()}
    assert math.isnan(values.pop("a"))
    assert values == {"b": math.inf, "c": -math.inf, "d": math.inf}


@contextlib.contextmanager
def files_end_at(size):
    """A disk that is full once a file has this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_warning_and_no_error_and_the_next_start_goes_on(directory, caplog):
    writer = TensorBoardWriter(directory, 0, "")
    for step in (1, 2):
        writer.write(step, {"train/loss": 1.0})
    with files_end_at(writer.path.stat().st_size + 20):
        writer.write(3, {"train/loss": 1.0})
    for step in (4, 5, 6):  # there is room again, but behind a record that was cut off nobody could read them
        writer.write(step, {"train/loss": 1.0})
    writer.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(writer.path) in caplog.text
    write_steps(directory, [7], resume_step=6)
    assert steps_of(directory) == [1, 2, 7]


def test_neither_jax_nor_an_installed_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    program = (
        "import sys, jaxtrain.telemetry.tensorboard as t; from pathlib import Path\n"
        "t.TensorBoardWriter(Path('events'), 0, '').close()\n"
        "assert 'jax' not in sys.modules and 'torch' not in sys.modules\n"
        "print('written', flush=True)\n"
        "import torch"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout == "written\n"
    assert result.stderr.strip() == "torch is imported", "by the last line, which still can"
