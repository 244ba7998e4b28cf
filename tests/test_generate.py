"""`python -m jaxtrain.generate`: what it prints, on which mesh, and what it refuses."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import load
from jaxtrain.generate import main
from tests.factories import byte_tokenizer
from tests.runs import Straight, content, run_here, start, train_each, train_group

GREEDY = ["--temperature", "0", "--tokens", "6", "--json"]
VIT = """
run_dir: {run_dir}
steps: 1
model: {{family: vit, layers: 1, embed: 16, heads: 2, mlp: 16}}
data: {{kind: digits}}
"""


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`main` sets variables for JAX; they go with the test. The compile cache of users is left alone."""
    monkeypatch.setattr(os, "environ", {**os.environ, "HOME": str(tmp_path / "home")})


@pytest.fixture
def run(straight: Straight) -> str:
    return str(straight("fsdp=8"))


def generated(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(arguments) == 0, capsys.readouterr().err
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert "Traceback" not in shown.err
    return shown.err


@pytest.mark.parametrize(
    "mesh", [["mesh.fsdp=4", "mesh.tensor=2"], ["mesh.pipeline=2", "mesh.fsdp=2", "mesh.tensor=2"]]
)
def test_prompts_are_continued_on_another_mesh_than_the_run_s_and_nothing_is_written(
    mesh: list[str], run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a longer prompt\nx\n")
    before = content(Path(run))
    asked = [run, "--prompt", "def ", "--prompts", str(file), *GREEDY]
    found = generated([*asked, "mesh.data=1", *mesh], capsys)
    assert [line["prompt"] for line in found] == ["def ", "a longer prompt", "x"]
    assert all(len(line["tokens"]) == 6 and not line["ended"] for line in found)
    assert content(Path(run)) == before
    alone = [generated([run, "--prompt", line["prompt"], *GREEDY], capsys)[0] for line in found]
    assert alone == found
    assert generated([*asked, "--batch", "2"], capsys) == found


def test_a_single_prompt_is_shown_as_it_grows_and_several_with_headings(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = GREEDY[:-1]
    (line,) = generated([run, "--prompt", "def ", *GREEDY], capsys)
    assert main([run, "--prompt", "def ", *plain]) == 0
    assert capsys.readouterr().out == f"def {line['text']}\n"
    assert main([run, "--prompt", "def ", "--prompt", "def ", *plain]) == 0
    one = f"def {line['text']}\n"
    assert capsys.readouterr().out == f"--- 1 of 2\n{one}--- 2 of 2\n{one}"


def test_the_step_is_chosen_and_another_seed_draws_other_tokens(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ["--prompt", "ab", "--tokens", "12", "--json", "--top-p", "0.9", "--top-k", "40"]
    newest = generated([run, *drawn], capsys)
    assert generated([f"{run}@10", *drawn], capsys) == newest
    assert generated([f"{run}@5", *drawn], capsys) != newest
    assert generated([run, *drawn, "--seed", "1"], capsys) != newest


def test_it_computes_in_the_precision_that_is_asked_for(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [run, "--prompt", "def ", *GREEDY]
    (wanted,) = generated(asked, capsys)
    (found,) = generated([*asked, "precision=bfloat16"], capsys)
    assert len(found["tokens"]) == 6
    assert found["tokens"][0] == wanted["tokens"][0]


def test_without_a_number_of_tokens_the_row_is_filled(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = generated([run, "--prompt", "x" * 20, "--json"], capsys)
    assert len(line["tokens"]) == 13, "of a row of 32, 20 are the prompt's, and the last token is never read"
    (line,) = generated([run, "--prompt", "x" * 20, "--json", "data.sequence=48"], capsys)
    assert len(line["tokens"]) == 29


def test_the_run_keeps_its_tokenizer_and_without_it_the_data_s_or_another_is_used(
    run: str, tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--prompt", "é", *GREEDY]
    gone = f"data.dir={tmp_path / 'gone'}"
    wanted = generated([run, *asked, gone], capsys)
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "tokenizer")
    assert generated([str(copy), *asked], capsys) == wanted
    message = refused([str(copy), *asked, gone], capsys)
    assert "--tokenizer PATH" in message
    assert str(tmp_path / "gone") in message
    assert generated([str(copy), *asked, gone, "--tokenizer", str(tiny_data)], capsys) == wanted
    assert generated([str(copy), *asked, gone, "--tokenizer", str(tiny_data / "tokenizer.json")], capsys) == wanted


def test_a_tokenizer_with_more_entries_than_the_model_has_rows_is_refused(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    byte_tokenizer(300).save(str(tmp_path / "tokenizer.json"))
    message = refused([run, "--prompt", "x", "--tokenizer", str(tmp_path)], capsys)
    assert "300" in message
    assert "256" in message


def test_a_model_that_does_not_read_tokens_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "vit.yml"
    path.write_text(VIT.format(run_dir=tmp_path / "run"))
    run_here(load(path))
    capsys.readouterr()
    message = refused([str(tmp_path / "run"), "--prompt", "x"], capsys)
    assert "VisionTask can't go on with text" in message


def test_a_letter_of_several_tokens_is_shown_once_it_is_whole() -> None:
    from jaxtrain.data.vocabulary import Vocabulary

    vocabulary = Vocabulary(byte_tokenizer(), end=None)
    prompt, letter = vocabulary.encode("a"), list("é…".encode())
    assert [vocabulary.continuation(prompt, letter[:count], whole=False) for count in range(1, 6)] == [
        "", "é", "é", "é", "é…",
    ]  # fmt: skip
    assert vocabulary.continuation(prompt, letter[:1]) == "\ufffd"


REFUSED = {
    "no prompt": ([], ["--prompt"]),
    "an empty prompt": (["--prompt", ""], ['prompt ""', "empty"]),
    "a prompt longer than a row": (["--prompt", "x" * 33], ["33 tokens", "rows of 32", "data.sequence"]),
    "more tokens than a row has room for": (["--prompt", "x" * 30, "--tokens", "4"], ["--tokens 4", "room for 3"]),
    "a negative temperature": (["--prompt", "x", "--temperature", "-1"], ["--temperature", "-1"]),
    "a temperature that float32 lacks": (["--prompt", "x", "--temperature", "1e39"], ["--temperature", "1e38"]),
    "bytes that are no text": (["--prompt", "ab\udcff"], ['"ab\\udcff"', "UTF-8", "character 3"]),
    "top-p above 1": (["--prompt", "x", "--top-p", "1.5"], ["--top-p", "1.5"]),
    "top-k of nothing": (["--prompt", "x", "--top-k", "0"], ["--top-k", "0"]),
    "no number": (["--prompt", "x", "--tokens", "many"], ["--tokens", "many"]),
    "an unknown option": (["--prompt", "x", "--temprature", "1"], ["--temprature", "--help"]),
    "a key that does nothing here": (["--prompt", "x", "seed=3"], ["override seed=3", "changes nothing here"]),
    "a section that does nothing here": (["--prompt", "x", "optimizer.b1=0"], ["optimizer.b1", "leave it out"]),
    "a schedule, where nothing is pipelined": (["--prompt", "x", "pipeline.schedule=gpipe"], ["pipeline.schedule"]),
    "ZeRO, where no optimizer is": (["--prompt", "x", "sharding.zero=1"], ["sharding.zero", "changes nothing here"]),
    "an unknown key": (["--prompt", "x", "mesh.tensr=2"], ["mesh.tensr", "mesh.tensor"]),
    "a mesh that does not fit": (["--prompt", "x", "mesh.tensor=3"], ["mesh.tensor=3"]),
    "a missing file": (["--prompts", "nowhere.txt"], ["nowhere.txt"]),
    "no moving average": (["--prompt", "x", "--ema"], ["keeps no moving average of the weights"]),
    "no tokenizer there": (["--prompt", "x", "--tokenizer", "nowhere"], ["nowhere"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_request_is_one_error(name: str, run: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, words = REFUSED[name]
    message = refused([run, *arguments], capsys)
    for word in words:
        assert word in message


def test_a_run_or_step_that_is_not_there_is_named(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere" in refused(["nowhere", "--prompt", "x"], capsys)
    assert "there are 5, 10" in refused([f"{run}@7", "--prompt", "x"], capsys)


@pytest.mark.slow
def test_two_processes_give_the_same_text_once(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [run, "--prompt", "def ", "--prompt", "x", *GREEDY]
    wanted = generated(asked, capsys)
    arguments = [*asked, "mesh.data=1", "mesh.fsdp=4", "mesh.tensor=2"]
    first, second = train_group(arguments, program=("-m", "jaxtrain.generate"))
    assert (first[0], second[0]) == (0, 0), first[1] + second[1]
    assert [json.loads(line) for line in first[1].splitlines() if line.startswith("{")] == wanted
    assert "{" not in second[1]


@pytest.mark.slow
def test_two_processes_that_were_asked_for_different_things_are_refused(run: str) -> None:
    asked = [[run, "--prompt", prompt, *GREEDY] for prompt in ("x", "longer")]
    for code, output in train_each(asked, ("-m", "jaxtrain.generate")):
        assert code == 2, output
        assert "error: " in output
        assert "the processes were started with different options; give all the same" in output


@pytest.mark.slow
def test_an_interrupt_is_one_line_and_exit_code_130(run: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompts")
    process = start([run, "--prompts", str(tmp_path / "prompts")], program=("-m", "jaxtrain.generate"))
    with (tmp_path / "prompts").open("w"):  # returns once the other side reads
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "interrupted\n")
