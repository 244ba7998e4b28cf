"""Bad nodes in real runs: named by what is bad, excluded where the policy says so; slow data are no device's fault."""

import json
from pathlib import Path

import pytest

from jaxtrain.errors import BadHostError
from jaxtrain.resilience import probe
from jaxtrain.telemetry.run_files import read_run
from jaxtrain.telemetry.timeline import PARTS
from jaxtrain.telemetry.timeline_picture import who_is_behind
from tests.faults import with_a_wrong_bit
from tests.runs import (
    STRAIGHT,
    Straight,
    checkpoint_steps,
    events,
    run_here,
    step_losses,
    tiny_config,
    train_group,
    write_tiny,
)

FAULTS = ("-m", "tests.faults")
PROBED, STOPPED = (["health.share=1", f"health.policy={policy}"] for policy in ("warn", "stop"))


def test_silent_corruption_stops_a_run_that_is_saved(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["mesh.data=8", "checkpoint.every=0", "steps=3000", "optimizer.schedule.kind=constant"]
    config = tiny_config(tmp_path, tiny_data, *overrides, *STOPPED)
    with monkeypatch.context() as patch:
        patch.setattr(probe, "_run", with_a_wrong_bit(process=0, first=1))
        with pytest.raises(BadHostError, match=r"stopped at step \d+ of 3000, and saved: a host is bad"):
            run_here(config, devices=8)
    (entry,) = json.loads((config.run_dir / "excluded.json").read_text())
    (found,) = events(config.run_dir, "health")
    (stop,) = events(config.run_dir, "stop")
    assert (entry["rank"], entry["device"]) == (0, "cpu:7")
    assert entry["step"] in (5, 10, 20, 40, 80), "the first probe after the start's"
    assert (found["what"], found["device"], found["action"], found["detail"]) == (
        "checksum", "cpu:7", "stop", entry["reason"],
    )  # fmt: skip
    assert "its float32 product" in entry["reason"]
    assert stop["exit_code"] == 14
    assert checkpoint_steps(config.run_dir) == [stop["step"]]
    assert stop["step"] >= entry["step"]


def test_probes_change_no_loss_and_a_run_without_faults_names_nobody(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, *PROBED, "health.every=1", "health.patience=32")
    run_here(config)
    assert step_losses(config.run_dir) == step_losses(straight("one device"))
    assert events(config.run_dir, "health") == []
    ((_, steps),) = read_run(config.run_dir).timeline.values()
    assert [line["step"] for line in steps] == list(range(1, 11))
    assert "probe_seconds" in steps[0]
    assert sum("probe" in line for line in steps) >= 1
    assert all(line[part] >= 0 for line in steps for part in PARTS)


@pytest.mark.slow
def test_a_corrupt_device_of_another_process_ends_all_at_the_same_saved_step(tmp_path: Path, tiny_data: Path) -> None:
    overrides = ["mesh.data=2", "steps=100000", "checkpoint.every=0", "optimizer.schedule.kind=constant"]
    arguments = ["wrong-bit=1@2", str(write_tiny(tmp_path, tiny_data)), *overrides, *STOPPED]
    results = train_group(arguments, program=FAULTS, devices=1)
    assert [code for code, _ in results] == [14, 14], results
    run_dir = tmp_path / "run"
    (entry,) = json.loads((run_dir / "excluded.json").read_text())
    (stop,) = events(run_dir, "stop")
    assert (entry["rank"], stop["exit_code"]) == (1, 14)
    assert 10 <= entry["step"] <= stop["step"], "the third probe, and the end soon after"
    assert checkpoint_steps(run_dir) == [stop["step"]]
    for _, output in results:
        assert f"error: stopped at step {stop['step']} of 100000, and saved: a host is bad" in output
        assert "Traceback" not in output


@pytest.mark.slow
def test_a_slow_device_and_a_slow_input_are_each_named_as_what_they_are(tmp_path: Path, tiny_data: Path) -> None:
    """Rank 0 has a slow device, rank 1 a slow input: each waits for the other in every step."""
    overrides = ["mesh.data=2", "steps=40", "checkpoint.every=0"]
    arguments = ["slow=0@2,1", str(write_tiny(tmp_path, tiny_data)), *overrides, *PROBED]
    results = train_group(arguments, program=FAULTS, devices=1)
    assert [code for code, _ in results] == [0, 0], results
    found = {(event["what"], event["rank"]): event for event in events(tmp_path / "run", "health")}
    assert set(found) == {("slow", 0), ("data", 1)}
    slow, data = found["slow", 0], found["data", 1]
    assert (slow["device"], slow["score"], slow["action"]) == ("cpu:0", 0.3, "warn")
    assert slow["step"] <= 10 + 50
    assert (data["device"], data["action"]) == (None, "warn")
    assert not (tmp_path / "run" / "excluded.json").exists()
    run = read_run(tmp_path / "run")
    assert list(run.timeline) == [0, 1]
    behind = who_is_behind(run.timeline)
    assert behind["waits longest for data"].startswith("rank 1 ")
    assert behind["slowest device"].startswith("rank 0 ")
