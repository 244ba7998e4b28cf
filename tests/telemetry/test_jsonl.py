import pytest

from jaxtrain.telemetry import jsonl


def test_a_crash_while_replacing_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    jsonl.replace_file(path, "old")

    def crash(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(jsonl.os, "fsync", crash)
    with pytest.raises(OSError, match="no space left"):
        jsonl.replace_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_nan_inside_a_list_is_refused_rather_than_written_as_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        jsonl.encode({"losses": [1.0, float("nan")]})


def test_replacing_makes_the_folder(tmp_path):
    path = tmp_path / "run" / "file"
    jsonl.replace_file(path, "text")
    assert path.read_text() == "text"
