"""Only the parameters come back, on any mesh, verified, and nothing else is read."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpointer, Meta, open_saved, restore_part
from jaxtrain.checkpoint.part import Saved
from jaxtrain.config import CheckpointConfig
from jaxtrain.errors import CheckpointError, ConfigError
from jaxtrain.models.parameters import named_leaves
from jaxtrain.program import build
from jaxtrain.saved_run import config_of, find_checkpoint
from tests.runs import MESHES, Straight, checkpoint_meta, content, read_checkpoint, stopped_copy


def abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def save(folder: Path, state: Any, step: int = 1) -> Saved:
    checkpointer = Checkpointer(folder, CheckpointConfig(), lambda *saved: None)
    checkpointer.save(state, Meta(step=step, position=8 * step, skipped=0, config={}, data_hash=""))
    checkpointer.close()
    return open_saved(folder)


def weights(**changes: Any) -> dict[str, Any]:
    leaves = {"embed": jnp.ones((6, 4)), "head": jnp.ones((4, 6)), "scale": jnp.full(4, 2.0)}
    return {**leaves, **changes}


@pytest.mark.parametrize("mesh", ["one device", "fsdp=8", "tensor=2", "data=2 fsdp=2 tensor=2"])
def test_the_parameters_of_a_run_come_back_on_any_mesh(mesh: str, straight: Straight) -> None:
    run_dir = straight("fsdp=8")
    saved = find_checkpoint(f"{run_dir}@5")
    devices, overrides = MESHES[mesh]
    program = build(config_of(saved, overrides), jax.devices()[:devices])
    params = restore_part(saved, program.state["params"])
    on_disk = read_checkpoint(run_dir, 5)
    leaves = named_leaves(params)
    assert {f"params.{name}" for name in leaves} == {name for name in on_disk if name.startswith("params.")}
    for name, leaf in leaves.items():
        np.testing.assert_array_equal(np.asarray(leaf), on_disk[f"params.{name}"], err_msg=name)
    wanted = jax.tree.map(lambda leaf: leaf.sharding, program.state["params"])
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == wanted


def test_another_part_of_the_state_comes_back_by_its_name(tmp_path: Path) -> None:
    average = weights(scale=jnp.full(4, 3.0))
    saved = save(tmp_path, {"params": weights(), "ema": average, "step": jnp.int32(1)})
    restored = restore_part(saved, abstract(average), "ema")
    np.testing.assert_array_equal(restored["scale"], np.full(4, 3.0))
    assert saved.parts == ["ema", "params", "step"]
    with pytest.raises(ConfigError, match=rf"{tmp_path}/1 has no average; it has ema, params, step"):
        restore_part(saved, abstract(average), "average")


def largest_file(checkpoint: Path) -> Path:
    return max((path for path in (checkpoint / "state" / "d").iterdir()), key=lambda path: path.stat().st_size)


def test_damaged_parameters_are_named_and_never_replaced_by_an_older_step(straight: Straight, tmp_path: Path) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path, step=10)
    saved = find_checkpoint(str(run_dir))
    program = build(config_of(saved), jax.devices()[:1])
    largest_file(saved.path).unlink()
    before = content(run_dir)
    with pytest.raises(CheckpointError, match=rf"{run_dir}/checkpoints/10 can't be read: .*other steps there: 5"):
        restore_part(saved, program.state["params"])
    assert content(run_dir) == before, "a reader sets nothing aside"


def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    saved = save(tmp_path, {"params": weights(), "step": jnp.int32(1)})
    saved.path.rename(tmp_path / "2")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/1 was deleted while it was read.* there are 2 now"):
        restore_part(saved, abstract(weights()))


def test_content_that_reads_but_is_another_is_caught_by_the_checksum(straight: Straight, tmp_path: Path) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path, step=10)
    shutil.rmtree(run_dir / "checkpoints" / "10" / "state")
    shutil.copytree(run_dir / "checkpoints" / "5" / "state", run_dir / "checkpoints" / "10" / "state")
    saved = find_checkpoint(str(run_dir))
    program = build(config_of(saved), jax.devices()[:1])
    with pytest.raises(CheckpointError, match=r"the content of params\..* differs from its checksum"):
        restore_part(saved, program.state["params"])


def test_nothing_but_the_part_is_checked_or_needed(tmp_path: Path) -> None:
    saved = save(tmp_path, {"params": weights(), "optimizer": {"mu": weights()}, "step": jnp.int32(1)})
    file = saved.path / "meta" / "metadata"
    meta = json.loads(file.read_text())
    meta["checksums"]["optimizer.mu.embed"] = "0" * 16
    file.write_text(json.dumps(meta))
    np.testing.assert_array_equal(restore_part(open_saved(tmp_path), abstract(weights()))["embed"], np.ones((6, 4)))


def test_every_array_that_differs_is_named_with_the_nearest_name(tmp_path: Path) -> None:
    saved = save(tmp_path, {"params": weights(), "step": jnp.int32(1)})
    other = weights(embed=jnp.ones((8, 4)), scale=jnp.ones(4, jnp.bfloat16), scales=jnp.ones(4))
    other["heads"] = other.pop("head")
    with pytest.raises(ConfigError) as error:
        restore_part(saved, abstract(other))
    assert str(error.value).splitlines() == [
        f"{tmp_path}/1 has other params than this model:",
        "  params.heads float32[4, 6] is not in the checkpoint; the nearest is params.head",
        "  params.scales float32[4] is not in the checkpoint",
        "  params.head float32[4, 6] of the checkpoint has no place here; the nearest is params.heads",
        "  params.embed is float32[6, 4] in the checkpoint, float32[8, 4] here",
        "  params.scale is float32[4] in the checkpoint, bfloat16[4] here",
    ]


def test_a_run_is_named_by_its_directory_or_that_of_its_checkpoints(straight: Straight, tmp_path: Path) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path, step=10)
    for name in (run_dir, run_dir / "checkpoints"):
        assert find_checkpoint(str(name)).path == run_dir / "checkpoints" / "10"
        assert find_checkpoint(f"{name}@5").meta.position == checkpoint_meta(run_dir, 5)["position"]
    at = run_dir.rename(tmp_path / "run@5")
    assert find_checkpoint(str(at)).meta.step == 10, "a directory of this name comes first"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run@7", r"checkpoints: no complete checkpoint of step 7; there are 5, 10"),
        ("run@last", r"after the @ stands the number of a step, such as .*run@1000"),
        ("nowhere", r"nowhere: no such directory"),
        ("run/checkpoints/5", r"is one checkpoint; write .*run/checkpoints@5"),
        (".", r"neither a run directory nor a directory of checkpoints"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(name: str, message: str, straight: Straight, tmp_path: Path) -> None:
    stopped_copy(straight("one device"), tmp_path, step=10)
    with pytest.raises(ConfigError, match=message):
        find_checkpoint(str(tmp_path / name))


def test_a_run_without_a_complete_checkpoint_says_so(straight: Straight, tmp_path: Path) -> None:
    run_dir = stopped_copy(straight("one device"), tmp_path)
    (run_dir / "checkpoints" / "5" / "_CHECKPOINT_METADATA").unlink()
    with pytest.raises(ConfigError, match=rf"{run_dir}/checkpoints: no complete checkpoint is there"):
        find_checkpoint(str(run_dir))
