"""The scripts on a checkout of their own whose lock files are empty, so that no package is downloaded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
FAKE_UV = """#!{python}
import pathlib, subprocess, sys
match sys.argv[1:]:
    case ["venv", *_, "--python", python, environment]:
        subprocess.run([python, "-m", "venv", "--without-pip", environment], check=True)
    case ["pip", "install", *arguments]:
        assert "--require-hashes" in arguments
        locks = [argument for argument in arguments if argument.endswith(".lock")]
        pathlib.Path({installed!r}).write_text(" ".join(pathlib.Path(lock).name for lock in locks))
    case unknown:
        sys.exit(f"unknown: {{unknown}}")
"""
ENTRY_POINT = "import os, sys; print(os.getcwd(), sys.argv[1:])\n"


@pytest.fixture
def checkout(tmp_path):
    """A checkout in a folder with a space, its `jaxtrain.train` telling where and with what it was called."""
    root = tmp_path / "my checkout"
    shutil.copytree(SCRIPTS, root / "scripts")
    for lock in ("requirements.lock", "requirements-cuda12.lock"):
        (root / lock).write_text(f"# {lock}\n")
    (root / "jaxtrain").mkdir()
    (root / "jaxtrain" / "train.py").write_text(ENTRY_POINT)
    return root


@pytest.fixture
def uv(tmp_path):
    """A PATH with a uv that makes environments at once and only writes down, in `installed`, what it should install."""
    folder = tmp_path / "uv"
    folder.mkdir()
    (folder / "uv").write_text(FAKE_UV.format(python=sys.executable, installed=str(tmp_path / "installed")))
    (folder / "uv").chmod(0o755)
    return f"{folder}:{path_without_uv()}"


def path_without_uv():
    return ":".join(part for part in os.environ["PATH"].split(":") if not Path(part, "uv").exists())


def call(script, *arguments, path, folder=None):
    return subprocess.run(
        [script, *arguments],
        cwd=folder,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def set_up(checkout, *arguments, path):
    result = call(checkout / "scripts" / "setup", "--python", sys.executable, *arguments, path=path)
    assert result.returncode == 0, result.stderr
    return result


def test_setup_makes_an_environment_once_and_again_when_it_is_not_what_the_locks_say(checkout, uv):
    setup = checkout / "scripts" / "setup"
    assert "making .venv" in set_up(checkout, "--no-cuda", path=uv).stderr
    again = call(setup, path=uv)
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith(f"ready: {checkout}/.venv (Python 3.")

    (checkout / "requirements.lock").write_text("# another lock\n")
    assert "making .venv" in call(setup, path=uv).stderr
    half_made = checkout / ".venv" / "half-made"
    half_made.touch()
    (checkout / ".venv" / "setup-complete").unlink()
    assert "making .venv" in call(setup, path=uv).stderr
    assert not half_made.exists()


def test_cuda_comes_with_a_driver_or_a_flag_and_the_choice_is_remembered(checkout, uv, tmp_path):
    driver = tmp_path / "driver"
    driver.mkdir()
    (driver / "nvidia-smi").symlink_to(shutil.which("true"))
    with_driver = f"{driver}:{uv}"
    setup, installed = checkout / "scripts" / "setup", tmp_path / "installed"
    set_up(checkout, path=with_driver)
    assert installed.read_text() == "requirements.lock requirements-cuda12.lock"
    (checkout / "requirements-cuda12.lock").write_text("# another lock\n")
    assert "and CUDA 12" in call(setup, path=uv).stderr
    set_up(checkout, "--no-cuda", path=uv)
    assert installed.read_text() == "requirements.lock"
    assert call(setup, path=with_driver).stderr == ""
    set_up(checkout, "--cuda", path=uv)
    assert installed.read_text() == "requirements.lock requirements-cuda12.lock"


def test_train_works_from_any_folder_through_a_link_and_keeps_the_callers_folder(checkout, uv, tmp_path):
    set_up(checkout, "--no-cuda", path=uv)
    link = tmp_path / "train"
    link.symlink_to(checkout / "scripts" / "train")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    result = call(link, "my config.yml", "steps=3", folder=elsewhere, path=uv)
    assert result.stdout == f"{elsewhere} ['my config.yml', 'steps=3']\n", result.stderr


@pytest.mark.slow
def test_setups_at_the_same_time_make_one_environment(checkout):
    command = [checkout / "scripts" / "setup", "--no-cuda", "--python", sys.executable]
    pip_only = os.environ | {"PATH": path_without_uv()}
    setups = [
        subprocess.Popen(command, env=pip_only, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [setup.communicate(timeout=300)[1] for setup in setups]
    assert [setup.returncode for setup in setups] == [0, 0, 0]
    assert "".join(said).count("making .venv") == 1


@pytest.mark.slow
@pytest.mark.parametrize("hash_", [f" --hash=sha256:{'0' * 64}", ""], ids=["wrong hash", "no hash"])
def test_a_package_that_the_lock_does_not_vouch_for_is_refused_and_nothing_is_called_ready(checkout, hash_):
    wheel = checkout / "thing-1.0-py3-none-any.whl"
    shutil.make_archive(str(wheel), "zip", checkout / "scripts")
    wheel.with_suffix(".whl.zip").rename(wheel)
    (checkout / "requirements.lock").write_text(f"thing @ {wheel.as_uri()}{hash_}\n")
    result = call(checkout / "scripts" / "setup", "--no-cuda", "--python", sys.executable, path=path_without_uv())
    assert result.returncode != 0
    assert "hash" in result.stderr.lower()
    assert "ready" not in result.stdout
    assert not (checkout / ".venv" / "setup-complete").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gpu"], "unknown argument '--gpu'; known are --cuda, --no-cuda and --python PYTHON"),
        (["--python"], "--python needs an interpreter"),
        (["--python", "python2.0"], "cannot run 'python2.0'"),
    ],
)
def test_a_wrong_argument_of_setup_is_one_line(checkout, arguments, says):
    result = call(checkout / "scripts" / "setup", *arguments, path=path_without_uv())
    assert result.returncode == 2
    assert result.stderr.startswith(f"setup: {says}")
    assert result.stderr.count("\n") == 1


def fake_python(folder, version):
    folder.mkdir()
    python = folder / "python3"
    python.write_text(
        f"#!{sys.executable}\nimport sys\nsys.version_info = {version}\nsys.version = '.'.join(map(str, {version}))\n"
        "exec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    return python


@pytest.mark.parametrize("version", [(3, 10, 4), (3, 14, 0)])
def test_a_python_that_is_too_old_or_too_new_is_refused_by_its_version(checkout, tmp_path, version):
    python = fake_python(tmp_path / "bin", version)
    result = call(checkout / "scripts" / "setup", "--python", str(python), path=path_without_uv())
    assert result.returncode == 2
    told = ".".join(map(str, version))
    assert result.stderr == f"setup: {python} is Python {told}, but jaxtrain needs 3.11 to 3.13\n"


def test_without_any_python_that_fits_setup_says_which_do(checkout, tmp_path):
    python = fake_python(tmp_path / "bin", (3, 10, 4))
    for tool in ("bash", "readlink", "dirname", "sed", "mkdir", "cat", "cut"):
        (python.parent / tool).symlink_to(shutil.which(tool))
    result = call(checkout / "scripts" / "setup", "--no-cuda", path=str(python.parent))
    assert result.returncode == 2
    assert result.stderr == "setup: no Python 3.11 to 3.13 found; install one, or name one with --python PYTHON\n"
