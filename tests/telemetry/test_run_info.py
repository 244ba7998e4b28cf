import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.files import replace_json
from jaxtrain.telemetry.run_info import git_state, package_versions, run_info

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one committed package and a folder beside it."""
    folder = tmp_path / "checkout"
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "module.py").write_text("a = 1\n")
    (folder / "notes.txt").write_text("hello\n")
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--message", "first")
    return folder


def git(folder, *arguments):
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout.strip()


@needs_git
def test_the_commit_of_the_code_is_told(checkout):
    assert git_state(checkout / "package") == {"commit": git(checkout, "rev-parse", "HEAD"), "dirty": False}


@needs_git
@pytest.mark.parametrize("changed", ["module.py", "new.py"])
def test_changed_and_new_files_of_the_code_make_it_dirty(checkout, changed):
    (checkout / "package" / changed).write_text("a = 2\n")
    assert git_state(checkout / "package")["dirty"] is True


@needs_git
def test_changed_files_beside_the_code_do_not_make_it_dirty(checkout):
    (checkout / "notes.txt").write_text("changed\n")
    assert git_state(checkout / "package")["dirty"] is False


@needs_git
def test_the_checkout_of_someone_else_is_not_taken_for_the_codes(checkout):
    installed = checkout / "environment" / "package"
    installed.mkdir(parents=True)
    (installed / "module.py").write_text("a = 1\n")
    assert git_state(installed) is None


@needs_git
def test_git_variables_of_the_caller_do_not_mislead(checkout, monkeypatch):
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    assert git_state(checkout / "package") is not None


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    assert git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert git_state(Path(__file__).parent) is None
    assert "git" not in run_info(seed=0, data_manifest_hash=None, devices={})


def test_run_info_tells_what_one_needs_to_repeat_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one=1  --two=2")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "jaxtrain.train", "my config.yml"])
    info = run_info(seed=7, data_manifest_hash="sha256:ab", devices={"kind": "cpu", "count": 8})
    assert info["command"] == "python -m jaxtrain.train 'my config.yml'"
    assert info["seed"] == 7
    assert info["data_manifest_hash"] == "sha256:ab"
    assert info["devices"] == {"kind": "cpu", "count": 8}
    assert info["xla_flags"] == ["--one=1", "--two=2"]
    assert info["python"].startswith("3.")
    assert info["host"]
    replace_json(tmp_path / "run.json", info)
    assert json.loads((tmp_path / "run.json").read_text()) == info


def test_package_versions_are_those_that_run():
    import jax

    versions = package_versions()
    assert versions["jax"] == jax.__version__
    assert set(versions) == {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"}


def test_telemetry_is_importable_without_jax():
    modules = sorted(path.stem for path in Path(run_info.__code__.co_filename).parent.glob("[a-z]*.py"))
    assert len(modules) >= 6
    imports = "; ".join(f"import jaxtrain.telemetry.{module}" for module in modules)
    program = f"import sys; {imports}; assert not {{'jax', 'jaxlib', 'flax'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
