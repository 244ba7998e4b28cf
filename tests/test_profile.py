"""The profiler's window: exactly these steps are traced, each process has its own file, and nothing else changes."""

import re
from collections import Counter
from pathlib import Path

import jax
import pytest

from jaxtrain.data import RowTable
from jaxtrain.errors import ConfigError
from jaxtrain.telemetry.jsonl import read
from tests.faults import with_nan_row
from tests.runs import (
    STRAIGHT,
    Straight,
    checkpoint_meta,
    crash_after,
    events,
    run_here,
    step_losses,
    stopped_copy,
    tiny_config,
    train_group,
    write_tiny,
)


def traces(run_dir: Path, process: int = 0) -> list[Path]:
    """The traces that a process wrote."""
    return sorted((run_dir / "profile" / f"process-{process}").glob("plugins/profile/*/*.xplane.pb"))


def traced_steps(trace: Path) -> list[int]:
    """The numbers of the steps that a trace marks, in the order in which they began."""
    marks = [
        (event.start_ns, dict(event.stats)["step_num"])
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    return [step for _, step in sorted(marks)]


def executed(trace: Path) -> list[int]:
    """How often each of the compiled programs' operations ran while the trace was taken."""
    names = Counter(
        event.name
        for plane in jax.profiler.ProfileData.from_file(str(trace)).planes
        for line in plane.lines
        for event in line.events
        if re.fullmatch(r"(dot|broadcast|\w*fusion)(\.\d+)?", event.name)
    )
    return list(names.values())


def test_exactly_the_steps_of_the_window_are_traced_and_no_number_changes(
    straight: Straight, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(
        tmp_path, tiny_data, *STRAIGHT, "profile={start: 7, steps: 3}", "eval.every=5", "checkpoint.every=10"
    )
    run_here(config)
    (trace,) = traces(config.run_dir)
    assert traced_steps(trace) == [7, 8, 9]
    counts = executed(trace)
    assert len(counts) > 20
    assert all(count % 3 == 0 for count in counts), "every operation of three steps, whole"
    assert trace.with_name(trace.name.replace(".xplane.pb", ".trace.json.gz")).exists(), "for Perfetto"
    assert [(event["first"], event["last"]) for event in events(config.run_dir, "profile")] == [(7, 9)]
    assert f"steps 7 to 9 are traced in {config.run_dir / 'profile' / 'process-0'}; open" in capsys.readouterr().out
    assert step_losses(config.run_dir) == step_losses(straight("one device"))
    ours, theirs = (checkpoint_meta(path, 10)["checksums"] for path in (config.run_dir, straight("one device")))
    assert ours == theirs


def test_a_run_that_goes_on_behind_the_window_traces_nothing(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path)
    run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT, "profile={start: 3, steps: 3}"))
    assert max(step_losses(run_dir)) == 10
    assert not (run_dir / "profile").exists()
    assert events(run_dir, "profile") == []


def test_a_run_that_goes_on_in_the_window_traces_the_rest_of_it_to_the_last_step(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path)
    run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT, "profile={start: 4, steps: 7}"))
    (trace,) = traces(run_dir)
    assert traced_steps(trace) == [6, 7, 8, 9, 10]
    assert [(event["first"], event["last"]) for event in events(run_dir, "profile")] == [(6, 10)]


def test_what_was_traced_until_a_crash_is_written(tmp_path: Path, tiny_data: Path) -> None:
    """And a window from the first step on."""
    config = tiny_config(tmp_path, tiny_data, "profile={start: 1, steps: 9}")
    with crash_after(3):
        run_here(config)
    (trace,) = traces(config.run_dir)
    assert traced_steps(trace) == [1, 2, 3, 4], "the fourth was dispatched before the third was read"
    run_here(config)
    assert traced_steps(traces(config.run_dir)[-1]) == [*range(1, 10)]


def test_a_window_with_a_skipped_update_ends_with_its_last_step_all_the_same(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["data.pack=false", "data.epochs=2", "data.shuffle=false", "non_finite=skip", "steps=6", "eval.every=2"]
    config = tiny_config(tmp_path, tiny_data, *overrides, "profile={start: 2, steps: 2}")
    monkeypatch.setattr(RowTable, "assemble", with_nan_row(2 * 8))
    run_here(config)
    assert [event["step"] for event in events(config.run_dir, "skip")] == [3]
    (trace,) = traces(config.run_dir)
    assert traced_steps(trace) == [2, 3, 3]


@pytest.mark.parametrize("start", [9, 11])
def test_a_window_beyond_the_end_of_the_run_is_refused(start: int, tmp_path: Path, tiny_data: Path) -> None:
    says = (
        f"profile.start={start} .* up to step {start + 2}, but the run ends at step 10; profile.start may be at most 8"
    )
    with pytest.raises(ConfigError, match=says):
        tiny_config(tmp_path, tiny_data, f"profile.start={start}")
    assert tiny_config(tmp_path, tiny_data, "profile.start=8").profile.start == 8


def test_a_window_beyond_the_end_of_the_data_is_refused_before_anything_is_written(
    tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, "steps=null", "data.epochs=1", "data.pack=false", "profile.start=6")
    with pytest.raises(ConfigError, match=r"up to step 8, but the run ends at step 7; profile.start may be at most 5"):
        run_here(config)
    assert not config.run_dir.exists()


def test_a_trace_that_cannot_be_written_is_a_warning_and_the_run_goes_on(
    tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, tiny_data, "profile.start=2")
    config.run_dir.mkdir()
    (config.run_dir / "profile").touch()
    run_here(config)
    assert max(step_losses(config.run_dir)) == 10
    assert "process-0: no profile could be taken" in caplog.text
    assert events(config.run_dir, "profile") == []


@pytest.mark.slow
def test_each_of_two_processes_writes_its_own_trace_of_the_same_steps(tmp_path: Path, tiny_data: Path) -> None:
    arguments = [
        str(write_tiny(tmp_path, tiny_data)),
        "mesh.fsdp=8",
        "profile={start: 4, steps: 2}",
        "telemetry.norms_every=5",
    ]
    results = train_group(arguments, timeout=150)
    assert [code for code, _ in results] == [0, 0], results
    for process in (0, 1):
        (trace,) = traces(tmp_path / "run", process)
        assert traced_steps(trace) == [4, 5]
    assert len(events(tmp_path / "run", "profile")) == 1
    assert [line["step"] for line in read(tmp_path / "run" / "norms.jsonl")] == [5, 10], "of process 0 alone"
