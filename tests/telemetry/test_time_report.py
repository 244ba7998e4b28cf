"""The tables, the file and the picture of a run's time."""

import io
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console, RenderableType

from jaxtrain.telemetry.goodput import Account, account
from jaxtrain.telemetry.returns import read_returns
from jaxtrain.telemetry.time_report import as_json, draw_time, duration, goodput_table, returns_table
from tests.telemetry.timeline import Timeline, killed_twice


def found_of(run: Timeline) -> Account:
    found = account(run.events)
    assert found is not None
    return found


def text(shown: RenderableType, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(shown)
    return console.export_text()


def test_the_table_names_each_kind_of_time_with_its_share() -> None:
    shown = text(goodput_table(found_of(killed_twice())))
    assert "goodput 32.3% of 1 min 59 s in 3 starts" in shown
    assert "productive │ 38.5 s │ 32.3%" in shown
    assert "idle       │ 12.4 s" in shown
    one = Timeline().start(0, 0).progress(16, 1, 1, 1.0)
    assert "in 1 start" in text(goodput_table(found_of(one)))
    assert "evaluating" not in text(goodput_table(found_of(one))), "what took no time is left out"


def test_the_table_of_faults_fits_a_terminal_and_tells_the_median() -> None:
    returns = read_returns(found_of(killed_twice()).attempts)
    shown = text(returns_table(returns))
    for word in ("detect", "restore", "1st step", "27.60", "22.30", "24.95"):
        assert word in shown
    many = text(returns_table(returns * 10), 120)
    assert "… 12 before" in many
    assert "median of 20" in many
    assert "median" not in text(returns_table(returns[:1]))


def test_the_file_has_the_same_numbers() -> None:
    found = found_of(killed_twice())
    written = as_json(found, read_returns(found.attempts))
    assert written["total"] == 119.1
    assert sum(written["seconds"].values()) == pytest.approx(119.1, abs=0.01)
    assert written["goodput"] == pytest.approx(written["seconds"]["productive"] / 119.1, abs=1e-4)
    assert [one["fault"] for one in written["returns"]] == ["ended without a word", "rank 1 died at step 35"]
    assert written["returns"][1]["detect"] == pytest.approx(0.3)


def test_the_picture_shows_each_kind_where_it_was(tmp_path: Path) -> None:
    draw_time(found_of(killed_twice()), "run", tmp_path / "time.png")
    pixels = matplotlib.image.imread(tmp_path / "time.png")[:, :, :3]
    middle = pixels[int(0.4 * len(pixels))]
    productive, idle = (
        np.array([int(code[at : at + 2], 16) for at in (0, 2, 4)]) / 255 for code in ("0b4f8a", "d0d0d0")
    )
    shares = [np.mean(np.abs(middle - colour).max(axis=1) < 0.02) for colour in (productive, idle)]
    assert shares[0] / shares[1] == pytest.approx(38.5 / 12.4, rel=0.1)


def test_a_run_of_many_starts_is_drawn_too(tmp_path: Path) -> None:
    run = Timeline()
    for number in range(300):
        run.start(3600 * number, 10 * number).progress(3600 * number + 18, 10 * number + 1, 1, 1.0)
        run.progress(3600 * number + 3000, 10 * number + 10, 9, 2900.0)
        run.save(3600 * number + 3001, 10 * number + 10, 1.0, 1.0)
    draw_time(found_of(run), "run", tmp_path / "time.png")
    assert (tmp_path / "time.png").stat().st_size > 10_000


def test_durations_are_told_in_units_that_fit() -> None:
    told = [duration(seconds) for seconds in (0.04, 59.9, 61, 3599, 3600, 47 * 3600, 1e6)]
    assert told == ["0.0 s", "59.9 s", "1 min 01 s", "59 min 59 s", "1 h 00 min", "47 h 00 min", "11 d 13 h"]
