import logging
import re
import subprocess
import sys

import pytest

from jaxtrain.telemetry.log import close_log, open_log


@pytest.fixture(autouse=True)
def closed_afterwards():
    yield
    close_log()


def test_lines_carry_time_level_and_source(tmp_path):
    open_log(tmp_path, 2).info("hello")
    logging.getLogger("orbax").info("from a library")
    lines = (tmp_path / "logs" / "process-2.log").read_text().splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf"{time} INFO jaxtrain: hello", lines[0])
    assert re.fullmatch(rf"{time} INFO orbax: from a library", lines[1])


def test_a_warning_shows_once_on_stderr_and_each_time_in_the_file(tmp_path, capsys):
    log = open_log(tmp_path, 0)
    for _ in range(3):
        log.warning("%s is slow", "disk")
    log.info("not for people")
    assert capsys.readouterr().err == "WARNING: disk is slow\n"
    assert (tmp_path / "logs" / "process-0.log").read_text().count("disk is slow") == 3


def test_other_processes_leave_warnings_to_the_first_but_show_errors(tmp_path, capsys):
    log = open_log(tmp_path, 1)
    log.warning("seen by all")
    log.error("only mine")
    assert capsys.readouterr().err == "ERROR: only mine\n"


def test_warnings_of_python_reach_the_file(tmp_path):
    run_alone("import warnings; warnings.warn('an odd thing')", tmp_path)
    assert "UserWarning: an odd thing" in (tmp_path / "logs" / "process-0.log").read_text()


def test_a_traceback_is_kept(tmp_path):
    log = open_log(tmp_path, 0)
    try:
        raise MemoryError("out of memory in step 3")
    except MemoryError:
        log.exception("crashed")
    text = (tmp_path / "logs" / "process-0.log").read_text()
    assert "Traceback" in text
    assert "MemoryError: out of memory in step 3" in text


def test_a_restart_appends(tmp_path):
    for number in range(2):
        open_log(tmp_path, 0).info("start %d", number)
    text = (tmp_path / "logs" / "process-0.log").read_text()
    assert "start 0" in text
    assert text.count("start 1") == 1


def test_closing_gives_the_root_logger_back(tmp_path):
    before = list(logging.getLogger().handlers)
    open_log(tmp_path, 0)
    assert logging.getLogger().handlers != before
    close_log()
    assert logging.getLogger().handlers == before


def test_nothing_is_said_twice_in_a_program_of_its_own(tmp_path):
    assert run_alone("log.warning('once')", tmp_path) == "WARNING: once\n"


def run_alone(statement, run_dir):
    """What a program says on stderr that opens the log as `log`, and that no pytest plugin listens to."""
    program = (
        "from pathlib import Path; from jaxtrain.telemetry.log import open_log\n"
        f"log = open_log(Path({str(run_dir)!r}), 0); {statement}"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr


def test_stderr_shows_an_error_without_its_traceback(tmp_path, capsys):
    log = open_log(tmp_path, 0)
    try:
        raise MemoryError("out of memory")
    except MemoryError:
        log.exception("crashed")
    assert capsys.readouterr().err == "ERROR: crashed\n"


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "process-0.log").symlink_to("/dev/full")
    log = open_log(tmp_path, 0)
    log.info("one")
    log.info("two")
    close_log()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"WARNING: {tmp_path / 'logs' / 'process-0.log'}: can't be written")
