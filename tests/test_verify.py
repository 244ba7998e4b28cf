"""The certificate of equality: it passes for what is right, and fails for what isn't."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxtrain import program, step
from jaxtrain.config import load
from jaxtrain.sharding import current_layout
from jaxtrain.verification import Certificate, verify
from jaxtrain.verify import main
from tests.runs import COMPILE_CACHE, ROOT, environment

CONFIGS = {path.stem: path for path in sorted((ROOT / "configs").glob("*.yml"))}
OWN = [
    str(ROOT / "scripts" / "own_task.yml"),
    f"compile_cache={COMPILE_CACHE}",
    "model.target=scripts.own_task:Regression",
    "data.target=scripts.own_task:make_data",
    "data.rows=64",
]
WRONG = [*OWN, "model.target=tests.verification.tasks:NormalizedOverRows"]
WRONG.remove("model.target=scripts.own_task:Regression")


@pytest.fixture(autouse=True)
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets variables for JAX; they go with the test."""
    monkeypatch.setattr(os, "environ", os.environ.copy())


def certified(path: str, *overrides: str, progress: Callable[[str], None] = lambda text: None) -> Certificate:
    return verify(load(path, list(overrides)), jax.devices(), progress)


@functools.cache
def of_own_task() -> tuple[Certificate, list[str]]:
    told: list[str] = []
    return certified(*OWN, "mesh.fsdp=2", "mesh.tensor=2", "microbatch=16", progress=told.append), told


def failed(certificate: Certificate) -> list[str]:
    """The checks that didn't pass; initial parameters have the same bits only as users compile them."""
    checks = [check for check in certificate.failed if check.what != "initial parameters" or check.difference > 1e-6]
    return [check.what for check in checks]


def test_a_task_of_one_s_own_passes_on_its_own_data() -> None:
    certificate, _ = of_own_task()
    assert certificate.passed
    assert certificate.mesh == {"fsdp": 2, "tensor": 2}
    assert certificate.devices == 4
    assert certificate.rows == "rows of data.target=scripts.own_task:make_data, some not counted"
    differences = {check.what: check.difference for check in certificate.checks}
    assert differences["initial parameters"] == 0
    assert max(differences.values()) < 1e-5
    losses = [check.one_device for check in certificate.checks if check.what.startswith("loss")]
    assert len(set(losses)) == len(losses) == 4, "it has to train"
    assert not any(check.left_out for check in certificate.checks)


def test_it_tells_what_it_is_doing() -> None:
    _, told = of_own_task()
    what = ["initial parameters", *(f"step {i} of 4" for i in range(1, 5))]
    assert told == [
        *(f"{name}: compiling the step" for name in ("one device", "the mesh")),
        *(f"{name}: {each}" for name in ("one device", "the mesh") for each in what),
        "the mesh: step 4 from the state of the other",
    ]


def test_a_loss_that_depends_on_the_rows_of_its_micro_batch_fails() -> None:
    certificate = certified(*WRONG, "microbatch=1")
    assert {"loss of step 1", "gradients of step 1", "parameters after step 4"} <= set(failed(certificate))
    assert "initial parameters" not in failed(certificate)
    assert certified(*WRONG).passed, "in one pass there is nothing wrong with it"


def test_a_model_whose_small_likeness_cannot_read_its_data_is_trained_as_it_is() -> None:
    certificate = certified(*WRONG[:-1], "model.target=tests.verification.tasks:ReadsMore", "model.width=8")
    assert certificate.passed
    assert "the model isn't made small, since what shrunk() gives doesn't read them" in certificate.rows


@pytest.mark.slow
def test_stages_of_a_model_of_one_s_own_pass_on_random_tokens() -> None:
    certificate = certified(*LANGUAGE, "mesh.pipeline=3", "microbatch=1", "optimizer.name=sgd")
    assert failed(certificate) == []
    assert certificate.rows == "random tokens, some not counted"
    assert certificate.mesh == {"pipeline": 2}


def test_a_gradient_that_is_wrong_on_the_mesh_alone_fails_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = program._as_kept

    def wrong(gradients: Any, infos: Any, layout: Any) -> Any:
        factor = 1.001 if layout.splits else 1
        return kept({**gradients, "shift": gradients["shift"] * factor}, infos, layout)

    monkeypatch.setattr(program, "_as_kept", wrong)
    certificate = certified(*WRONG, "mesh.fsdp=2")
    check = next(check for check in certificate.failed if check.what == "gradients of step 1")
    assert check.where == "shift"
    assert check.difference == pytest.approx(1e-3, rel=0.01)
    assert "loss of step 1" not in failed(certificate)


def test_an_update_that_is_wrong_on_the_mesh_alone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = step.clip_by_norm

    def wrong(gradients: Any, norm: Any, limit: float | None) -> Any:
        layout = current_layout()
        factor = 1.001 if layout is not None and layout.splits else 1
        return jax.tree.map(lambda leaf: leaf * factor, clip(gradients, norm, limit))

    monkeypatch.setattr(step, "clip_by_norm", wrong)
    certificate = certified(*WRONG, "mesh.fsdp=2", "optimizer.name=sgd")
    assert {"parameters after step 4", "update of step 4 from the same state"} <= set(failed(certificate))
    assert "gradients of step 4 from the same state" not in failed(certificate)
    assert not {"loss of step 1", "gradient norm of step 1", "gradients of step 1"} & set(failed(certificate))


def test_the_verb_ends_with_7_and_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WRONG, "microbatch=1"]) == 7
    shown = capsys.readouterr()
    assert "\nFAILED\n" in shown.out
    error = shown.err.splitlines()[-1]
    assert error.startswith("error: the mesh doesn't train as one device does: loss of step 1, gradient norm of step 1")


def test_the_verb_prints_a_certificate_writes_json_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "certificate.json"
    assert main([*OWN, "mesh.fsdp=4", f"run_dir={run_dir}", "--json", str(file)]) == 0
    shown = capsys.readouterr()
    assert "fsdp 2 (2 virtual CPU devices), against one device in one pass" in shown.out
    assert "fsdp 4 → 2" in shown.out
    assert "float32, whatever the config says" in shown.out
    assert shown.out.endswith("\nPASSED\n")
    assert "the mesh: compiling the step …" in shown.err
    data = json.loads(file.read_text())
    assert data["passed"] is True
    assert data["mesh"] == {"fsdp": 2}
    assert data["config"]["global_batch"] == 4
    assert {check["what"]: check["passed"] for check in data["checks"]} == dict.fromkeys(
        [
            "initial parameters",
            *(f"{what} of step {i}" for what in ("loss", "gradient norm") for i in range(1, 5)),
            "gradients of step 1",
            "parameters after step 4",
            "gradients of step 4 from the same state",
            "update of step 4 from the same state",
        ],
        True,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["certificate.json"]


def test_json_alone_takes_the_table_s_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WRONG, "microbatch=1", "--json"]) == 7
    data = json.loads(capsys.readouterr().out)
    assert data["passed"] is False
    assert {check["what"] for check in data["checks"] if not check["passed"]} >= {"loss of step 1"}


TASKS = "tests.verification.tasks"
LANGUAGE = [
    str(CONFIGS["quickstart"]),
    f"compile_cache={COMPILE_CACHE}",
    f"model={{target: '{TASKS}:language', layers: 6}}",
    "data.vocab=300",
]
REFUSED = {
    "an unknown key": ([*OWN, "mesh.fdsp=2"], "mesh.fsdp"),
    "stages of what has no layers": ([*OWN, "mesh.pipeline=4"], "mesh.pipeline=4, but a Regression isn't cut"),
    "a small task that is none": (
        [*WRONG[:-1], f"model.target={TASKS}:Shapeless"],
        f"model.target={TASKS}:Shapeless: shrunk() gives a NoneType",
    ),
    "a small task that doesn't divide": (
        [*WRONG[:-1], f"model.target={TASKS}:Odd", "mesh.fsdp=4"],
        f"15, which mesh.fsdp=2 doesn't divide; nearest size that works: 14 (in sizes that were made small, by {TASKS}",
    ),
    "too few small layers": (
        [*LANGUAGE, "mesh.pipeline=3", "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2"],
        "shrunk() gives a task of 2 layers, too few for 2 stages of pipeline.chunks=2; let it keep at least 4",
    ),
    "too few layers": ([*LANGUAGE, "mesh.pipeline=7"], "mesh.pipeline=7 × pipeline.chunks=1 = 7 virtual stages"),
    "no config": ([], "no configuration file"),
    "a config for JSON": (["--json", OWN[0]], f"--json {OWN[0]}: is no name"),
    "an override for JSON": ([OWN[0], "--json", "seed=3"], "--json seed=3: is no name"),
    "an unknown option": ([*OWN, "--jsn"], "unknown option --jsn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_request_is_refused_in_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = REFUSED[name]
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for file, message in ((tmp_path / "nowhere" / "a.json", "no directory"), (tmp_path, "Is a directory")):
        assert main([*OWN, "--json", str(file)]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"error: --json {file}: ")
        assert message in error
        assert "name a file that can be written" in error


def test_it_says_how_it_is_used_and_prints_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    assert "virtual CPU devices" in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit_:
        main([*OWN, "seed=17", "--print-config"])
    assert exit_.value.code == 0
    assert "seed: 17" in capsys.readouterr().out


def test_too_few_devices_are_refused_with_what_made_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: alone)
    assert main([*OWN, "mesh.fsdp=8", "mesh.tensor=8"]) == 2
    assert "needs 4 virtual CPU devices, but the environment makes 1; unset" in capsys.readouterr().err


STRUCTURES: dict[str, tuple[str, list[str]]] = {
    **{name: (name, []) for name in CONFIGS},
    "llama3-70b pipelined": ("llama3-70b", ["mesh.pipeline=4", "mesh.fsdp=8", "microbatch=1"]),
    "digits-vit pipelined": ("digits-vit", ["mesh.pipeline=2", "mesh.tensor=2", "microbatch=16", "remat=dots"]),
    "chunks, dropout, tied": (
        "quickstart",
        ["mesh.pipeline=2", "pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2", "microbatch=1",
         "model.dropout=0.3", "model.tied_embeddings=true", "remat=full", "optimizer.name=lion"],
    ),
    "frozen, averaged, gathered once, ZeRO 2": (
        "quickstart",
        ["mesh.data=2", "mesh.fsdp=2", "microbatch=1", "sharding.zero=2", "fsdp.gather=step", "optimizer.name=muon",
         "optimizer.frozen=['embed.*']", "ema={decay: 0.9}", "data.pack=false", "model.bias=all"],
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", STRUCTURES)
def test_the_structure_of_each_shipped_config_passes(name: str) -> None:
    config, overrides = STRUCTURES[name]
    certificate = certified(str(CONFIGS[config]), *overrides)
    assert failed(certificate) == []
    assert certificate.devices > 1


@pytest.mark.slow
def test_the_command_makes_the_devices_it_needs_and_needs_no_data(tmp_path: Path) -> None:
    for file in ("own_task.py", "own_task.yml"):
        shutil.copy(ROOT / "scripts" / file, tmp_path)
    command = [sys.executable, "-m", "jaxtrain.verify", "own_task.yml", "mesh.fsdp=8", f"compile_cache={COMPILE_CACHE}"]
    variables = {name: value for name, value in environment(1).items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nPASSED\n")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "own_task.py",
        "own_task.yml",
    ]
    decoder = [str(CONFIGS["quickstart"]), f"compile_cache={COMPILE_CACHE}", "data.dir=nowhere"]
    done = subprocess.run([*command[:3], *decoder], cwd=tmp_path, env=variables, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "nowhere").exists()
