"""Data sets to evaluate on have names of one's own."""

from pathlib import Path

import pytest

from jaxtrain.config import Config, dump, load
from jaxtrain.errors import ConfigError


def config(folder: Path, sets: str, *overrides: str) -> Config:
    path = folder / "a.yml"
    path.write_text(f"run_dir: r\nsteps: 1\neval: {{every: 1, sets: {sets}}}\n")
    return load(path, overrides)


def test_sets_come_from_the_file_and_from_overrides_and_are_printed(tmp_path: Path) -> None:
    found = config(tmp_path, "{a: data/a, b: data/b}", "eval.sets.b=data/other", "eval.sets.email=data/c")
    assert found.eval.sets.own_keys == {"a": Path("data/a"), "b": Path("data/other"), "email": Path("data/c")}
    (tmp_path / "again.yml").write_text(dump(found))
    assert load(tmp_path / "again.yml") == found
    assert found != config(tmp_path, "{a: data/a}")


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ("{my-set: d}", ["a.yml:3", "eval.sets", "my-set", "small letters"]),
        ("{ema: d}", ["a.yml:3", "ema"]),
        ("{ema_a: d}", ["a.yml:3", "name ema_a"]),
        ("{train: d}", ["a.yml:3", "name train"]),
        ("{held_out: d}", ["a.yml:3", "held_out"]),
        ("{a: 3}", ["a.yml:3", "eval.sets.a", "path"]),
        ("{a: gs://bucket/a}", ["a.yml:3", "eval.sets.a", "URL"]),
        ("[a]", ["a.yml:3", "eval.sets"]),
    ],
)
def test_a_name_or_a_directory_that_can_not_be_is_refused_with_its_line(
    sets: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, sets)
    for word in words:
        assert word in str(error.value)


def test_images_have_no_prepared_sets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval.sets.a, data.kind|eval.sets.a: .*data.kind=tokens"):
        config(tmp_path, "{a: d}", "model.family=vit", "data.kind=digits")
