"""Logs of several ranks shown as one."""

import io
import threading
from pathlib import Path

import pytest

from jaxtrain.launchers import view
from jaxtrain.launchers.view import View, last_lines


def test_lines_stay_whole_and_carry_their_rank(tmp_path: Path) -> None:
    shown, logs = io.StringIO(), [tmp_path / "0", tmp_path / "1"]
    for log in logs:
        log.touch()
    seen = View(shown)
    seen.watch(logs)
    with logs[0].open("a") as first, logs[1].open("a") as second:
        for file, text in (
            (first, "a be"),
            (second, "other\nhal"),
            (first, "ginning\n"),
            (second, "f"),
            (first, "é…\n"),
        ):
            file.write(text)
            file.flush()
    seen.settle()
    seen.say("all ended")
    seen.close()
    lines = shown.getvalue().splitlines()
    assert [line for line in lines if line.startswith("[0]")] == ["[0] a beginning", "[0] é…"]
    assert [line for line in lines if line.startswith("[1]")] == ["[1] other", "[1] half"]
    assert lines[-1] == "launch: all ended"


def test_one_rank_alone_is_shown_as_it_is(tmp_path: Path) -> None:
    shown, log = io.StringIO(), tmp_path / "0"
    log.write_bytes(b"step 1\n\xff\n")
    seen = View(shown)
    seen.watch([log], prefixed=False)
    seen.close()
    assert shown.getvalue() == "step 1\n\N{REPLACEMENT CHARACTER}\n"


def test_of_a_flood_the_end_is_shown_and_where_the_rest_is(tmp_path: Path) -> None:
    shown, log = io.StringIO(), tmp_path / "0"
    log.write_bytes(b"0123456\n" * (view.MOST_BEHIND // 4) + b"the end\n")
    seen = View(shown)
    seen.watch([log])
    seen.close()
    assert f"bytes are only in {log})" in shown.getvalue()
    assert shown.getvalue().endswith("[0] the end\n")
    assert len(shown.getvalue()) < 2 * view.MOST_BEHIND


def test_a_line_without_an_end_is_shown_in_pieces(tmp_path: Path) -> None:
    shown, log = io.StringIO(), tmp_path / "0"
    log.write_bytes(b"x" * (3 * view.MOST_BYTES_AT_ONCE))
    seen = View(shown)
    seen.watch([log])
    seen.close()
    assert [len(line) for line in shown.getvalue().splitlines()] == [view.MOST_BYTES_AT_ONCE + len("[0] ")] * 3


def test_a_terminal_that_is_stuck_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "PATIENCE_SECONDS", 0.1)
    going_on, stuck = threading.Event(), threading.Event()

    class Terminal(io.StringIO):
        def write(self, text: str, /) -> int:
            stuck.set()
            going_on.wait()
            return super().write(text)

    logs = [tmp_path / "first", tmp_path / "second"]
    for log in logs:
        log.write_text(f"{log.name}\n")
    shown = Terminal()
    seen = View(shown)
    seen.watch(logs[:1], prefixed=False)
    stuck.wait()
    seen.settle()
    starting_again = threading.Thread(target=seen.watch, args=(logs[1:],), kwargs={"prefixed": False}, daemon=True)
    starting_again.start()
    starting_again.join(10)
    assert not starting_again.is_alive()
    monkeypatch.undo()
    going_on.set()
    seen.close()
    assert shown.getvalue() == "first\nsecond\n"


def test_the_end_of_a_log_is_found(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(map(str, range(100000))))
    assert last_lines(tmp_path / "log", 3) == "99997\n99998\n99999"
    assert last_lines(tmp_path / "none") == ""
