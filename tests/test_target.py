"""Somebody's own code is found without being registered, and what is wrong with it is one line that says where."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxtrain.errors import ConfigError, DataError
from jaxtrain.target import call_target

Write = Callable[[str], str]
numbers = itertools.count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes code to a new module in the current directory; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])

    def write(code: str) -> str:
        name = f"own_{next(numbers)}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


CODE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Task:
    width: int
    depth: int = 2
    compute_dtype: str = "none"

    class Inner:
        pass

def everything(**keys):
    return keys

def by_position(width, /):
    return width

NUMBER = 3
"""


def refusal(target: str, origins: dict[str, str] | None = None, **keys: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        call_target("model", target, keys, {"compute_dtype": "bfloat16", "remat": "none"}, origins or {})
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_keys_are_arguments_and_the_run_gives_those_that_are_asked_for(write: Write) -> None:
    name = write(CODE)
    offered = {"compute_dtype": "bfloat16", "remat": "none"}
    made = call_target("model", f"{name}:Task", {"width": 3}, offered, {})
    assert (made.width, made.depth, made.compute_dtype) == (3, 2, "bfloat16")
    assert call_target("data", f"{name}:everything", {"any": [1], "thing": None}, {}, {}) == {"any": [1], "thing": None}
    assert type(call_target("model", f"{name}:Task.Inner", {}, offered, {})).__name__ == "Inner"


def test_a_module_in_a_package_is_found_too(write: Write, tmp_path: Path) -> None:
    package = write("")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / package / "part.py").write_text(CODE)
    assert call_target("model", f"{package}.part:everything", {"a": 1}, {}, {}) == {"a": 1}


def test_a_wrong_key_is_refused_with_its_line_and_the_nearest_argument(write: Write) -> None:
    name = write(CODE)
    origins = {"model.widht": "c.yml:4", "model.depth": "c.yml:5", "model.target": "c.yml:3"}
    assert refusal(f"{name}:Task", origins, widht=3, depth=1) == [
        f"c.yml:4: unknown key model.widht: {name}:Task doesn't take it; did you mean width?",
        f"c.yml:3: model.width is missing: {name}:Task needs it",
    ]
    assert refusal(f"{name}:Task", width=3, zzz=1) == [
        f"unknown key model.zzz: {name}:Task doesn't take it; it has depth, width"
    ]


def test_what_the_run_decides_is_no_key(write: Write) -> None:
    name = write(CODE)
    (line,) = refusal(f"{name}:Task", width=3, compute_dtype="float32")
    assert line == f"model.compute_dtype: {name}:Task is given the run's own compute_dtype; leave the key out"


def test_what_is_not_there_or_no_callable_is_refused_by_name(write: Write, tmp_path: Path) -> None:
    name = write(CODE)
    assert refusal(f"{name}:Tsak") == [f"model.target={name}:Tsak: {name} has no Tsak; did you mean Task?"]
    assert refusal(f"{name}:Task.Outer")[0].startswith(f"model.target={name}:Task.Outer: {name} has no Task.Outer; ")
    assert refusal(f"{name}:NUMBER")[0].endswith("is of type int, not a class or function that can be called")
    (line,) = refusal(f"{name}:by_position")
    assert line == f"model.target={name}:by_position takes width only by position; keys are passed by name"
    (line,) = refusal("no_such_module_of_mine.part:Task", {"model.target": "c.yml:3"})
    assert line == (
        "c.yml:3: model.target=no_such_module_of_mine.part:Task: there is no module no_such_module_of_mine in "
        f"{tmp_path} or on PYTHONPATH; start in the folder that holds it, or add that folder to PYTHONPATH"
    )


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library' ({file}:1)"),
        ("x = 1\ny = x +\n", "SyntaxError: invalid syntax ({file}, line 2) ({path}:2)"),
        ("def f():\n    raise OSError('gone')\nf()\n", "OSError: gone ({path}:2)"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0 ({path}:2)"),
        ("from json import no_such_name\n", "ImportError: cannot import name 'no_such_name' from 'json'"),
    ],
    ids=["missing library", "syntax", "any error", "a script", "missing name"],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_the_line_of_its_code(
    code: str, told: str, write: Write, tmp_path: Path
) -> None:
    name = write(code)
    (line,) = refusal(f"{name}:Task")
    path = tmp_path / f"{name}.py"
    told = told.format(file=path.name if "SyntaxError" in told else path, path=path)
    assert line.startswith(f"model.target={name}:Task: {name} can't be imported: {told}")


def test_code_that_refuses_its_keys_is_one_line_with_the_line_of_its_code(write: Write, tmp_path: Path) -> None:
    name = write("def make(width):\n    if width % 2:\n        raise ValueError('width must be even')\n")
    (line,) = refusal(f"{name}:make", width=3)
    assert line == (
        f"model.target={name}:make refuses its keys: ValueError: width must be even ({tmp_path}/{name}.py:3)"
    )


def test_code_that_calls_sys_exit_refuses_its_keys(write: Write, tmp_path: Path) -> None:
    name = write("import sys\ndef make():\n    sys.exit(0)\n")
    (line,) = refusal(f"{name}:make")
    assert line == f"model.target={name}:make refuses its keys: SystemExit: 0 ({tmp_path}/{name}.py:3)"


def test_an_error_of_ours_keeps_its_class_and_exit_code(write: Write) -> None:
    name = write("from jaxtrain.errors import DataError\ndef make():\n    raise DataError('shard 3 is damaged')\n")
    with pytest.raises(DataError, match=f"^data.target={name}:make: shard 3 is damaged$"):
        call_target("data", f"{name}:make", {}, {}, {})
