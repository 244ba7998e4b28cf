"""A checkpoint goes onto any mesh, is read by plain Orbax, and is never cast, lost or left half-written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxtrain.checkpoint import Checkpointer, Meta, list_checkpoints
from jaxtrain.config import CheckpointConfig
from jaxtrain.errors import CheckpointError
from jaxtrain.models.parameters import named_leaves
from jaxtrain.program import Program, build
from tests.runs import (
    MESHES,
    STRAIGHT,
    Straight,
    checkpoint_steps,
    events,
    make_layout,
    read_checkpoint,
    run_here,
    step_losses,
    stopped_copy,
    tiny_config,
)

META = Meta(step=1, position=8, skipped=0, config={"steps": 10}, data_hash="abc")


def checkpointer_in(folder: Path, keep: int = 3, **rules: Any) -> Checkpointer:
    return Checkpointer(folder, CheckpointConfig(keep=keep, **rules), lambda *saved: None)


def small_state(value: float = 1.0) -> dict[str, Any]:
    return {"params": {"w": jnp.full((4, 2), float(value))}, "step": jnp.int32(7)}


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def program_of(folder: Path, data: Path, mesh: str) -> Program:
    devices, overrides = MESHES[mesh]
    return build(tiny_config(folder, data, *STRAIGHT, *overrides), jax.devices()[:devices])


OTHERS = ["one device", "data=8", "tensor=2", "data=2 fsdp=2 tensor=2", "pipeline=2"]
OTHERS += ["data=2 fsdp=2 zero=2", "pipeline=2 data=2 tensor=2 zero=1"]
FROM_TO = [*(("fsdp=8", mesh) for mesh in OTHERS), ("pipeline=2", "fsdp=8"), ("pipeline=2", "one device")]


@pytest.mark.parametrize(("origin", "mesh"), FROM_TO)
def test_a_state_saved_on_one_mesh_is_the_same_on_any_other(
    origin: str, mesh: str, straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    saved = straight(origin)
    on_disk = read_checkpoint(saved, 5)
    program = program_of(tmp_path, tiny_data, mesh)
    restored = checkpointer_in(stopped_copy(saved, tmp_path) / "checkpoints").restore_newest(program.state)
    assert restored is not None
    leaves = named_leaves(restored[0])
    assert {name.split(".")[0] for name in leaves} == {"params", "optimizer", "step"}
    assert restored[0]["optimizer"]["adam"].count == 5
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(np.asarray(leaf), on_disk[name], err_msg=name)
    wanted = jax.tree.map(lambda leaf: leaf.sharding, program.state)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored[0]) == wanted


@pytest.mark.parametrize(("origin", "mesh"), FROM_TO)
def test_training_saved_on_one_mesh_goes_on_with_the_same_losses_on_any_other(
    origin: str, mesh: str, straight: Straight, tmp_path: Path, tiny_data: Path
) -> None:
    saved = straight(origin)
    stopped_copy(saved, tmp_path)
    devices, overrides = MESHES[mesh]
    config = tiny_config(tmp_path, tiny_data, *STRAIGHT, *overrides)
    run_here(config, devices)
    assert [event["step"] for event in events(config.run_dir, "restore")] == [5]
    here, there = step_losses(config.run_dir), step_losses(saved)
    assert here.keys() == there.keys() == set(range(1, 11))
    np.testing.assert_allclose(list(here.values()), list(there.values()), rtol=1e-4)


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8"])
def test_plain_orbax_reads_nested_dictionaries(mesh: str, straight: Straight, tmp_path: Path, tiny_data: Path) -> None:
    run_dir = straight(mesh)
    with ocp.StandardCheckpointer() as orbax:
        plain = orbax.restore(run_dir.absolute() / "checkpoints" / "10" / "state")
    assert plain.keys() == {"params", "optimizer", "step"}
    assert plain["optimizer"].keys() == {"adam"}
    assert plain["params"]["embed"]["table"].shape == (256, 64)
    assert plain["step"] == 10
    program = program_of(tmp_path, tiny_data, "one device")
    restored = checkpointer_in(run_dir / "checkpoints").restore_newest(program.state)
    assert restored is not None
    ours, theirs = named_leaves(restored[0]), named_leaves(plain)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_the_files_tie_no_reader_to_the_saving_mesh(straight: Straight) -> None:
    names = {path.name for path in (straight("fsdp=8") / "checkpoints" / "10").rglob("*")}
    assert "manifest.ocdbt" in names, "not the layout that this test knows"
    assert not [name for name in names if "sharding" in name]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("params.w", lambda state: {**state, "params": {"w": state["params"]["w"].astype(jnp.bfloat16)}}),
        ("step", lambda state: {**state, "step": state["step"].astype(jnp.float32)}),
        ("params.w", lambda state: {**state, "params": {"w": state["params"]["w"].T}}),
        ("params.b", lambda state: {**state, "params": {**state["params"], "b": jnp.ones(2)}}),
        ("params.v", lambda state: {**state, "params": {"v": state["params"]["w"]}}),
    ],
    ids=["dtype", "counter", "shape", "more", "renamed"],
)
def test_other_arrays_than_the_programs_are_refused_by_name(tmp_path: Path, name: str, change: Any) -> None:
    state = small_state()
    for saved, wanted in [(state, change(state)), (change(state), state)]:
        shutil.rmtree(tmp_path)
        saving = checkpointer_in(tmp_path)
        saving.save(saved, META)
        saving.close()
        with pytest.raises(CheckpointError, match=f"checkpoint 1 has {name} as"):
            checkpointer_in(tmp_path).restore_newest(abstract(wanted))
        assert list_checkpoints(tmp_path).steps == [1], "it is good, only not this program's"


def test_what_it_says_of_itself_comes_back(tmp_path: Path) -> None:
    saving = checkpointer_in(tmp_path)
    saving.save(small_state(), META)
    saving.close()
    restored = checkpointer_in(tmp_path).restore_newest(abstract(small_state()))
    assert restored is not None
    meta = restored[1]
    assert (meta.step, meta.position, meta.config, meta.data_hash) == (1, 8, {"steps": 10}, "abc")
    assert meta.arrays == {"params.w": [[4, 2], "float32"], "step": [[], "int32"]}
    assert meta.checksums.keys() == meta.arrays.keys()
    assert meta.versions["orbax-checkpoint"]
    assert checkpointer_in(tmp_path).newest_meta() == meta


def test_a_checkpoint_of_another_format_is_refused_and_not_set_aside_for_an_older_one(tmp_path: Path) -> None:
    saving = checkpointer_in(tmp_path)
    for step in (1, 2):
        saving.save(small_state(), replace(META, step=step))
    saving.close()
    description = tmp_path / "2" / "meta" / "metadata"
    description.write_text(json.dumps({**json.loads(description.read_text()), "format": 2, "of_the_future": 0}))
    with pytest.raises(CheckpointError, match="has format 2; this program reads format 1"):
        checkpointer_in(tmp_path).newest_meta()
    with pytest.raises(CheckpointError, match="has format 2; this program reads format 1"):
        checkpointer_in(tmp_path).restore_newest(abstract(small_state()))
    assert list_checkpoints(tmp_path).steps == [2, 1]


def test_a_failed_background_save_is_reported_with_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    checkpointer = checkpointer_in(tmp_path)
    monkeypatch.setattr(ocp.JsonCheckpointHandler, "finalize", full_disk)
    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", full_disk)
    checkpointer.save(small_state(), META)
    with pytest.raises(CheckpointError, match=rf"{tmp_path}.*No space left on device"):
        checkpointer.wait()
    assert list_checkpoints(tmp_path).steps == []


def test_a_run_whose_save_fails_ends_at_the_next_save_at_the_latest(
    tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", full_disk)
    config = tiny_config(tmp_path, tiny_data, "checkpoint.every=2")
    with pytest.raises(CheckpointError, match=rf"{config.checkpoint_dir}.*No space left on device"):
        run_here(config)
    assert max(step_losses(config.run_dir)) <= 4
    assert checkpoint_steps(config.run_dir) == []
    (stop,) = events(config.run_dir, "stop")
    assert stop["exit_code"] == 4
    assert "No space left" in stop["reason"]


@pytest.mark.parametrize("keep", [1, 2])
def test_the_newest_checkpoints_stay_and_there_is_always_one(
    keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    remove = shutil.rmtree

    def watched(path: Any, *arguments: Any, **options: Any) -> None:
        seen.append(list_checkpoints(tmp_path).steps)
        remove(path, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    checkpointer = checkpointer_in(tmp_path, keep)
    for step in range(1, 6):
        checkpointer.save(small_state(step), Meta(step=step, position=0, skipped=0, config={}, data_hash=""))
    checkpointer.close()
    assert list_checkpoints(tmp_path).steps == [5, 4][:keep]
    assert len(seen) >= 5 - keep
    assert all(len(steps) >= keep for steps in seen), "something newer must be complete before an old one goes"
    restored = checkpointer_in(tmp_path).restore_newest(abstract(small_state()))
    assert restored is not None
    np.testing.assert_array_equal(restored[0]["params"]["w"], np.full((4, 2), 5.0))


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_a_process_reads_each_byte_once_however_many_devices_get_it(axis: str, tmp_path: Path) -> None:
    """Several processes of a host share what its page cache holds: each byte comes from the storage once."""
    mesh = make_layout(data=8).mesh if axis == "data" else make_layout(fsdp=8).mesh
    sharding = jax.NamedSharding(mesh, jax.P() if axis == "data" else jax.P("fsdp"))
    content = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    state = {"params": {"w": jax.device_put(content, sharding)}}
    checkpointer = checkpointer_in(tmp_path)
    checkpointer.save(state, META)
    checkpointer.close()
    reader = checkpointer_in(tmp_path)
    before = bytes_read()
    restored = reader.restore_newest(abstract(state))
    assert restored is not None
    assert bytes_read() - before < 1.3 * content.nbytes


def bytes_read() -> int:
    """What this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_step_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        checkpointer = checkpointer_in(tmp_path)
        checkpointer.save(small_state(value), META)
        checkpointer.close()
    restored = checkpointer_in(tmp_path).restore_newest(abstract(small_state()))
    assert restored is not None
    np.testing.assert_array_equal(restored[0]["params"]["w"], np.ones((4, 2)))


def test_an_empty_directory_means_that_there_is_none(tmp_path: Path) -> None:
    assert checkpointer_in(tmp_path).restore_newest(abstract(small_state())) is None
    assert checkpointer_in(tmp_path / "none").newest_meta() is None
