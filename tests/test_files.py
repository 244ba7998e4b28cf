import json
import math

import pytest

from jaxtrain import files


def test_a_crash_while_replacing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.replace_file(path, "old")

    def crash(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(files.os, "fsync", crash)
    with pytest.raises(OSError, match="no space left"):
        files.replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_replacing_makes_the_folder(tmp_path):
    path = tmp_path / "run" / "file"
    files.replace_file(path, "text")
    assert path.read_text() == "text"


def test_a_json_file_is_never_half_written(tmp_path):
    path = tmp_path / "run.json"
    files.replace_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.replace_json(path, {"a": math.nan})
    assert json.loads(path.read_text()) == {"a": 1}
