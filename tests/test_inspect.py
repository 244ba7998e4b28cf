"""`python -m jaxtrain.inspect`: what there is, what is in it, and whether it is what was saved."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxtrain.checkpoint import inspection
from jaxtrain.inspect import main
from tests.runs import Straight, checkpoint_meta, content, environment, read_checkpoint


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets variables for JAX; they go with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


@pytest.fixture
def run(straight: Straight, tmp_path: Path) -> Path:
    """A copy of a finished run, with checkpoints 5 and 10."""
    return Path(shutil.copytree(straight("fsdp=8"), tmp_path / "run"))


def inspected(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == code
    shown = capsys.readouterr()
    assert ("error: " in shown.err) == (code != 0)
    assert "Traceback" not in shown.err
    return dict(json.loads(shown.out))


def text(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> tuple[str, str]:
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    return shown.out, shown.err


def test_every_array_is_listed_as_it_was_saved(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(run)
    found = inspected([str(run)], capsys)
    arrays, meta = read_checkpoint(run, 10), checkpoint_meta(run, 10)
    assert found["steps"] == [5, 10]
    checkpoint = found["checkpoint"]
    assert (checkpoint["step"], checkpoint["position"], checkpoint["skipped"]) == (10, 80, 0)
    assert checkpoint["versions"] == meta["versions"]
    assert checkpoint["arrays"].keys() == arrays.keys()
    for name, leaf in checkpoint["arrays"].items():
        array = arrays[name]
        assert (tuple(leaf["shape"]), leaf["dtype"], leaf["bytes"]) == (array.shape, str(array.dtype), array.nbytes)
        assert leaf["checksum"] == meta["checksums"][name]
    assert inspected([f"{run}@5"], capsys)["checkpoint"]["position"] == 40
    assert content(run) == before


def test_the_table_has_a_line_for_each_array_and_the_totals_of_the_parts(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrays = read_checkpoint(run, 10)
    shown, _ = text([f"{run}@10"], capsys)
    parts, _, listed = shown.partition("\narray ")
    lines = {line.split()[0]: line.split()[1:] for line in listed.splitlines()[1:]}
    assert lines.keys() == arrays.keys()
    for name, array in arrays.items():
        assert lines[name][:2] == ["×".join(map(str, array.shape)) or "scalar", str(array.dtype)]
    lines = {line.split()[0]: line.split()[1:] for line in parts.partition("\npart ")[2].splitlines()[1:] if line}
    assert list(lines) == ["optimizer", "params", "step", "total"]
    for part, (count, elements, *_) in lines.items():
        of_part = [array for name, array in arrays.items() if part in ("total", name.split(".")[0])]
        assert (count, elements) == (str(len(of_part)), f"{sum(math.prod(array.shape) for array in of_part):,}")
    assert max(map(len, shown.splitlines())) > 80, "nothing is cut off in a pipe"


def test_what_is_no_checkpoint_is_named_for_what_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = run / "checkpoints"
    for name in ("12", "7.unreadable", "8.incomplete-1", "15.orbax-checkpoint-tmp-0", "3.deleting", "notes"):
        (checkpoints / name).mkdir()
    before = sorted(path.name for path in checkpoints.iterdir())
    found = inspected([str(run)], capsys)
    assert found["steps"] == [5, 10]
    assert found["incomplete"] == ["12"]
    assert found["set_aside"] == ["7.unreadable", "8.incomplete-1"]
    assert sorted(found["leftovers"]) == ["15.orbax-checkpoint-tmp-0", "3.deleting"]
    shown, _ = text([str(run)], capsys)
    assert "incomplete: 12\n" in shown
    assert "set aside: 7.unreadable, 8.incomplete-1\n" in shown
    assert sorted(path.name for path in checkpoints.iterdir()) == before


def test_a_config_that_changed_between_steps_is_shown_with_both_values(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert inspected([str(run)], capsys)["config_changes"] == {}
    path = run / "checkpoints" / "10" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["config"]["mesh"]["fsdp"] = 4
    path.write_text(json.dumps(meta))
    assert inspected([str(run)], capsys)["config_changes"] == {"10": {"mesh.fsdp": [8, 4]}}
    assert "config changed before step 10:\n  mesh.fsdp: 8 -> 4\n" in text([str(run)], capsys)[0]


def rewrite_meta(run: Path, step: int, **values: Any) -> None:
    path = run / "checkpoints" / str(step) / "meta" / "metadata"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_metrics_and_time_and_origin_of_a_checkpoint_are_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = text([str(run)], capsys)[0]
    assert "saved at 20" in plain
    assert "began with" not in plain
    origin = {"run": "runs/other", "checkpoint": "runs/other/checkpoints/7", "step": 7, "data_hash": "0" * 64}
    values = {"metrics": {"eval_loss": 2.5, "eval_accuracy": 0.25}, "saved_at": 1.5e9, "origin": origin}
    rewrite_meta(run, 10, **values)
    shown = text([str(run)], capsys)[0]
    assert "\neval_loss 2.5, eval_accuracy 0.25\n" in shown
    assert "\nsaved at 2017-07-1" in shown
    assert "\nbegan with the parameters of runs/other, step 7\n" in shown
    checkpoint = inspected([str(run)], capsys)["checkpoint"]
    assert {name: checkpoint[name] for name in values} == values


def test_a_checkpoint_of_another_format_does_not_hide_the_others(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite_meta(run, 5, format=2)
    found = inspected([str(run)], capsys)
    assert (found["steps"], found["checkpoint"]["step"], found["config_changes"]) == ([5, 10], 10, {})
    assert "has format 2" in text([f"{run}@5"], capsys, code=4)[1]


def test_no_array_is_read_unless_asked_and_then_a_lost_file_is_noticed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = text([str(run)], capsys)[0]
    for file in (run / "checkpoints" / "10" / "state" / "d").iterdir():
        file.write_bytes(b"\0" * file.stat().st_size)
    assert text([str(run)], capsys)[0] == wanted
    shown, error = text([str(run), "--verify"], capsys, code=4)
    assert "verified: 0 of 38 arrays" in shown
    assert "can't be read" in shown
    assert error.startswith(f"error: {run / 'checkpoints' / '10'} is damaged: ")
    assert "verified: 38 of 38 arrays" in text([f"{run}@5", "--verify"], capsys)[0]


def rewrite(state: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Lets `change` work on the saved arrays, and saves them in place, behind the description's back."""
    with ocp.StandardCheckpointer() as checkpointer:
        plain = checkpointer.restore(state)
        change(plain["params"])
        shutil.rmtree(state)
        checkpointer.save(state, jax.tree.map(jnp.asarray, plain))


def test_verifying_names_the_one_array_whose_content_is_another(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(params: dict[str, Any]) -> None:
        changed = np.array(params["layers"]["mlp"]["up"])
        changed[1, 2, 3] = np.nextafter(changed[1, 2, 3], 1)
        params["layers"]["mlp"]["up"] = changed

    rewrite(run / "checkpoints" / "10" / "state", change)
    found = inspected([str(run), "--verify"], capsys, code=4)["verified"]
    assert {name for name, verdict in found.items() if verdict != "right"} == {"params.layers.mlp.up"}
    assert len(found) == 38
    shown, error = text([str(run), "--verify"], capsys, code=4)
    assert "params.layers.mlp.up has another content than was saved\n" in shown
    assert error.endswith("is damaged: params.layers.mlp.up\n")


def test_an_array_that_is_missing_or_of_another_type_is_named(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def change(params: dict[str, Any]) -> None:
        del params["head"]["projection"]
        params["head"]["bias"] = np.zeros(3, np.float32)
        params["embed"]["table"] = np.asarray(params["embed"]["table"], np.float16)

    rewrite(run / "checkpoints" / "10" / "state", change)
    found = inspected([str(run), "--verify"], capsys, code=4)["verified"]
    assert {name: verdict for name, verdict in found.items() if verdict != "right"} == {
        "params.head.projection": "is missing",
        "params.head.bias": "is not in the description",
        "params.embed.table": "is float16[256, 64], not float32[256, 64]",
    }


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_called_damaged(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = inspection.bytes_on_disk

    def deleting(path: Path) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(os, "walk", lambda top: [(top, [], ["gone"])])
            assert size(path) == 0
        shutil.rmtree(path)
        return size(path)

    monkeypatch.setattr(inspection, "bytes_on_disk", deleting)
    shown, error = text([str(run), "--verify"], capsys, code=4)
    assert "verified" not in shown
    assert "checkpoints/10 was deleted while it was read" in error
    assert "there are 5 now" in error


def test_what_is_not_there_or_can_not_be_read_ends_with_its_code(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nowhere" in text(["nowhere"], capsys, code=2)[1]
    assert "there are 5, 10" in text([f"{run}@7"], capsys, code=2)[1]
    assert "--verfy" in text([str(run), "--verfy"], capsys, code=2)[1]
    (run / "checkpoints" / "10" / "meta" / "metadata").write_text("{")
    shown, error = text([str(run)], capsys, code=4)
    assert "steps: 5, 10\n" in shown
    assert "other steps there: 5" in error
    for step in ("5", "10"):
        (run / "checkpoints" / step / "_CHECKPOINT_METADATA").unlink()
    shown, error = text([str(run)], capsys, code=4)
    assert "incomplete: 10, 5\n" in shown
    assert "none of what is there is a complete checkpoint" in error
    (tmp_path / "empty").mkdir()
    assert "neither a run directory" in text([str(tmp_path / "empty")], capsys, code=2)[1]


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_make_it_fail(straight: Straight) -> None:
    command = f"{sys.executable} -m jaxtrain.inspect {straight('fsdp=8')} | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], env=environment(1), capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stderr == ""
    assert re.fullmatch(r".*/checkpoints\n0\n", result.stdout)
