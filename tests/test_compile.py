import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.compile import main
from tests.planner.programs import needs_cuda_compiler
from tests.runs import ROOT, environment

QUICKSTART = str(ROOT / "configs" / "quickstart.yml")


@needs_cuda_compiler
@pytest.mark.slow
def test_the_verb_gives_the_data_and_the_text_of_a_program(tmp_path: Path) -> None:
    small = ["mesh.fsdp=8", "precision=bfloat16", "model.layers=2", "model.vocab=256", "data.vocab=256"]
    more = ["--devices=8", "--target", "h100", "--json", "--text", str(tmp_path / "program.txt")]
    command = [sys.executable, "-m", "jaxtrain.compile", QUICKSTART, *small, *more]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "program.txt").read_text().startswith("HloModule jit_train_step")
    data = json.loads(done.stdout)
    assert data["mesh"]["fsdp"] == 8
    assert data["memory"]["peak"] > data["memory"]["arguments"]["params"] > 0
    assert data["axes"]["fsdp"]["bytes"] == data["collective_bytes"] > 0
    assert {"params.layers.mlp.up", "gradient of layers.mlp.up"} <= {c["moved"] for c in data["collectives"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([QUICKSTART, "--devices", "8", "--target", "h1000"], "unknown target h1000; did you mean h100?"),
        ([QUICKSTART, "--devices", "8", "model.layer=3"], "model.layers"),
        (["--devices", "8"], "no configuration file"),
        ([QUICKSTART, "--devices", "8", "--targets", "h100"], "unknown option --targets"),
        ([QUICKSTART, "--devices", "many"], "--devices: invalid int value: 'many'"),
        ([QUICKSTART], "--devices"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("error: ")
    assert shown.out == ""


@needs_cuda_compiler
def test_a_mesh_that_doesnt_fit_the_devices_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([QUICKSTART, "--devices", "8", "mesh.data=1", "mesh.fsdp=3"]) == 2
    assert "mesh.fsdp=3" in capsys.readouterr().err


def test_it_says_how_it_is_used_and_prints_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "a100, b200, h100, h200" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        main([QUICKSTART, "--devices", "8", "seed=17", "--print-config"])
    assert exit_.value.code == 0
    assert "seed: 17" in capsys.readouterr().out


def test_an_interrupt_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxtrain.compile._compile", interrupted)
    assert main([QUICKSTART, "--devices", "8"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
