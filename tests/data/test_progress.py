import io

from rich.console import Console

from jaxtrain.data import console_progress


def shown(terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
    with console_progress(console) as report:
        report("reading", 0, 0)
        for done in range(1, 4):
            report("writing", done, 3)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_without_a_terminal_progress_is_plain_lines() -> None:
    assert shown(terminal=False).splitlines() == ["reading …", "writing …", "writing: 3 of 3"]


def test_on_a_terminal_progress_is_a_bar() -> None:
    output = shown(terminal=True)
    assert "━" in output
    assert "3/3" in output
