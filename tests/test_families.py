"""Which task and which data a config means, and what is refused before the first step where they don't fit."""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import load
from jaxtrain.errors import ConfigError
from jaxtrain.models.families import make_task
from jaxtrain.models.language import LanguageTask
from jaxtrain.models.remat import Remat
from jaxtrain.models.vision import VisionTask
from jaxtrain.program import Program, build
from jaxtrain.saved_run import config_of, find_checkpoint
from jaxtrain.training_data import TrainingData, open_data, refuse_other_fields
from tests.runs import FAMILIES, checkpoint_meta, run_here, tiny_config

OWN = """
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.data import ArrayTable, Tables
from jaxtrain.models.parameters import constant, parameter
from scripts.own_task import Regression, make_data
from flax import nnx

@dataclass(frozen=True)
class Told(Regression):
    compute_dtype: Any
    remat: Any

@dataclass(frozen=True)
class OwnAxes(Regression):
    axis: str = "units"

    def init(self, key):
        given = Regression.init(self, key)
        shape, axes = (self.width, self.width), (self.axis, "mlp")
        given["mix"] = parameter(nnx.Rngs(params=key), shape, axes, "matrix", constant(0.5))
        return given

def no_task(width):
    return {"width": width}

def split(rows, **change):
    tables = make_data(rows)
    fields = dict(tables.train.fields)
    for name, dtype in change.items():
        fields[name] = fields[name].astype(dtype)
    return Tables(ArrayTable(fields), tables.held_out)

def flat(rows):
    return Tables(ArrayTable({"place": np.zeros(rows, np.float32), "height": np.zeros(rows, np.float32)}))

def nameless(rows):
    return Tables(ArrayTable({"x": np.zeros(rows, np.float32)}))

def arrays(rows):
    return np.zeros(rows)

def in_parts(rows, names=("near", "far")):
    whole, place = make_data(rows), make_data(rows).held_out.fields["place"]
    near = (np.abs(place) < 1).all(1)
    parts = [{name: field[part] for name, field in whole.held_out.fields.items()} for part in (near, ~near)]
    return Tables(whole.train, whole.held_out, sets=dict(zip(names, map(ArrayTable, parts), strict=True)))

class Bare:
    train, held_out, hash = [1, 2], None, "0123456789ab"

class Unhashed:
    train, held_out, hash = make_data(16).train, None, 7

class Empty:
    train, held_out, hash = type("None_", (), {"__len__": lambda self: 0, "assemble": print})(), None, "0123456789ab"
"""


@pytest.fixture(scope="module", autouse=True)
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The module `own_for_families`, which nobody registered."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_for_families.py").write_text(OWN)
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


def target(section: str, given: str) -> str:
    """The override that names code of the module, such as `Told, width: 64`, for a section."""
    name, *keys = given.split(", ")
    keys.insert(0, f"target: 'own_for_families:{name}'")
    return f"{section}={{{', '.join(keys)}}}"


def own(model: str = "Told, width: 64", data: str = "split, rows: 64") -> list[str]:
    return [target("model", model), target("data", data)]


def built(folder: Path, devices: int, overrides: Sequence[str]) -> Program:
    return build(tiny_config(folder, folder / "data", *overrides), jax.devices()[:devices])


def opened(folder: Path, *overrides: str) -> TrainingData:
    return open_data(tiny_config(folder, folder / "data", *overrides))


def test_each_family_is_made_into_its_task_with_precision_and_remat(tmp_path: Path) -> None:
    run = ["precision=bfloat16", "remat=full"]
    for family, kind in (("decoder", LanguageTask), ("vit", VisionTask)):
        task = make_task(tiny_config(tmp_path, tmp_path, *FAMILIES[family], *run))
        assert isinstance(task, kind)
        assert (task.compute_dtype, task.remat) == (jnp.bfloat16, Remat("full"))
    told = make_task(tiny_config(tmp_path, tmp_path, *own(), *run))
    assert (told.compute_dtype, told.remat, told.width) == (jnp.bfloat16, Remat("full"), 64)  # type: ignore[attr-defined]


def test_a_decoder_may_read_somebodys_own_rows_of_a_stated_length(tmp_path: Path) -> None:
    task = make_task(tiny_config(tmp_path, tmp_path, target("data", "split, rows: 64, sequence: 16")))
    assert isinstance(task, LanguageTask)
    assert task.sequence == 16


REFUSED = {
    "remat that nobody takes": (1, [*FAMILIES["own"], "remat=full"], "scripts.own_task:Regression takes no remat"),
    "an object that is no task": (1, own("no_task, width: 3"), "gives a dict that lacks init, denominators"),
    "an axis without a rule": (1, own("OwnAxes, width: 64"), "mix: unknown logical axis 'units'; known: embed"),
    "a rule for an axis of ours": (
        1, [*own("OwnAxes, width: 64"), "sharding.rules={embed: [tensor]}"],
        "sharding.rules.embed: this logical axis has a rule already",
    ),
    "an own axis that the mesh does not divide": (
        8, [*own("OwnAxes, width: 64"), "sharding.rules={units: [fsdp, tensor]}", "mesh.fsdp=4", "mesh.tensor=2"],
        "logical axes 'units' and 'mlp' both map to mesh axis 'tensor'",
    ),
    "a width that the mesh does not divide": (
        8, [*FAMILIES["own"], "model.width=60", "mesh.fsdp=8"], "dimension 'embed' has size 60, which mesh.fsdp=8",
    ),
    "heads of a ViT": (8, [*FAMILIES["vit"], "mesh.tensor=8"], "model.heads=4 doesn't divide by mesh.tensor=8"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_built_is_refused_by_name(case: str, tmp_path: Path) -> None:
    devices, overrides, words = REFUSED[case]
    with pytest.raises(ConfigError, match=re.escape(words)):
        built(tmp_path, devices, overrides)


def test_an_axis_of_ones_own_is_split_by_its_rule(tmp_path: Path) -> None:
    model = [*own("OwnAxes, width: 64"), "sharding.rules={units: [fsdp]}"]
    program = built(tmp_path, 8, [*model, "mesh.fsdp=4", "mesh.tensor=2"])
    mix = program.state["params"]["mix"]
    assert mix.sharding.shard_shape(mix.shape) == (16, 32)
    assert program.layout.activation_rules["units"] == ()


def test_the_rule_of_an_own_axis_stays_with_the_run(tmp_path: Path) -> None:
    rules = "sharding.rules={units: [fsdp]}"
    config = tiny_config(tmp_path, tmp_path, *own("OwnAxes, width: 64"), rules, "steps=1", "mesh.fsdp=2")
    run_here(config, devices=2)
    again = config_of(find_checkpoint(str(config.run_dir)))
    assert (again.sharding, again.mesh.fsdp) == (config.sharding, 1)
    build(again, jax.devices()[:1])


def test_data_of_every_kind_know_their_rows_and_hold_some_out(tmp_path: Path, tiny_data: Path) -> None:
    for family, rows, held_out in (("decoder", None, None), ("vit", 1438, 359), ("own", 448, 64)):
        data = open_data(tiny_config(tmp_path, tiny_data, *FAMILIES[family], "eval.every=1"))
        assert data.held_out is not None
        assert rows is None or (data.rows, len(data.held_out)) == (rows, held_out)
        assert re.fullmatch("[0-9a-f]{64}", data.hash)
        assert open_data(tiny_config(tmp_path, tiny_data, *FAMILIES[family])).held_out is None


DATA_REFUSED = {
    "no data": ("arrays, rows: 3", [], "gives a ndarray without train, held_out, hash; return jaxtrain.data.Tables"),
    "no table": ("Bare", [], "gives a Bare whose train is a list, no table; it needs len() and assemble(row_ids)"),
    "a set of another name": (
        "in_parts, rows: 64, names: [near, 'far off']", [], "with a set named 'far off'; a name has small letters",
    ),
    "a set that is named as the training rows": ("in_parts, rows: 64, names: [near, train]", [], "a set named 'train'"),
    "a set that is named as what is held out": ("in_parts, rows: 64, names: [held_out, b]", [], "named 'held_out'"),
    "a set that is named as an average is": ("in_parts, rows: 64, names: [near, ema_near]", [], "set named 'ema_near'"),
    "no row": ("Empty", [], "gives a Empty whose train has no row"),
    "no hash": ("Unhashed", [], "gives a Unhashed whose hash is 7; it must be 12 hexadecimal digits or more"),
    "nothing held out": ("flat, rows: 9", ["eval.every=1"], "holds nothing out to evaluate on; set eval.every=0"),
    "a missing argument": ("flat", [], "data.rows is missing: own_for_families:flat needs it"),
    "a key that it does not take": (
        "flat, rows: 9, row: 1", [], "unknown key data.row: own_for_families:flat doesn't take it; did you mean rows?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DATA_REFUSED)
def test_what_is_no_data_set_is_refused_by_name(case: str, tmp_path: Path) -> None:
    data, overrides, words = DATA_REFUSED[case]
    with pytest.raises(ConfigError, match=re.escape(words)):
        opened(tmp_path, *FAMILIES["own"][:1], target("data", data), *overrides)


FIELDS_REFUSED = {
    "another dtype": (
        "split, rows: 64, height: float64",
        "height has shape () and dtype float64, but the model reads height of shape () and dtype float32 in each row",
    ),
    "another shape": (
        "flat, rows: 64",
        "place has shape () and dtype float32, but the model reads place of shape (2,)",
    ),
    "a missing field": ("nameless, rows: 64", "rows have x, weights, but the model reads place of shape (2,)"),
}


@pytest.mark.parametrize("case", FIELDS_REFUSED)
def test_rows_that_the_model_does_not_read_are_refused_with_shape_and_dtype(case: str, tmp_path: Path) -> None:
    data, words = FIELDS_REFUSED[case]
    config = tiny_config(tmp_path, tmp_path, *FAMILIES["own"][:1], target("data", data))
    with pytest.raises(ConfigError, match=re.escape(words)):
        run_here(config)
    assert not config.run_dir.exists()


def test_held_out_rows_are_compared_too(tmp_path: Path) -> None:
    task = make_task(tiny_config(tmp_path, tmp_path, *FAMILIES["own"]))
    data = opened(tmp_path, FAMILIES["own"][0], target("data", "split, rows: 64"), "eval.every=1")
    refuse_other_fields(data, task.example_batch(8))
    assert data.held_out is not None
    data.held_out.fields["height"] = np.zeros(8)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="height has shape"):
        refuse_other_fields(data, task.example_batch(8))


def test_named_parts_of_the_held_out_rows_are_evaluated_beside_them(tmp_path: Path) -> None:
    data = target("data", "in_parts, rows: 512")
    config = tiny_config(tmp_path, tmp_path, FAMILIES["own"][0], data, "steps=2", "eval.every=2")
    last = run_here(config)[-1]
    parts = [one.table for one in open_data(config).eval_sets.values()]
    weights = np.array([len(part) for part in parts])
    means = np.array([last["eval_near_loss"], last["eval_far_loss"]])
    assert weights.sum() == 64
    assert last["eval_loss"] == pytest.approx((weights * means).sum() / 64, rel=1e-5)
    assert means[0] != means[1]


def test_checkpoints_are_kept_by_a_metric_of_a_named_part(tmp_path: Path) -> None:
    data = [FAMILIES["own"][0], target("data", "in_parts, rows: 512"), "steps=2", "eval.every=1", "checkpoint.every=1"]
    best = "checkpoint.keep_best={{metric: eval_{}_loss}}"
    config = tiny_config(tmp_path, tmp_path, *data, best.format("far"))
    last = run_here(config)[-1]
    assert checkpoint_meta(config.run_dir, 2)["metrics"]["eval_far_loss"] == last["eval_far_loss"]
    with pytest.raises(ConfigError, match=r"metric=eval_fur_loss: .*eval_far_loss, eval_loss, eval_near_loss"):
        run_here(tiny_config(tmp_path, tmp_path, *data, best.format("fur"), f"run_dir={tmp_path / 'b'}"))
    assert not (tmp_path / "b").exists()


def test_other_data_under_the_same_name_are_refused_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(tmp_path, tmp_path, *FAMILIES["own"][:1], target("data", "split, rows: 64"), "steps=2")
    run_here(config.model_copy(update={"steps": 2}))
    module = sys.modules["own_for_families"]
    monkeypatch.setattr(module, "split", lambda rows: module.make_data(2 * rows))
    with pytest.raises(ConfigError, match=r"data.target=own_for_families:split: the data are others than the run was"):
        run_here(config)


def test_a_key_of_ones_own_may_not_change_on_resume(tmp_path: Path) -> None:
    run_here(tiny_config(tmp_path, tmp_path, *FAMILIES["own"], "steps=2"))
    with pytest.raises(ConfigError, match=r"model.width: 64 -> 32"):
        run_here(tiny_config(tmp_path, tmp_path, *FAMILIES["own"], "steps=2", "model.width=32"))


def test_a_fault_in_ones_own_keys_is_placed_where_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "c.yml"
    path.write_text("run_dir: r\nsteps: 2\nmodel:\n  target: scripts.own_task:Regression\n  wdth: 3\n  width: 8\n")
    with pytest.raises(ConfigError, match=rf"^{path}:5: unknown key model.wdth: .*; did you mean width\?$"):
        make_task(load(path))
