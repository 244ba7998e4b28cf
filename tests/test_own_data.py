"""Trainings on data that a person prepared: JSON Lines, best-fit rows, mixtures whose weights change."""

import itertools
from pathlib import Path

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.prepare import main as prepare
from jaxtrain.telemetry.metrics import read_metrics
from tests.data.prepare.corpus import text, write_json_lines
from tests.factories import byte_tokenizer, edit_manifest, make_dataset, make_documents
from tests.runs import (
    checkpoint_meta,
    crash_after,
    read_checkpoint,
    row_log,
    run_here,
    step_losses,
    train,
    train_group,
    write_tiny,
)

MIXTURE = """
run_dir: {folder}/run
steps: 10
global_batch: 8
compile_cache: {cache}
model: {{vocab: 256, layers: 2, embed: 64, heads: 4, kv_heads: 2, mlp: 128}}
data:
  kind: mixture
  sequence: 32
  pack: best_fit
  log_rows: true
  mixture:
    code: {{dir: {folder}/code, weight: 0.75}}
    web: {{dir: {folder}/web, weight: 0.25}}
  stages:
    - {{position: 28, weights: {{code: 1, web: 3}}}}
optimizer: {{learning_rate: 1e-2}}
checkpoint: {{every: 5}}
"""
CODE_ROWS = 12


def load_config(path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    from jaxtrain.config import load

    return load(path, list(overrides))


def write_mixture(folder: Path) -> Path:
    """A mixture of two data sets that together end and change their weights in the middle of a step."""
    from tests.runs import COMPILE_CACHE

    make_dataset(folder / "code", make_documents([33] * CODE_ROWS), make_documents([20, 30], seed=5))
    make_dataset(folder / "web", make_documents([9, 14, 40, 3] * 9, seed=1), make_documents([25], seed=6))
    path = folder / "mixture.yml"
    path.write_text(MIXTURE.format(folder=folder, cache=COMPILE_CACHE))
    return path


def rows_of(run_dir: Path, processes: int = 1) -> dict[int, list[str]]:
    logs = [row_log(run_dir, process) for process in range(processes)]
    return {step: [str(row) for log in logs for row in log[step]] for step in logs[0]}


def from_code(rows: list[str]) -> int:
    return sum(row.startswith("code:") for row in rows)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the mixture and a run on it that nobody disturbed."""
    folder = tmp_path_factory.mktemp("mixture")
    run_here(load_config(write_mixture(folder), "eval.every=10"))
    return folder


def test_a_mixture_trains_on_exact_shares_that_change_in_the_middle_of_a_step(straight: Path) -> None:
    steps = rows_of(straight / "run")
    rows = list(itertools.chain.from_iterable(steps[step] for step in sorted(steps)))
    assert [from_code(rows[:count]) for count in (4, 8, 28)] == [3, 6, 21]
    assert [from_code(rows[28:count]) for count in (32, 48, 80)] == [1, 5, 13]
    code = [row for row in rows if row.startswith("code:")]
    epochs = [code[:CODE_ROWS], code[CODE_ROWS : 2 * CODE_ROWS]]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"code:{row}" for row in range(CODE_ROWS))
    assert epochs[0] != epochs[1], "each epoch has an order of its own"
    evaluations = [line for line in read_metrics(straight / "run" / "metrics.jsonl") if "eval_loss" in line]
    assert len(evaluations) == 1


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("died", [7, pytest.param(9, marks=pytest.mark.slow)])
def test_a_mixture_resumed_after_its_change_of_weights_is_bit_equal(
    straight: Path, tmp_path: Path, workers: int, died: int
) -> None:
    path = straight / "mixture.yml"
    run_dir = tmp_path / "run"
    with crash_after(died):
        run_here(load_config(path, f"run_dir={run_dir}"))
    run_here(load_config(path, f"run_dir={run_dir}", f"data.workers={workers}"))
    assert step_losses(run_dir) == step_losses(straight / "run")
    assert rows_of(run_dir) == rows_of(straight / "run")
    ours, theirs = read_checkpoint(run_dir, 10), read_checkpoint(straight / "run", 10)
    assert all((ours[name] == theirs[name]).all() for name in theirs)


@pytest.mark.slow
def test_two_processes_with_workers_train_on_the_same_mixture(straight: Path, tmp_path: Path) -> None:
    arguments = [str(straight / "mixture.yml"), f"run_dir={tmp_path / 'run'}", "data.workers=2", "mesh.data=8"]
    results = train_group(arguments, timeout=240)
    assert [code for code, _ in results] == [0, 0], results
    assert (
        "data: code: 12 rows of 32 tokens, 100.00% full; weight 75.00%, 25.00% from row 28; 2.83 epochs"
        in results[0][1]
    )
    steps, expected = rows_of(tmp_path / "run", processes=2), rows_of(straight / "run")
    assert {step: sorted(rows) for step, rows in steps.items()} == {s: sorted(rows) for s, rows in expected.items()}
    losses = step_losses(tmp_path / "run")
    assert losses == pytest.approx(step_losses(straight / "run"), rel=1e-5)


def test_a_mixture_with_other_content_or_weights_is_refused_by_name_and_a_moved_one_is_not(tmp_path: Path) -> None:
    path = write_mixture(tmp_path)
    run_here(load_config(path, "steps=1"))
    with pytest.raises(ConfigError, match=r"data\.mixture\.code\.weight: *0\.75 -> 0\.5"):
        run_here(load_config(path, "steps=1", "data.mixture.code.weight=0.5"))
    with pytest.raises(ConfigError, match=r"data\.stages"):
        run_here(load_config(path, "steps=1", "data.stages=[]"))
    (tmp_path / "code").rename(tmp_path / "moved")
    run_here(load_config(path, "steps=1", f"data.mixture.code.dir={tmp_path / 'moved'}"))
    make_dataset(tmp_path / "code", make_documents([33] * CODE_ROWS, seed=9))
    with pytest.raises(ConfigError, match=r"data\.mixture \(code\): the data are others than the run was started on"):
        run_here(load_config(path, "steps=1"))


def test_data_sets_of_different_tokenizers_are_refused_with_both(tmp_path: Path) -> None:
    path = write_mixture(tmp_path)
    make_dataset(tmp_path / "small", make_documents([20] * 4, vocab=250), vocab=250)
    with pytest.raises(ConfigError) as error:
        run_here(load_config(path, f"data.mixture.web.dir={tmp_path / 'small'}"))
    for part in (f"code ({tmp_path / 'code'})", f"web ({tmp_path / 'small'})", "with 256 and 250 entries"):
        assert part in str(error.value)
    assert not (tmp_path / "run").exists()


def test_data_sets_of_different_ends_of_documents_are_refused(tmp_path: Path) -> None:
    path = write_mixture(tmp_path)
    edit_manifest(tmp_path / "web", lambda manifest: manifest["tokenizer"].update(end_of_document=7))
    with pytest.raises(ConfigError, match=r"another end of document \(id None, not 7\): .* --end-of-document"):
        run_here(load_config(path))


def test_a_mixture_whose_tokenizer_is_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    path = write_mixture(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.vocab: 252, but the tokenizer of .*code has 256 entries"):
        run_here(load_config(path, "model.vocab=252"))


def test_a_run_learns_from_prepared_json_lines_and_is_killed_and_resumed_bit_equal(tmp_path: Path) -> None:
    """Case 14 too: the model has exactly the tokenizer's entries."""
    (tmp_path / "text").mkdir()
    write_json_lines(tmp_path / "text" / "a.jsonl", [text(number) for number in range(200)])
    byte_tokenizer(256).save(str(tmp_path / "tokenizer.json"))
    command = [str(tmp_path / "text"), "--output", str(tmp_path / "data"), "--workers", "1", "--held-out", "0.1"]
    assert prepare([*command, "--tokenizer", str(tmp_path / "tokenizer.json"), "--end-of-document", "<0>"]) == 2
    assert prepare([*command, "--tokenizer", str(tmp_path / "tokenizer.json"), "--end-of-document", "\n"]) == 2
    assert prepare([*command, "--tokenizer", str(tmp_path / "tokenizer.json"), "--end-of-document", "Ā"]) == 0
    path = write_tiny(tmp_path, tmp_path / "data")
    overrides = ["data.pack=best_fit", "data.log_rows=true", "eval.every=5", "model.dropout=0.1"]
    metrics = run_here(load_config(path, *overrides))
    losses = step_losses(tmp_path / "run")
    assert losses[10] < 0.7 * losses[1]
    assert len([line for line in metrics if "eval_loss" in line]) == 2
    with crash_after(7):
        run_here(load_config(path, *overrides, f"run_dir={tmp_path / 'again'}"))
    run_here(load_config(path, *overrides, f"run_dir={tmp_path / 'again'}"))
    assert step_losses(tmp_path / "again") == losses
    assert row_log(tmp_path / "again") == row_log(tmp_path / "run")
    assert checkpoint_meta(tmp_path / "again", 10)["checksums"] == checkpoint_meta(tmp_path / "run", 10)["checksums"]


def test_best_fit_rows_of_every_epoch_hold_every_target_and_come_in_another_order(tmp_path: Path) -> None:
    lengths = [9, 14, 40, 3, 70, 22, 31] * 5
    make_dataset(tmp_path / "data", make_documents(lengths))
    path = write_tiny(tmp_path, tmp_path / "data")
    path.write_text(path.read_text().replace("steps: 10", "steps: null"))
    config = load_config(path, "data.pack=best_fit", "data.epochs=2", "data.log_rows=true")
    metrics = run_here(config)
    assert sum(line["tokens"] for line in metrics) == 2 * (sum(lengths) - len(lengths))
    rows = [row for step in row_log(tmp_path / "run").values() for row in step if row >= 0]
    half = len(rows) // 2
    assert sorted(rows[:half]) == sorted(rows[half:]) == list(range(half))
    assert rows[:half] != rows[half:]


@pytest.mark.slow
def test_best_fit_rows_are_the_same_for_workers_and_processes(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", make_documents([9, 14, 40, 3, 70, 22, 31] * 9))
    path = str(write_tiny(tmp_path, tmp_path / "data"))
    arguments = [path, "data.pack=best_fit", "data.log_rows=true", "steps=6", "mesh.data=8"]
    code, output = train([*arguments, f"run_dir={tmp_path / 'one'}"], devices=8)
    assert code == 0, output
    assert "% full" in output
    results = train_group([*arguments, f"run_dir={tmp_path / 'two'}", "data.workers=2"])
    assert [code for code, _ in results] == [0, 0], results
    assert step_losses(tmp_path / "two") == pytest.approx(step_losses(tmp_path / "one"), rel=1e-5)
    one, two = rows_of(tmp_path / "one"), rows_of(tmp_path / "two", processes=2)
    assert {step: sorted(rows) for step, rows in one.items()} == {step: sorted(rows) for step, rows in two.items()}
