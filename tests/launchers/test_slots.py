"""Which places are lost, as a file says and as failing starts show."""

import json
from pathlib import Path

import pytest

from jaxtrain.launchers.slots import Lost, Slots


def slots(folder: Path, count: int = 4) -> Slots:
    return Slots(count, folder / "excluded.json", "here")


def exclude(folder: Path, *entries: dict[str, object]) -> None:
    (folder / "excluded.json").write_text(json.dumps(entries))


def test_a_line_excludes_the_slot_that_its_rank_had(tmp_path: Path) -> None:
    found = slots(tmp_path)
    exclude(tmp_path, {"host": "here", "rank": 1, "reason": "slow"})
    assert found.refresh([0, 2, 3]) == [Lost(2, "slow")]
    assert found.take(most=3, least=1) == [0, 1, 3]
    assert found.refresh([0, 1, 3]) == [], "the line is of the start before"
    assert found.available == [0, 1, 3]


def test_a_line_that_is_taken_out_brings_the_slot_back(tmp_path: Path) -> None:
    found = slots(tmp_path)
    exclude(tmp_path, {"slot": 1}, {"rank": 0, "host": "here"})
    found.refresh([0, 1, 2])
    assert found.available == [2, 3]
    exclude(tmp_path, {"slot": 1})
    found.refresh([2, 3])
    assert found.available == [0, 2, 3]


def test_what_is_said_of_other_hosts_is_not_ours(tmp_path: Path) -> None:
    exclude(tmp_path, {"host": "there", "rank": 0, "reason": "slow"}, {"host": "here", "rank": 9})
    found = slots(tmp_path)
    assert found.refresh([0, 1]) == []
    assert found.available == [0, 1, 2, 3]


@pytest.mark.parametrize("text", ['[{"rank": 1', "7", "[7]", "[" * 100_000])
def test_a_file_that_cannot_be_read_is_named_and_changes_nothing(text: str, tmp_path: Path) -> None:
    found = slots(tmp_path)
    exclude(tmp_path, {"slot": 1})
    found.refresh([0, 1])
    (tmp_path / "excluded.json").write_text(text)
    with pytest.raises(ValueError, match="excluded.json: "):
        found.refresh([0, 2])
    assert found.available == [0, 2, 3]


def test_a_slot_that_fails_to_start_twice_in_a_row_rests_for_one_start(tmp_path: Path) -> None:
    found = slots(tmp_path)
    assert [found.failed_to_start(slot) for slot in (1, 2, 1, 1)] == [False, False, False, True]
    assert found.take(most=4, least=3) == [0, 2, 3]
    assert found.take(most=4, least=3) == [0, 1, 2, 3]


def test_a_slot_does_not_rest_where_it_is_needed_nor_after_a_good_start(tmp_path: Path) -> None:
    found = slots(tmp_path)
    found.failed_to_start(1)
    found.started()
    assert not found.failed_to_start(1)
    assert found.failed_to_start(1)
    assert found.take(most=4, least=4) == [0, 1, 2, 3]
