"""The list of hosts to go on without grows, and is readable by a machine at any moment."""

import json
from pathlib import Path

from jaxtrain.resilience.exclusion import exclude


def test_entries_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "run" / "excluded.json"
    exclude(path, "node7", 3, "cuda:3", "slow", 120)
    exclude(path, "node9", 5, "cuda:0, cuda:1", "wrong", 240)
    entries = json.loads(path.read_text())
    assert [(entry["host"], entry["rank"], entry["step"]) for entry in entries] == [
        ("node7", 3, 120),
        ("node9", 5, 240),
    ]
    assert [set(entry) for entry in entries] == [{"host", "rank", "device", "reason", "step", "time"}] * 2


def test_what_a_person_wrote_stays_though_it_says_less(tmp_path: Path) -> None:
    path = tmp_path / "excluded.json"
    path.write_text('[{"slot": 2, "reason": "fan"}]')
    exclude(path, "node7", 3, "cuda:3", "slow", 120)
    by_hand, added = json.loads(path.read_text())
    assert by_hand == {"slot": 2, "reason": "fan"}
    assert added["host"] == "node7"


def test_a_file_that_is_no_list_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "excluded.json"
    for text in ("", "{}", "1"):
        path.write_text(text)
        exclude(path, "node7", 3, "cuda:3", "slow", 120)
        assert [entry["host"] for entry in json.loads(path.read_text())] == ["node7"]
