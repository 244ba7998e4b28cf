import io
import math
import re

import pytest

from jaxtrain.telemetry.progress import TrainingProgress

METRICS = {"loss": 3.21041, "grad_norm": 0.8149, "learning_rate": 2e-3, "tokens": 2048, "step_seconds": 0.25}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def lines_of(steps, total, log_every, **changed):
    stream = io.StringIO()
    with TrainingProgress(total, steps[0] - 1, log_every, stream) as progress:
        for step in steps:
            progress.update({"step": step, **METRICS, **changed})
    return stream.getvalue().splitlines()


def test_a_plain_line_holds_all_that_one_watches():
    assert lines_of([120], 400, 10) == [
        "step 120/400  loss 3.2104  grad_norm 0.81  lr 2.0e-03  8,192 tokens/s  eta 0:01:10"
    ]


def test_plain_lines_come_at_the_first_step_the_last_and_each_that_log_every_divides():
    steps = [line.split()[1] for line in lines_of(range(6, 24), 23, 10)]
    assert steps == ["6/23", "10/23", "20/23", "23/23"]


def test_speed_and_time_left_are_of_the_last_20_steps():
    stream = io.StringIO()
    with TrainingProgress(1000, 0, 100, stream) as progress:
        for step in range(1, 101):
            seconds = 10.0 if step <= 80 else 0.5
            progress.update({"step": step, "loss": 1.0, "tokens": 100, "step_seconds": seconds})
    assert stream.getvalue().splitlines()[-1] == "step 100/1000  loss 1.0000  200 tokens/s  eta 0:07:30"


def test_a_loss_that_is_not_finite_is_shown_as_it_is():
    assert "loss nan" in lines_of([1], 2, 1, loss=math.nan)[0]


def test_what_was_not_measured_is_left_out():
    stream = io.StringIO()
    with TrainingProgress(2, 0, 1, stream) as progress:
        progress.update({"step": 1, "loss": 2.0, "grad_norm": None})
    assert stream.getvalue() == "step 1/2  loss 2.0000\n"


def test_messages_are_lines_of_their_own_however_long_and_bracketed():
    stream = io.StringIO()
    text = "saved [step 5] " + "x" * 200
    with TrainingProgress(2, 0, 1, stream) as progress:
        progress.message(text)
    assert stream.getvalue() == text + "\n"


def test_silence_is_complete():
    stream = io.StringIO()
    with TrainingProgress(2, 0, 1, stream, silent=True) as progress:
        progress.update({"step": 1, **METRICS})
        progress.message("saved")
    assert stream.getvalue() == ""


def test_on_a_terminal_a_bar_shows_the_newest_step_within_80_columns(terminal):
    with TrainingProgress(4000, 100, 10, terminal) as progress:
        progress.update({"step": 101, **METRICS})
        progress.message("saved [step 101]")
    lines = [re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|\r", "", line) for line in terminal.getvalue().splitlines()]
    assert "saved [step 101]" in [line.strip() for line in lines]
    bar = [line for line in lines if "eta" in line][-1]
    assert bar.startswith("step  101/4000 ")
    assert bar.rstrip().endswith("loss 3.2104  8,192 tokens/s  eta 0:16:15")
    assert len(bar) <= 80


def test_the_bar_of_a_resumed_run_starts_where_the_run_is(terminal):
    with TrainingProgress(4000, 100, 10, terminal):
        pass
    assert "100/4000" in terminal.getvalue()


def test_a_killed_program_leaves_a_terminal_with_its_cursor(terminal):
    hide_cursor = "\x1b[?25l"
    with TrainingProgress(2, 0, 1, terminal) as progress:
        progress.update({"step": 1, **METRICS})
    assert hide_cursor not in terminal.getvalue()


def test_a_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    with TrainingProgress(2, 0, 1, terminal) as progress:
        progress.update({"step": 1, "loss": 2.0})
    assert terminal.getvalue() == "step 1/2  loss 2.0000\n"
