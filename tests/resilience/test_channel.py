"""The channel between processes: what one puts, all others read."""

import pytest

from jaxtrain.resilience.channel import Channel
from tests.runs import train_group


@pytest.mark.slow
def test_what_one_process_puts_the_other_reads_from_any_thread() -> None:
    first, second = train_group([], devices=1, program=("-m", "tests.resilience.talk"), timeout=150)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "heard grün" in first[1]
    assert "read [('0', 'thank you'), ('1', 'grün')]" in second[1]


def test_one_process_talks_to_itself() -> None:
    channel = Channel()
    assert channel.get("word/0") is None
    channel.put("word/0", "a")
    channel.put("word/0", "b")
    channel.put("wording", "c")
    assert channel.get("word/0") == "b"
    assert channel.get_all("word") == {"0": "b"}
