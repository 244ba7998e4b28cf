"""Prompts from files: a line is a prompt, whatever it holds."""

from pathlib import Path

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.generation import read_prompts


def test_only_ends_of_lines_divide_prompts(tmp_path: Path) -> None:
    odd = "a\u2028b\u0085c\x0cd"
    plain, strings = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text(f"{odd}\nsecond\r\nthird")
    strings.write_text(f'"{odd[:3]}"\n"two\\nlines"\n')
    assert read_prompts(["first"], plain) == ["first", odd, "second", "third"]
    assert read_prompts([], strings) == [odd[:3], "two\nlines"]


def test_half_of_a_character_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"x"\n"\\ud83d\\ude00"\n"x\\ud800"\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl, line 3: .*UTF-8"):
        read_prompts([], file)


def test_an_empty_file_holds_no_prompt(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").touch()
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts([], tmp_path / "prompts.txt")
