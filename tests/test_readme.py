"""What the README says is true."""

import re
from pathlib import Path

import pytest

from jaxtrain import errors
from jaxtrain.config import load
from jaxtrain.telemetry.metrics import read_metrics
from tests.runs import ROOT, Straight

README = (ROOT / "README.md").read_text()


def block(language: str, containing: str) -> str:
    """The fenced block of a language that holds a text."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if containing in text]
    assert len(found) == 1
    return str(found[0])


def test_the_orbax_snippet_reads_a_checkpoint(straight: Straight) -> None:
    run_dir = straight("fsdp=8")
    snippet = block("python", "StandardCheckpointer")
    path = re.search(r'restore\("(.*)"\)', snippet)
    assert path is not None
    variables: dict[str, object] = {}
    exec(snippet.replace(path[1], str(run_dir.absolute() / "checkpoints" / "10" / "state")), variables)
    state = variables["state"]
    assert isinstance(state, dict)
    assert state["params"]["embed"]["table"].shape == (256, 64)


def test_the_config_tour_is_the_quickstart(tmp_path: Path) -> None:
    tour = tmp_path / "tour.yml"
    tour.write_text(block("yaml", "run_dir"))
    quickstart = load(ROOT / "configs" / "quickstart.yml")
    assert load(tour).model_copy(update={"log_every": quickstart.log_every}) == quickstart


def test_the_exit_codes_are_those_of_the_program() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert table == codes | {134}, "134 is JAX's own: the process was ended because another one was lost"


def test_the_metrics_are_those_that_a_run_writes(straight: Straight) -> None:
    named = re.search(r"one line a step: `([^`]*)`", README)
    assert named is not None
    assert set(named[1].split(", ")) == set(read_metrics(straight("one device") / "metrics.jsonl")[0])


def test_the_house_is_drawn_with_its_rooms() -> None:
    drawing = README.partition("## The house")[2].partition("Three ideas")[0]
    folders = {f"{path.parent.name}/" for path in (ROOT / "jaxtrain").glob("*/__init__.py")}
    verbs = {path.stem for path in (ROOT / "jaxtrain").glob("*.py") if "def main(" in path.read_text()}
    assert set(re.findall(r"\w+/?", drawing)) >= folders | verbs | {"loop", "program", "step", "gradient"}


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]*)\)", README))))
def test_links_lead_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("page", ["README.md", "jaxtrain/resilience/README.md"])
def test_the_tests_that_are_named_as_proof_exist(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / page).read_text())
    assert len(named) >= 10
    for file, name in named:
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
