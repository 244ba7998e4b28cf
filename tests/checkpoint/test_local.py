"""The tier on hosts' own disks: the newest whole step of either tier is taken, a lost disk costs nothing."""

import functools
import json
import logging
import os
import shutil
import socket
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import Meta
from jaxtrain.checkpoint.exchange import Exchange
from jaxtrain.checkpoint.local import keeper
from jaxtrain.checkpoint.meta import Unreadable
from jaxtrain.checkpoint.shards import copy_pieces, place_pieces, read_part, write_part
from tests.runs import (
    STRAIGHT,
    Straight,
    checkpoint_meta,
    checkpoint_steps,
    crash_after,
    events,
    kill_when,
    row_log,
    run_here,
    start_each,
    step_losses,
    tiny_config,
    train_each,
    train_group,
    write_tiny,
)

META = Meta(step=3, position=24, skipped=0, config={"steps": 10}, data_hash="abc")


def local(folder: Path, *more: str) -> list[str]:
    """A run that saves every 3 steps to its host's own disk, every 5 to the other one."""
    return [*STRAIGHT, f"checkpoint.local={{dir: {folder / 'disk'}, every: 3}}", *more]


def parts(disk: Path) -> list[Path]:
    """By step; a folder may go while it is looked at."""
    found = [Path(folder) / name for folder, _, names in os.walk(disk) for name in names if name.endswith(".npz")]
    return sorted(found, key=lambda path: int(path.parent.name))


def restores(run_dir: Path) -> list[tuple[int, str]]:
    return [(event["step"], event["tier"]) for event in events(run_dir, "restore")]


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8"])
def test_a_run_goes_on_from_the_newest_step_of_either_tier(
    mesh: str, straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    devices = 8 if "8" in mesh else 1
    more = [mesh.replace("fsdp", "mesh.fsdp")] if devices > 1 else []
    config = tiny_config(tmp_path, tiny_data, *local(tmp_path, *more))
    with crash_after(8):
        run_here(config, devices)
    assert [path.parent.name for path in parts(tmp_path / "disk")] == ["3", "6"]
    run_here(config, devices)
    assert restores(config.run_dir) == [(6, "local")]
    assert step_losses(config.run_dir) == step_losses(straight(mesh))
    ours, theirs = (checkpoint_meta(path, 10) for path in (config.run_dir, straight(mesh)))
    assert ours["checksums"] == theirs["checksums"]
    assert parts(tmp_path / "disk") == [], "useless beside the last checkpoint"
    assert checkpoint_steps(config.run_dir) == [5, 10]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, alter, os.remove])
def test_a_damaged_part_is_noticed_and_the_other_tier_used(
    damage: Callable[[Path], None], tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, tiny_data, *local(tmp_path))
    with crash_after(8):
        run_here(config)
    damage(parts(tmp_path / "disk")[-1])
    with caplog.at_level(logging.WARNING), crash_after(9):
        run_here(config)
    assert restores(config.run_dir) == [(5, "durable")]
    if damage is not os.remove:
        assert "checkpoint 6 on the hosts' own disks can't be read and is not used: " in caplog.text


def test_a_step_that_the_run_left_behind_is_never_gone_back_to(tmp_path: Path, tiny_data: Path) -> None:
    """After a damaged local step 6, the run went on from 5: what lies there of later steps is of another time."""
    config = tiny_config(tmp_path, tiny_data, *local(tmp_path))
    with crash_after(8):
        run_here(config)
    alter(parts(tmp_path / "disk")[-1])
    with crash_after(6):
        run_here(config)
    assert restores(config.run_dir) == [(5, "durable")]
    assert [path.parent.name for path in parts(tmp_path / "disk")] == ["3"], "killed before step 6 was saved anew"


def test_another_mesh_uses_the_other_tier_and_says_so(
    tmp_path: Path, tiny_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with crash_after(8):
        run_here(tiny_config(tmp_path, tiny_data, *local(tmp_path, "mesh.fsdp=8")), 8)
    config = tiny_config(tmp_path, tiny_data, *local(tmp_path, "mesh.fsdp=4"))
    with caplog.at_level(logging.WARNING):
        run_here(config, 4)
    assert restores(config.run_dir) == [(5, "durable")]
    assert "it was saved on another mesh (" in caplog.text


def test_a_run_begun_anew_in_the_same_place_finds_nothing(
    straight: Straight, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, tiny_data, *local(tmp_path))
    with crash_after(4):
        run_here(config)
    shutil.rmtree(config.run_dir)
    run_here(config)
    assert restores(config.run_dir) == []
    assert step_losses(config.run_dir) == step_losses(straight("one device"))
    assert "is one disk for all processes: if it is lost, so are all checkpoints on it" in capsys.readouterr().out


def test_a_part_comes_back_in_every_type_and_shape(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("a",), ()))
    state = {
        "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), split),
        "half": (jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), split), jax.device_put(jnp.int32(7), whole)),
        "flag": jax.device_put(jnp.bool_(True), whole),
    }
    pieces = copy_pieces(state)
    assert len(pieces) == 4 + 4 + 1 + 1, "each piece once, though two or eight devices hold it"
    write_part(tmp_path / "3" / "0-of-1.npz", pieces, META)
    assert [path.name for path in (tmp_path / "3").iterdir()] == ["0-of-1.npz"]
    meta, read = read_part(tmp_path / "3" / "0-of-1.npz")
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    restored = place_pieces(read, abstract)
    assert meta == META
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert (ours.dtype, ours.sharding) == (theirs.dtype, theirs.sharding)
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    other = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), abstract)
    with pytest.raises(Unreadable, match=r"another mesh \(half.0@0:8 is not in it\)"):
        place_pieces(read, other)


def test_every_flipped_byte_of_a_part_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "0-of-1.npz"
    write_part(path, {"w@0:256": np.arange(256, dtype=np.float32)}, META)
    content, noticed = path.read_bytes(), 0
    for place in range(0, len(content), 7):
        altered = content[:place] + bytes([content[place] ^ 64]) + content[place + 1 :]
        try:
            meta, pieces = read_part(BytesIO(altered))
        except (Unreadable, NotImplementedError):
            noticed += 1
            continue
        assert meta == META
        if not pieces:  # a piece that is not there is missed where it is placed
            noticed += 1
            continue
        np.testing.assert_array_equal(pieces["w@0:256"], np.arange(256, dtype=np.float32))
    assert noticed > 0.8 * len(content) / 7


def test_files_go_between_hosts_and_only_to_those_who_know_the_secret(tmp_path: Path) -> None:
    ours, theirs, stranger = (
        Exchange(tmp_path / name, "localhost", secret) for name, secret in (("a", b"x"), ("b", b"x"), ("c", b"y"))
    )
    (tmp_path / "secret").write_text("not to be had")
    (tmp_path / "a" / "5").mkdir(parents=True)
    file = tmp_path / "a" / "5" / "0-of-2.npz"
    file.write_bytes(os.urandom(2**25 + 17))
    silent = socket.create_connection(("localhost", ours.address[1]))
    with pytest.raises(OSError, match="digest|hung up"):
        stranger.get(ours.address, "5/0-of-2.npz")
    silent.close()
    ours.put(theirs.address, "5/0-of-2.npz", file)
    assert (tmp_path / "b" / "5" / "0-of-2.npz").read_bytes() == file.read_bytes()
    assert ours.get(theirs.address, "5/0-of-2.npz").getvalue() == file.read_bytes()
    with pytest.raises(OSError, match="No such file"):
        ours.get(theirs.address, "6/0-of-2.npz")
    with pytest.raises(OSError, match="no such name"):
        ours.get(theirs.address, "../secret")
    theirs.close()
    with pytest.raises(OSError, match="refused"):
        ours.put(theirs.address, "5/0-of-2.npz", file)


@pytest.mark.parametrize(
    ("disks", "keepers"),
    [
        ("a", [None]),
        ("aa", [None, None]),
        ("ab", [1, 0]),
        ("abc", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("aabbcc", [2, 3, 4, 5, 0, 1]),
        ("aab", [2, 2, 0]),
        ("abab", [1, 0, 3, 2]),
    ],
)
def test_the_next_host_keeps_the_copy(disks: str, keepers: list[int | None]) -> None:
    assert [keeper(process, list(disks)) for process in range(len(disks))] == keepers


def newest_whole(disks: list[Path]) -> int:
    """The newest step of which both disks have both parts."""
    steps = [{path.parent.name for path in parts(disk) if path.name == f"{owner}-of-2.npz"}
             for disk in disks if disk.exists() for owner in (0, 1)]  # fmt: skip
    return max(map(int, set.intersection(*steps)), default=0) if steps else 0


@pytest.mark.slow
def test_two_hosts_of_which_one_loses_its_disk_and_then_both(tmp_path: Path, tiny_data: Path) -> None:
    """Two processes with a directory each: without one of them the run goes on from its neighbour's copy, without both
    from the other tier; the end is bit-equal to a run that was left alone."""
    path = write_tiny(tmp_path, tiny_data)
    run_dir, disks = tmp_path / "run", [tmp_path / "disk0", tmp_path / "disk1"]
    common = [str(path), "steps=36", "checkpoint.every=12", "data.log_rows=true", "mesh.fsdp=8", "model.dropout=0.1"]
    group = [[*common, f"checkpoint.local={{dir: {disk}, every: 2}}"] for disk in disks]
    alone = train_group([*common, f"run_dir={tmp_path / 'alone'}"])
    assert [code for code, _ in alone] == [0, 0], alone

    def reached(step: int) -> bool:
        return newest_whole(disks) >= step

    kill_when(functools.partial(reached, 4), start_each(group))
    first = newest_whole(disks)
    shutil.rmtree(disks[1])
    kill_when(functools.partial(reached, 14), start_each(group))
    second = max(checkpoint_steps(run_dir))
    for disk in disks:
        shutil.rmtree(disk)
    results = train_each(group)
    assert [code for code, _ in results] == [0, 0], results
    assert restores(run_dir) == [(first, "local"), (second, "durable")]
    assert 4 <= first < 12 <= second
    assert step_losses(run_dir) == step_losses(tmp_path / "alone")
    assert checkpoint_meta(run_dir, 36)["checksums"] == checkpoint_meta(tmp_path / "alone", 36)["checksums"]
    for process in (0, 1):
        assert row_log(run_dir, process) == row_log(tmp_path / "alone", process)
    assert newest_whole(disks) == 0, "useless beside the last checkpoint"
    assert json.loads((run_dir / "run.json").read_text())["devices"]["processes"] == 2
