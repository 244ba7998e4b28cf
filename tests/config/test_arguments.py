"""The command line of the verbs."""

from pathlib import Path

import pytest

from jaxtrain.config import dump, load, parse_arguments
from jaxtrain.errors import ConfigError

PROGRAM = "python -m jaxtrain.train"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "c.yml"
    path.write_text("run_dir: r\nsteps: 10\n")
    return str(path)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(PROGRAM, argv)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_both_forms_name_the_file_and_overrides_stand_anywhere(file: str) -> None:
    expected = load(file, ["seed=3", "model.layers=1"])
    for argv in (
        [file, "seed=3", "--model.layers=1"],
        ["seed=3", "--config", file, "model.layers=1"],
        ["--seed=3", "model.layers=1", f"--config={file}"],
    ):
        assert parse_arguments(PROGRAM, argv) == expected


def test_the_config_is_printed_and_nothing_else_is_done(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(PROGRAM, ["--print-config", file, "seed=3"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == dump(load(file, ["seed=3"]))


def test_a_file_whose_directory_has_an_equals_sign_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lr=0.1" / "config.yml"
    path.parent.mkdir()
    path.write_text("run_dir: r\nsteps: 10\n")
    assert parse_arguments(PROGRAM, [str(path)]).steps == 10


def test_a_wrong_command_line_is_refused_in_one_line(file: str) -> None:
    assert refusal() == f"{PROGRAM}: no configuration file; try {PROGRAM} configs/quickstart.yml, or --help"
    assert refusal("seed=3").startswith(f"{PROGRAM}: no configuration file")
    both = refusal(file, "--config", "other.yml")
    assert both.startswith(f"{PROGRAM}: one configuration file is needed, but {file} and other.yml were given")
    assert refusal(file, "steps", "20").startswith(f"{PROGRAM}: one configuration file is needed")
    assert refusal(file, "--config").startswith("--config needs a file after it")
    assert refusal("--config", "--print-config").startswith("--config needs a file after it")
    assert refusal("--config=").startswith("--config needs a file after it")
    assert refusal(file, "--print_config") == f"{PROGRAM}: unknown option --print_config; did you mean --print-config?"
    assert refusal(file, "-v") == f"{PROGRAM}: unknown option -v; options are --config, --print-config, --help"
    assert refusal(file, "--optimizer.learning_rate", "1e-3").endswith("in one word: --optimizer.learning_rate=VALUE")
    assert refusal(file, "--optim.lrr=1").endswith("did you mean optimizer.learning_rate?")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_shows_the_usage_with_an_example_and_ends_with_0(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(PROGRAM, ["whatever", option])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {PROGRAM} CONFIG [KEY=VALUE ...]")
    assert f"example: {PROGRAM} configs/quickstart.yml " in printed
