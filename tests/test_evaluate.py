"""`python -m jaxtrain.evaluate`: the run's own number on any mesh, more data sets, more steps."""

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import load
from jaxtrain.evaluate import main
from jaxtrain.telemetry.metrics import read_metrics
from tests.factories import edit_manifest, make_dataset, make_documents
from tests.runs import content, run_here, tiny_config, train_each, train_group


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`main` sets variables for JAX; they go with the test. The compile cache of users is left alone."""
    monkeypatch.setattr(os, "environ", {**os.environ, "HOME": str(tmp_path / "home")})


@pytest.fixture(scope="module")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of the same tokenizer, all of it for training: 7 documents, 63 counted tokens."""
    folder = tmp_path_factory.mktemp("other") / "data"
    make_dataset(folder, make_documents([10] * 7, seed=5), held_out=())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path, other_data: Path) -> Path:
    """Ten steps on data=8 with evaluations at 5 and 10, on the held-out rows and on another data set."""
    folder = tmp_path_factory.mktemp("evaluated")
    config = tiny_config(folder, tiny_data, "eval.every=5", f"eval.sets.other={other_data}", "mesh.data=8")
    run_here(config, 8)
    return config.run_dir


def evaluated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main([*arguments, "--json"]) == 0, capsys.readouterr().err
    shown = capsys.readouterr()
    assert shown.err == ""
    return [json.loads(line) for line in shown.out.splitlines()]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert "Traceback" not in shown.err
    return shown.err


def of_the_run(run: Path) -> dict[int, dict[str, float]]:
    return {line["step"]: line for line in read_metrics(run / "metrics.jsonl") if "eval_loss" in line}


def test_a_run_evaluates_named_sets_beside_its_held_out_rows(run: Path) -> None:
    lines = of_the_run(run)
    assert sorted(lines) == [5, 10]
    for line in lines.values():
        assert set(line) == {"step", "eval_loss", "eval_other_loss"}
        assert line["eval_loss"] != line["eval_other_loss"]


PIPELINED = ["mesh.data=1", "mesh.fsdp=2", "mesh.pipeline=2", "mesh.tensor=2"]


@pytest.mark.parametrize("mesh", [["mesh.data=8"], ["mesh.data=1", "mesh.fsdp=4", "mesh.tensor=2"], PIPELINED])
def test_every_step_has_the_loss_that_the_run_wrote_and_the_run_is_left_alone(
    mesh: list[str], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    found = evaluated([f"{run}@all", *mesh], capsys)
    assert content(run) == before
    assert [(line["step"], line["set"]) for line in found] == [
        (5, "held_out"), (5, "other"), (10, "held_out"), (10, "other"),
    ]  # fmt: skip
    for line in found:
        wanted = of_the_run(run)[line["step"]]["eval_loss" if line["set"] == "held_out" else "eval_other_loss"]
        assert line["loss"] == pytest.approx(wanted, rel=1e-6)
        assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
    assert (found[1]["rows"], found[1]["weight"]) == (2, 63), "seven documents of ten tokens, packed in rows of 32"


def test_on_the_run_s_own_mesh_the_loss_has_the_same_bits(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated([str(run), "mesh.data=8"], capsys)
    assert [line["loss"] for line in found] == [of_the_run(run)[10][name] for name in ("eval_loss", "eval_other_loss")]


def test_a_set_is_added_by_name_and_several_batches_give_the_same(
    run: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"{run}@10", "--set", f"again={tiny_data}"]
    found = evaluated(asked, capsys)
    assert [line["set"] for line in found] == ["held_out", "other", "again"]
    assert found[2]["loss"] == found[0]["loss"]
    small = evaluated([*asked, "eval.batch=8"], capsys)
    assert [line["loss"] for line in small] == pytest.approx([line["loss"] for line in found], rel=1e-6)


def test_the_table_shows_what_the_lines_say(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = evaluated([str(run)], capsys)
    assert main([str(run)]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split() == ["step", "set", "rows", "weight", "loss", "perplexity"]
    assert [row.split()[:3] for row in rows] == [[str(line["step"]), line["set"], str(line["rows"])] for line in found]
    assert [row.split()[4] for row in rows] == [f"{line['loss']:.4f}" for line in found]


def test_data_that_are_not_the_run_s_are_told(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path / "new", make_documents([20] * 8, seed=3), make_documents([20] * 3, seed=4))
    assert main([str(run), f"data.dir={tmp_path / 'new'}", "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith("warning: ")
    assert str(tmp_path / "new") in shown.err
    assert len(shown.out.splitlines()) == 2


@pytest.mark.parametrize("frozen", ["[]", "['embed.*']"])
def test_the_moving_average_has_the_loss_that_the_run_wrote(
    frozen: str, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["steps=4", "eval.every=4", "ema.decay=0.5", f"optimizer.frozen={frozen}"]
    run_here(tiny_config(tmp_path, tiny_data, *overrides))
    capsys.readouterr()
    run = str(tmp_path / "run")
    losses = [evaluated([run, *options], capsys)[0]["loss"] for options in ([], ["--ema"])]
    line = of_the_run(tmp_path / "run")[4]
    assert losses == pytest.approx([line["eval_loss"], line["eval_ema_loss"]], rel=1e-6)
    assert losses[0] != losses[1]


@pytest.mark.parametrize("mesh", [[], ["mesh.data=8"], ["mesh.data=2", "mesh.fsdp=2", "mesh.pipeline=2"]])
@pytest.mark.parametrize(
    "batches", [["global_batch=6"], ["batch_ramp=[{steps: 1, global_batch: 2}]"], ["eval.batch=4"]]
)
def test_the_batches_of_the_run_need_not_divide_over_the_mesh(
    batches: list[str], mesh: list[str], tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here(tiny_config(tmp_path, tiny_data, "steps=2", "eval.every=2", *batches))
    capsys.readouterr()
    (line,) = evaluated([str(tmp_path / "run"), *mesh], capsys)
    assert line["loss"] == pytest.approx(of_the_run(tmp_path / "run")[2]["eval_loss"], rel=1e-6)


def test_a_mixture_is_evaluated_on_sets_too(
    tmp_path: Path, tiny_data: Path, other_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mixture.yml"
    model = "model: {vocab: 256, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}"
    mixture = f"{{a: {{dir: {tiny_data}, weight: 1}}, b: {{dir: {other_data}, weight: 2}}}}"
    path.write_text(
        f"run_dir: {tmp_path / 'run'}\nsteps: 1\nglobal_batch: 8\n{model}\n"
        f"data: {{kind: mixture, sequence: 32, mixture: {mixture}}}\neval: {{every: 1, sets: {{b: {other_data}}}}}\n"
    )
    run_here(load(path))
    capsys.readouterr()
    held_out, own = evaluated([str(tmp_path / "run")], capsys)
    line = of_the_run(tmp_path / "run")[1]
    assert [held_out["loss"], own["loss"]] == pytest.approx([line["eval_loss"], line["eval_b_loss"]], rel=1e-6)
    assert own["weight"] == 63
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()


def test_images_are_evaluated_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "vit.yml"
    path.write_text(
        f"run_dir: {tmp_path / 'run'}\nsteps: 2\nmodel: {{family: vit, layers: 1, embed: 16, heads: 2, mlp: 16}}\n"
        "data: {kind: digits}\neval: {every: 2}\n"
    )
    run_here(load(path))
    capsys.readouterr()
    (line,) = evaluated([str(tmp_path / "run")], capsys)
    wanted = of_the_run(tmp_path / "run")[2]
    assert line["loss"] == pytest.approx(wanted["eval_loss"], rel=1e-6)
    assert line["accuracy"] == pytest.approx(wanted["eval_accuracy"])
    assert "perplexity" not in line
    (tmp_path / "x").mkdir()
    message = refused([str(tmp_path / "run"), "--set", f"x={tmp_path / 'x'}"], capsys)
    assert "eval.sets.x" in message
    assert "data.kind=tokens" in message


REFUSED = {
    "no such run": (["nowhere"], ["nowhere"]),
    "no such step": (["{run}@7"], ["7", "5, 10"]),
    "a set without a directory": (["{run}", "--set", "wiki"], ["--set wiki", "NAME=DIR"]),
    "a set that is not there": (["{run}", "--set", "wiki=nowhere"], ["nowhere"]),
    "a name with a dash": (["{run}", "--set", "my-set={data}"], ["my-set"]),
    "the name of the held-out rows": (["{run}", "--set", "held_out={data}"], ["held_out"]),
    "no moving average": (["{run}", "--ema"], ["keeps no moving average of the weights"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_one_error(name: str, run: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = REFUSED[name]
    message = refused([text.format(run=run, data=tiny_data) for text in arguments], capsys)
    for word in words:
        assert word in message


def test_a_set_of_another_tokenizer_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path / "foreign", make_documents([20] * 8, vocab=200), vocab=200)
    message = refused([str(run), "--set", f"foreign={tmp_path / 'foreign'}"], capsys)
    assert "eval.sets.foreign" in message
    assert "another tokenizer" in message


def test_a_set_of_another_end_of_document_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_dataset(tmp_path / "ended", make_documents([20] * 8))
    edit_manifest(tmp_path / "ended", lambda manifest: manifest["tokenizer"].update(end_of_document=7))
    message = refused([str(run), "--set", f"ended={tmp_path / 'ended'}"], capsys)
    assert "eval.sets.ended" in message
    assert "another end of document (id 7, not None)" in message
    assert "--end-of-document" in message


def test_a_run_that_holds_nothing_out_is_evaluated_on_sets(
    tmp_path: Path, other_data: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(tmp_path, other_data, "steps=1")
    assert config.eval.every == 0
    run_here(config)
    capsys.readouterr()
    (line,) = evaluated([str(config.run_dir), "--set", f"tiny={tiny_data}"], capsys)
    assert (line["step"], line["set"]) == (1, "tiny")
    message = refused([str(config.run_dir)], capsys)
    assert f"data.dir={other_data} holds nothing out" in message
    assert "--set NAME=DIR" in message
    assert "eval.every" not in message


@pytest.mark.slow
def test_two_processes_give_one_table_of_the_same_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = evaluated([str(run)], capsys)
    arguments = [str(run), "--json", "mesh.data=2", "mesh.fsdp=4"]
    first, second = train_group(arguments, program=("-m", "jaxtrain.evaluate"))
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    lines = [json.loads(line) for line in first[1].splitlines() if line.startswith("{")]
    assert "{" not in second[1]
    assert [line["set"] for line in lines] == [line["set"] for line in wanted]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in wanted], rel=1e-5)


@pytest.mark.slow
def test_two_processes_that_find_different_steps_are_refused(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / "10")
    for process, (code, output) in enumerate(train_each([[str(run)], [str(copy)]], ("-m", "jaxtrain.evaluate"))):
        assert code == 2, output
        assert "error: " in output
        assert f"the processes found different checkpoints there (here: {(10, 5)[process]})" in output
