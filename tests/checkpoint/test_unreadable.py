"""Which checkpoint is the newest good one: broken ones are passed over with a warning, never taken as absent."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from jaxtrain.errors import CheckpointError
from tests.runs import (
    STRAIGHT,
    Straight,
    checkpoint_meta,
    checkpoint_steps,
    content,
    crash_after,
    events,
    run_here,
    step_losses,
    stopped_copy,
    tiny_config,
)


def array_files(checkpoint: Path) -> list[Path]:
    """The files that hold the arrays' bytes."""
    return sorted(path for path in (checkpoint / "state" / "d").iterdir() if path.is_file())


def delete_array(checkpoint: Path) -> None:
    max(array_files(checkpoint), key=lambda path: path.stat().st_size).unlink()


def truncate_array(checkpoint: Path) -> None:
    largest = max(array_files(checkpoint), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def flip_bytes(checkpoint: Path) -> None:
    largest = max(array_files(checkpoint), key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)


def tear_description(checkpoint: Path) -> None:
    (checkpoint / "meta" / "metadata").write_text('{"step": ')


DAMAGES = {
    "deleted": delete_array,
    "truncated": truncate_array,
    "flipped": flip_bytes,
    "description": tear_description,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_run_falls_back_to_the_newest_readable_checkpoint_with_a_warning(
    damage: str, straight: Straight, tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path, step=10)
    DAMAGES[damage](run_dir / "checkpoints" / "10")
    with caplog.at_level(logging.WARNING):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    assert [event["step"] for event in events(run_dir, "restore")] == [5]
    assert [record for record in caplog.records if "checkpoints/10 can't be read" in record.getMessage()]
    assert checkpoint_steps(run_dir) == [5, 10]
    assert checkpoint_meta(run_dir, 10)["checksums"] == checkpoint_meta(straight("one device"), 10)["checksums"]
    assert (run_dir / "checkpoints" / "10.unreadable").is_dir(), "nothing is thrown away"
    assert step_losses(run_dir) == step_losses(straight("one device"))


def test_content_that_changed_behind_orbaxs_back_is_caught_by_the_checksum(
    straight: Straight, tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 10's description over step 5's arrays: everything reads, but it isn't what was saved."""
    run_dir = stopped_copy(straight("one device"), tmp_path, step=10)
    newest = run_dir / "checkpoints" / "10" / "state"
    shutil.rmtree(newest)
    shutil.copytree(run_dir / "checkpoints" / "5" / "state", newest)
    with caplog.at_level(logging.WARNING):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    assert [record for record in caplog.records if "differs from its checksum" in record.getMessage()]
    assert [event["step"] for event in events(run_dir, "restore")] == [5]


@pytest.mark.parametrize("start", [1, 2])
def test_with_no_readable_checkpoint_every_start_stops_and_touches_no_number(
    start: int, straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path, step=10)
    delete_array(run_dir / "checkpoints" / "5")
    tear_description(run_dir / "checkpoints" / "10")
    before = content(run_dir / "checkpoints"), step_losses(run_dir)
    for _ in range(start):
        with pytest.raises(CheckpointError, match=r"none of the checkpoints that are there can be read \(10, 5\)"):
            run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    assert (content(run_dir / "checkpoints"), step_losses(run_dir)) == before
    assert events(run_dir, "stop")[-1]["exit_code"] == 4


def test_only_an_incomplete_checkpoint_is_not_taken_as_none(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path)
    shutil.rmtree(run_dir / "checkpoints" / "5" / "state")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints that are there can be read \(5\)"):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))


def test_entries_that_are_no_checkpoints_are_named_and_passed_over(
    straight: Straight, tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path)
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "7").mkdir()
    shutil.copytree(checkpoints / "5", checkpoints / "8")
    (checkpoints / "8" / "_CHECKPOINT_METADATA").unlink()
    shutil.copytree(checkpoints / "5", checkpoints / "9.orbax-checkpoint-tmp-0")
    with caplog.at_level(logging.WARNING):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    assert [event["step"] for event in events(run_dir, "restore")] == [5]
    warned = [record.getMessage() for record in caplog.records]
    for name in ("checkpoints/7 is not", "checkpoints/8 is not", "checkpoints/9.orbax-checkpoint-tmp-0 is left over"):
        assert [text for text in warned if name in text], name
    assert checkpoint_steps(run_dir) == [5, 10]


def test_a_final_step_that_is_also_a_periodic_one_is_saved_once(straight: Straight) -> None:
    assert [event["step"] for event in events(straight("one device"), "save")] == [5, 10]
    assert sorted(path.name for path in (straight("one device") / "checkpoints").iterdir()) == ["10", "5"]


def test_a_left_over_temporary_directory_does_not_stop_the_final_save(
    straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path)
    for name in ("10.orbax-checkpoint-tmp-0", "10.orbax-checkpoint-tmp"):
        shutil.copytree(run_dir / "checkpoints" / "5", run_dir / "checkpoints" / name)
    run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["10", "5"]


def test_a_save_that_runs_when_the_run_dies_with_an_error_is_finished(tmp_path: Path, tiny_data: Path) -> None:
    config = tiny_config(tmp_path, tiny_data, "checkpoint.every=3")
    with crash_after(4):
        run_here(config)
    assert checkpoint_steps(config.run_dir) == [3]
    assert [event["step"] for event in events(config.run_dir, "save")] == [3]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 7),
        ("step", "5"),
        ("position", -3),
        ("position", None),
        ("skipped", "x"),
        ("config", []),
        ("data_hash", 3),
        ("checksums", []),
    ],
)
def test_a_description_that_makes_no_sense_is_unreadable_and_no_crash(
    name: str, value: object, straight: Straight, tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path)
    description = run_dir / "checkpoints" / "5" / "meta" / "metadata"
    description.write_text(json.dumps(json.loads(description.read_text()) | {name: value}))
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        run_here(tiny_config(tmp_path, tiny_data, *STRAIGHT))
    assert "its description is" in caplog.text
    assert checkpoint_steps(run_dir) == [5]
