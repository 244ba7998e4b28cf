"""A group of processes is one run: the first failure is seen and named, all start again, and none is left behind.

Real processes and real signals; what they do instead of training takes no time.
"""

import json
import signal
import socket
from pathlib import Path

import pytest

from tests.launchers.launched import PATIENCE_SECONDS, Launched, is_alive, is_stopped, wait_until

STEPS_AND_END = [["steps", 9], ["save", 9], ["exit", 0]]
HANG = [["keep_beating"], ["hang"]]


def test_a_killed_process_is_named_and_all_start_again(tmp_path: Path) -> None:
    plan = {
        "1.0": [["say", "half"], ["say", " a line\n"], ["steps", 5], ["hang"]],
        "1.1": [["child"], ["beat"], ["wait_for", "go"], ["die", "SIGKILL"]],
        "*": [["say", "second\nno end"], *STEPS_AND_END],
    }
    launched = Launched(tmp_path, plan, "--processes", "2")
    wait_until(lambda: launched.steps() == 5 and (launched.run / "child").exists())
    child = int((launched.run / "child").read_text())
    (launched.run / "go").touch()
    code, output = launched.end()
    assert code == 0, output
    (fault,) = launched.events("fault")
    expected = {"what": "died", "rank": 1, "exit_code": -9, "step": 5, "phase": "step"}
    assert {name: fault[name] for name in expected} == expected
    assert fault["seen_after"] < 5
    first, second = launched.events("launch")
    assert (first["attempt"], second["attempt"], second["processes"]) == (1, 2, 2)
    assert [event["wait"] for event in launched.events("restart")] == [0.0]
    assert not any(is_alive(pid) for pid in (*first["pids"], *second["pids"], child))
    lines = output.splitlines()
    assert "[0] half a line" in lines
    assert sorted(line for line in lines if "no end" in line) == ["[0] no end", "[1] no end"]
    assert any("rank 1 died of SIGKILL after step 5 (step)" in line for line in lines)
    assert (launched.run / "logs" / "attempt-2-rank-1.log").read_text() == "second\nno end"


def test_what_no_start_can_mend_ends_at_once_and_is_said_once(tmp_path: Path) -> None:
    launched = Launched(tmp_path, {"*": [["say", "error: no such data\n"], ["exit", 2]]}, "--processes", "3")
    code, output = launched.end()
    assert code == 2
    assert output.count("error: no such data") == 1
    assert len(launched.events("launch")) == 1


def test_the_one_whose_end_the_others_followed_from_is_named(tmp_path: Path) -> None:
    plan = {"1.0": [["exit", 8]], "1.1": [["wait_for", "events.jsonl"], ["exit", 1]], "*": STEPS_AND_END}
    launched = Launched(tmp_path, plan, "--processes", "2")
    assert launched.end()[0] == 0
    (fault,) = launched.events("fault")
    assert (fault["rank"], fault["exit_code"]) == (1, 1)


def test_a_stopped_process_is_the_cause_of_the_others_end(tmp_path: Path) -> None:
    """Its peers see that it is gone, before it has been silent for long."""
    plan = {"1.0": [["wait_for", "go"], ["exit", 8]], "1.1": [["die", "SIGSTOP"]], "*": STEPS_AND_END}
    launched = Launched(tmp_path, plan, "--processes", "2")
    stopped = launched.pids()[1]
    wait_until(lambda: is_stopped(stopped))
    (launched.run / "go").touch()
    assert launched.end()[0] == 0
    (fault,) = launched.events("fault")
    assert (fault["rank"], fault["what"]) == (1, "silent")


def test_the_same_crash_at_the_same_step_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    plan = {"*": [["steps", 4], ["save", 2], ["say", "Traceback: it is step 5\n"], ["exit", 1]]}
    launched = Launched(tmp_path, plan, "--processes", "1")
    code, output = launched.end()
    assert code == 15
    assert len(launched.events("launch")) == 3
    message = output.partition("error: ")[2]
    assert "the same crash came 3 times at the same step: rank 0 ended with exit code 1 after step 4" in message
    assert "Traceback: it is step 5" in message


def test_a_run_that_makes_no_progress_ends_when_its_restarts_are_used_up(tmp_path: Path) -> None:
    plan = {f"{attempt}.0": [["steps", attempt], ["die", "SIGKILL"]] for attempt in (1, 2, 3)}
    launched = Launched(tmp_path, plan, "--processes", "1", "--restarts", "1")
    code, output = launched.end()
    assert code == 16
    assert "1 restarts brought no new checkpoint: rank 0 died of SIGKILL after step 2" in output


def test_a_stopped_process_is_named_killed_and_started_again(tmp_path: Path) -> None:
    plan = {"1.0": HANG, "1.1": [["keep_beating"], ["steps", 2], ["die", "SIGSTOP"]], "*": STEPS_AND_END}
    launched = Launched(tmp_path, plan, "--processes", "2", "--silence", "1")
    assert launched.end()[0] == 0
    (fault,) = launched.events("fault")
    assert (fault["rank"], fault["what"], fault["exit_code"], fault["step"]) == (1, "silent", None, 2)
    assert fault["seen_after"] >= 1
    assert not any(is_alive(pid) for pid in launched.pids())


@pytest.mark.parametrize(("number", "reached"), [(signal.SIGUSR1, "SIGUSR1"), (signal.SIGHUP, "SIGTERM")])
def test_signals_reach_every_process_and_the_run_ends_as_they_do(number: int, reached: str, tmp_path: Path) -> None:
    plan = {"*": [["leave_at", reached, 75], ["steps", 1], ["say", "ready\n"], ["hang"]]}
    launched = Launched(tmp_path, plan, "--processes", "2")
    wait_until(lambda: all((log.exists() and "ready" in log.read_text()) for log in logs(launched, 2)))
    launched.signal(number)
    assert launched.end()[0] == 75
    assert launched.events("fault") == launched.events("restart") == []


def test_a_process_that_ignores_all_signals_is_killed_at_the_third(tmp_path: Path) -> None:
    plan = {"*": [["ignore", "SIGINT", "SIGTERM"], ["say", "ready\n"], ["hang"]]}
    launched = Launched(tmp_path, plan, "--processes", "2")
    wait_until(lambda: all((log.exists() and "ready" in log.read_text()) for log in logs(launched, 2)))
    for count in (1, 2, 3):
        launched.signal(signal.SIGINT)
        if count < 3:
            assert launched.process.stdout is not None
            for line in launched.process.stdout:
                if "SIGINT is passed on" in line:
                    break
    assert launched.end()[0] == 130
    assert not any(is_alive(pid) for pid in launched.pids())


def test_no_process_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    launched = Launched(tmp_path, {"*": [["ignore", "SIGTERM", "SIGHUP"], ["steps", 1], ["hang"]]}, "--processes", "2",
                        "--spares", "1")  # fmt: skip
    pids = launched.pids()
    wait_until((launched.run / "logs" / "spares.log").exists)
    launched.signal(signal.SIGKILL)
    launched.end()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))
    again = Launched(tmp_path, {"*": STEPS_AND_END}, "--processes", "2")
    assert again.end()[0] == 0, "what it held is free"


def test_ctrl_c_while_it_waits_to_start_again_ends_it(tmp_path: Path) -> None:
    plan = {f"{attempt}.0": [["steps", attempt], ["die", "SIGKILL"]] for attempt in range(1, 9)}
    launched = Launched(tmp_path, plan, "--processes", "1")
    wait_until(lambda: any(event["wait"] > 2 for event in launched.events("restart")))
    launched.signal(signal.SIGINT)
    code, _ = launched.end()
    assert code == 130
    assert launched.events("restart")[-1]["attempt"] == len(launched.events("launch")) + 1


def test_what_an_earlier_launch_has_shown_is_not_shown_again(tmp_path: Path) -> None:
    for word in ("first", "second"):
        code, output = Launched(tmp_path, {"*": [["say", f"{word}\n"], ["exit", 75]]}, "--processes", "1").end()
        assert code == 75
        assert [line for line in output.splitlines() if not line.startswith("launch: ")] == [word]


def test_a_second_supervisor_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    plan = {"*": [["wait_for", "go"], *STEPS_AND_END]}
    first = Launched(tmp_path, plan, "--processes", "1")
    first.pids()
    code, output = Launched(tmp_path, plan, "--processes", "1").end()
    assert code == 2
    assert f"another supervisor runs it ({json.dumps({'pid': first.process.pid})[:-1]}" in output
    (first.run / "go").touch()
    assert first.end()[0] == 0


def test_neither_a_flood_nor_logs_that_cannot_be_written_stop_a_run(tmp_path: Path) -> None:
    flood = {"*": [["say", "x" * 1_000_000 + "\n"] for _ in range(40)] + STEPS_AND_END}
    launched = Launched(tmp_path, flood, "--processes", "2")
    assert launched.end()[0] == 0
    assert (launched.run / "logs" / "attempt-1-rank-1.log").stat().st_size == 40_000_040
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "run").mkdir()
    (tmp_path / "full" / "run" / "logs").touch()
    unwritten = Launched(tmp_path / "full", {"1.1": [["exit", 1]], "*": STEPS_AND_END}, "--processes", "2")
    code, output = unwritten.end()
    assert code == 0, output
    unwritten = Launched(tmp_path / "full", {"*": [["exit", 2]]}, "--processes", "1")
    code, output = unwritten.end()
    assert code == 2
    assert f"exit code 2, and may not have said why: {unwritten.run / 'logs'}: Not a directory" in output


@pytest.mark.slow
def test_a_terminal_that_is_stuck_holds_up_neither_a_restart_nor_the_end(tmp_path: Path) -> None:
    flood = [["say", "x" * 99 + "\n"]] * 2000
    plan = {"1.0": [*flood, ["steps", 1], ["die", "SIGKILL"]], "*": [["steps", 2], ["exit", 0]]}
    launched = Launched(tmp_path, plan, "--processes", "1")
    assert launched.process.wait(PATIENCE_SECONDS) == 0, "nobody has read what it shows"
    assert launched.steps() == 2


def test_a_bad_slot_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """Rank 1 of three is excluded: two go on with the whole batch, and three once the line is gone."""
    entry = [{"host": socket.gethostname(), "rank": 1, "reason": "wrong checksum"}]
    plan = {
        "1.0": [["steps", 3], ["save", 3], ["exclude", entry], ["exit", 14]],
        "1.1": [["exit", 14]], "1.2": [["exit", 14]],
        "2.0": [["arguments"], ["steps", 5], ["save", 5], ["exclude", []], ["die", "SIGKILL"]],
        "2.1": [["hang"]],
        "*": [["arguments"], *STEPS_AND_END],
    }  # fmt: skip
    launched = Launched(tmp_path, plan, "--processes", "3", "--elastic", "2")
    code, output = launched.end()
    assert code == 0, output
    assert [event["slots"] for event in launched.events("launch")] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert "microbatch=3" in (launched.run / "logs" / "attempt-2-rank-0.log").read_text()
    assert "microbatch" not in (launched.run / "logs" / "attempt-3-rank-0.log").read_text()
    assert "slot 1 is excluded: wrong checksum" in output


def test_a_spare_takes_the_place_of_a_bad_slot(tmp_path: Path) -> None:
    entry = [{"host": socket.gethostname(), "rank": 0, "reason": "slow"}]
    plan = {
        "1.0": [["steps", 3], ["wait_for", "go"], ["exclude", entry], ["exit", 14]],
        "1.1": [["wait_for", "go"], ["exit", 14]],
        "*": STEPS_AND_END,
    }
    launched = Launched(tmp_path, plan, "--processes", "2", "--spares", "1")
    wait_until((launched.run / "logs" / "spares.log").exists)
    (launched.run / "go").touch()
    code, output = launched.end()
    assert code == 0, output
    first, second = launched.events("launch")
    assert (first["slots"], first["warm"]) == ([0, 1], 0)
    assert (second["slots"], second["warm"]) == ([1, 2], 1)


@pytest.mark.parametrize(
    ("entries", "words"),
    [([{"rank": 1, "reason": "slow"}], "1 slots are left and 2 are needed"), ([], "doesn't say which rank")],
)
def test_without_a_slot_in_reserve_a_bad_host_ends_the_run(
    entries: list[dict[str, object]], words: str, tmp_path: Path
) -> None:
    plan = {"1.0": [["exclude", entries], ["exit", 14]], "1.1": [["exit", 14]]}
    code, output = Launched(tmp_path, plan, "--processes", "2").end()
    assert code == 14
    assert words in output


def test_a_slot_that_fails_to_start_twice_is_left_out_of_one_start(tmp_path: Path) -> None:
    wait = [["wait_for", "never"]]
    plan = {
        "1.0": wait, "1.1": [["exit", 1]], "1.2": wait,
        "2.0": wait, "2.1": [["exit", 9]], "2.2": wait,
        "3.0": [["steps", 2], ["exit", 1]], "3.1": wait,
        "*": STEPS_AND_END,
    }  # fmt: skip
    launched = Launched(tmp_path, plan, "--processes", "3", "--elastic", "1")
    code, output = launched.end()
    assert code == 0, output
    assert [event["slots"] for event in launched.events("launch")] == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 1, 2]]
    assert [event["processes"] for event in launched.events("restart")] == [3, 2, 3]


def test_the_rank_that_a_watchdog_blames_is_named(tmp_path: Path) -> None:
    plan = {"1.0": [["blame", 1, 11], ["exit", 11]], "1.1": [["hang"]], "*": STEPS_AND_END}
    launched = Launched(tmp_path, plan, "--processes", "2")
    assert launched.end()[0] == 0
    told = [event for event in launched.events("fault") if event["process"] == -1]
    assert [(event["rank"], event["exit_code"], event["step"], event["phase"]) for event in told] == [
        (1, 11, 7, "data")
    ]


def test_a_later_start_goes_on_with_the_time_that_is_left(tmp_path: Path) -> None:
    plan = {f"{attempt}.0": [["arguments"], ["steps", attempt], ["die", "SIGKILL"]] for attempt in range(1, 11)}
    launched = Launched(tmp_path, plan, "--processes", "1", config_lines="resume: false\nmax_hours: 0.002\n")
    code, output = launched.end()
    assert code == 75, output
    assert "max_hours=0.002 have passed" in output
    assert "resume" not in logs(launched, 1)[0].read_text()
    told = (launched.run / "logs" / "attempt-2-rank-0.log").read_text()
    assert "resume=true max_hours=0.00" in told


def logs(launched: Launched, count: int) -> list[Path]:
    return [launched.run / "logs" / f"attempt-1-rank-{rank}.log" for rank in range(count)]
