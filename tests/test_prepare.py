"""`python -m jaxtrain.prepare` as a person uses it: real processes, real files, one line for every mistake."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken

from jaxtrain.data import open_dataset
from jaxtrain.prepare import main
from tests.data.prepare.corpus import ROOT, content, text, verb, write_corpus, write_json_lines
from tests.factories import byte_tokenizer

SETTINGS = ("--vocab", "300", "--held-out", "0.2", "--shard-tokens", "4000")


def refused(arguments: list[str | Path], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that ends with `code`."""
    assert main([str(argument) for argument in arguments]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    errors = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, shown.err
    return errors[0]


def test_a_corpus_becomes_a_data_set_that_says_what_it_is(tmp_path: Path) -> None:
    write_corpus(tmp_path / "text")
    done = verb(tmp_path / "text", "--output", tmp_path / "data", "--workers", "2", *SETTINGS)
    assert done.returncode == 0, done.stderr
    manifest = open_dataset(tmp_path / "data").manifest
    train = manifest.splits["train"]
    assert f"{tmp_path / 'data'}: complete" in done.stdout
    assert f"train: {train.documents} documents, {train.tokens:,} tokens in {len(train.shards)} shards" in done.stdout
    assert "tokenizer: 300 entries, so model.vocab must be at least that" in done.stdout
    assert "writing shards" in done.stderr
    again = verb(tmp_path / "text", "--output", tmp_path / "data", *SETTINGS)
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert "tokenising" not in again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_while_it_works_the_same_command_ends_with_the_same_bytes(tmp_path: Path, workers: int) -> None:
    """The verb itself, its workers too, killed when files of its own show how far it is."""
    write_corpus(tmp_path / "text")
    write_json_lines(tmp_path / "text" / "more.jsonl", [text(number % 400) for number in range(4000)])
    arguments = [tmp_path / "text", "--vocab", "600", "--held-out", "0.2", "--shard-tokens", "20000"]
    alone = verb(*arguments, "--output", tmp_path / "alone", "--workers", "1")
    assert alone.returncode == 0, alone.stderr
    for stage in ("tokenizer.json", "dataset/*.arrayrecord"):
        command = [*arguments, "--output", tmp_path / "data", "--workers", workers]
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxtrain.prepare", *map(str, command)], cwd=ROOT, stderr=subprocess.PIPE
        )
        while process.poll() is None and not list((tmp_path / "data.unfinished").glob(stage)):
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        assert process.stderr is not None
        process.stderr.read()  # until every process that holds it is gone, workers too
        assert process.wait() == -signal.SIGKILL, stage
        assert not (tmp_path / "data").exists()
    done = verb(*command)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "data") == content(tmp_path / "alone")


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """A limit on the size of a file stands for the disk."""
    (tmp_path / "text").mkdir()
    random = "".join(chr(33 + byte % 90) for byte in os.urandom(120_000))
    write_json_lines(tmp_path / "text" / "a.jsonl", [random[start : start + 400] for start in range(0, 120_000, 400)])
    arguments = [tmp_path / "text", "--output", tmp_path / "data", "--vocab", "257", "--workers", "1"]

    full = verb(*arguments, within=("bash", "-c", 'ulimit -f 97; exec "$@"', "-"))
    assert full.returncode == 2, full.stderr
    (line,) = [line for line in full.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path / 'data'}: File too large; choose a directory that can be written and has space" in line
    assert "Traceback" not in full.stderr
    assert not (tmp_path / "data").exists()
    assert verb(*arguments).returncode == 0
    open_dataset(tmp_path / "data").verify()


def test_bad_requests_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").mkdir()
    write_json_lines(tmp_path / "text" / "a.jsonl", ["one"] * 10, key="body")
    out: list[str | Path] = ["--output", tmp_path / "data"]
    for arguments, words in (
        ([tmp_path / "none", *out], "none: matches no file"),
        ([tmp_path / "text"], "--output DIR"),
        ([*out], "at least one SOURCE"),
        ([tmp_path / "text", *out], "a.jsonl:1: has no key 'text'; there are id, body: choose one with --text-key"),
        ([tmp_path / "text", *out, "--vocab", "30"], "a vocabulary of 30 is too small"),
        ([tmp_path / "text", *out, "--vocab", "300", "--tokenizer", tmp_path], "give one of them"),
        ([tmp_path / "text", *out, "--tokenizer", tmp_path], "tokenizer.json: no such file"),
        ([tmp_path / "text", *out, "--end-of-document", "x"], "--end-of-document is a token of --tokenizer"),
        ([tmp_path / "text", *out, "--workers", "0"], "--workers 0"),
        ([tmp_path / "text", *out, "--held-out", "1"], "held_out 1.0 is no share"),
        ([tmp_path / "text", *out, "--workers", "many"], "--workers: invalid int value: 'many'"),
        (["--verify", tmp_path / "none"], "none: no such directory"),
        (["--verify", tmp_path / "none", *out], "--verify takes the data set and nothing else"),
        ([tmp_path / "text", "--output", tmp_path / "text" / "a.jsonl" / "x", "--text-key", "body"], "a.jsonl"),
    ):
        assert words in refused(arguments, 2, capsys)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_is_named_by_whichever_process_finds_it_and_can_be_passed_over(
    tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("</s>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "text").mkdir()
    for number in range(2):
        with gzip.open(tmp_path / "text" / f"{number}.jsonl.gz", "wt", compresslevel=1) as file:
            file.write("".join(json.dumps({"text": f"{n} {'x' * n}"}) + "\n" for n in range(200)))
            file.write('{"text": "torn' if number else "")
    arguments: list[str | Path] = [tmp_path / "text", "--output", tmp_path / "data", "--workers", str(workers)]
    arguments += ["--tokenizer", folder, "--end-of-document", "</s>", "--held-out", "0"]
    assert "1.jsonl.gz:201: not JSON" in refused(arguments, 2, capsys)
    assert main([str(argument) for argument in [*arguments, "--skip-invalid"]]) == 0
    assert "left out: 0 empty and 1 invalid documents" in capsys.readouterr().out
    assert open_dataset(tmp_path / "data").manifest.splits["train"].documents == 400


def test_verify_reads_every_file_and_names_the_one_that_is_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_corpus(tmp_path / "text")
    assert main([str(tmp_path / "text"), "--output", str(tmp_path / "data"), *SETTINGS, "--workers", "1"]) == 0
    assert main(["--verify", str(tmp_path / "data")]) == 0
    shown = capsys.readouterr()
    manifest = open_dataset(tmp_path / "data").manifest
    files = len(manifest.files())
    assert f"comparing files: {files} of {files}" in shown.err
    for record in manifest.files():
        path = tmp_path / "data" / record.file
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert f"error: {path}: " in refused(["--verify", tmp_path / "data"], 5, capsys)
        path.write_bytes(before)
