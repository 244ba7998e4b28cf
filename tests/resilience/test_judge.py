"""What is found: wrong numbers at once, slow devices when they stay so, slow data and hosts by names of their own."""

from collections.abc import Sequence

import pytest

from jaxtrain.config import HealthConfig
from jaxtrain.resilience.judge import Finding, Judge, Probed, Report

CONFIG = HealthConfig()


def report(
    rank: int,
    number: int,
    seconds: Sequence[float] = (0.01,),
    wrong: Sequence[list[str]] | None = None,
    data: float = 0.0,
    host: float = 0.02,
) -> Report:
    """What a rank tells after a probe."""
    faults = [[]] * len(seconds) if wrong is None else list(wrong)
    probe = Probed(number, step=100 + number, seconds=list(seconds), wrong=faults, data=data, host=host)
    return Report(f"node{rank}", [f"cuda:{device}" for device in range(len(seconds))], ["H100"] * len(seconds), [probe])


def hear(judge: Judge, *reports: Report) -> list[Finding]:
    return judge.hear(dict(enumerate(reports)))


def test_a_report_is_read_back_as_it_was_written() -> None:
    told = report(3, 5, (0.1, 0.2), [["memory"], []])
    assert Report.decode(told.encode()) == told


def test_a_wrong_checksum_is_named_at_once_and_once() -> None:
    judge = Judge(CONFIG, 2)
    reports = report(0, 0), report(1, 0, (0.01, 0.01), [[], ["float32 product", "memory"]])
    (found,) = hear(judge, *reports)
    assert (found.rank, found.host, found.device, found.what, found.score) == (1, "node1", "cuda:1", "checksum", None)
    assert found.is_bad_host
    assert "rank 1 (node1): cuda:1 computes wrong numbers: the checksum of its float32 product and its memory" in (
        found.detail
    )
    assert hear(judge, *reports) == []


def test_one_device_alone_is_judged_by_its_checksum() -> None:
    judge = Judge(CONFIG, 1)
    assert hear(judge, report(0, 0)) == []
    assert [found.what for found in hear(judge, report(0, 5, wrong=[["memory"]]))] == ["checksum"]


def test_a_device_that_stays_slow_is_named_when_patience_ends_and_again_only_after_it_recovered() -> None:
    judge, found = Judge(CONFIG, 2), {}
    slow = [*range(4, 10), *range(20, 26)]
    for number in range(30):
        longer = 1.3 if number in slow else 1.0
        found[number] = hear(judge, report(0, 5 * number), report(1, 5 * number, (0.01 * longer,)))
    assert [number for number, findings in found.items() if findings] == [7, 23]
    (finding,) = found[7]
    assert (finding.rank, finding.device, finding.what, finding.score) == (1, "cuda:0", "slow", 0.3)
    assert finding.is_bad_host
    assert "takes 30% longer there than on the others, for 4 probes up to step 135" in finding.detail


def test_the_slow_devices_of_a_rank_are_one_finding() -> None:
    judge, found = Judge(CONFIG, 3), []
    for number in range(8):
        found += hear(
            judge, *(report(rank, number, (0.013, 0.015) if rank == 1 else (0.01, 0.01)) for rank in range(3))
        )
    (finding,) = found
    assert (finding.rank, finding.device, finding.score) == (1, "cuda:0, cuda:1", 0.5)
    assert "cuda:0, cuda:1 are slow" in finding.detail


def test_a_slow_input_is_named_as_that_and_no_device_is_blamed() -> None:
    judge, found = Judge(CONFIG, 4), []
    for number in range(8):
        found += hear(judge, *(report(rank, number, data=0.4 if rank == 3 else 0.0) for rank in range(4)))
    (finding,) = found
    assert (finding.rank, finding.device, finding.what, finding.score) == (3, None, "data", 0.4)
    assert not finding.is_bad_host
    assert "rank 3 (node3): waits for data 40% of the time" in finding.detail


def test_data_that_are_late_now_and_then_are_not_named() -> None:
    judge = Judge(CONFIG, 2)
    for number in range(20):
        assert hear(judge, report(0, number, data=0.6 * (number % 2)), report(1, number)) == []


@pytest.mark.parametrize("ranks", [2, 5])
def test_a_busy_host_is_named_by_what_it_takes_beyond_the_others(ranks: int) -> None:
    judge, found = Judge(CONFIG, ranks), []
    for number in range(8):
        found += hear(judge, *(report(rank, number, host=0.8 if rank == 1 else 0.3) for rank in range(ranks)))
    (finding,) = found
    assert (finding.rank, finding.what, finding.score) == (1, "host", 0.5)
    assert not finding.is_bad_host


def test_hosts_that_are_all_busy_are_not_named() -> None:
    judge = Judge(CONFIG, 3)
    assert [hear(judge, *(report(rank, number, host=0.9) for rank in range(3))) for number in range(8)] == [[]] * 8


def test_many_ranks_that_wait_for_the_same_data_are_one_finding() -> None:
    judge, found = Judge(CONFIG, 40), []
    for number in range(8):
        found += hear(judge, *(report(rank, number, data=0.3 + 0.01 * rank) for rank in range(40)))
    (finding,) = found
    assert finding.rank == 39
    assert finding.detail.endswith("so it is with 39 other ranks")


def test_a_rank_that_is_heard_of_late_or_not_at_all_holds_nothing_up() -> None:
    judge = Judge(CONFIG, 3)
    for number in range(8):
        assert judge.hear({0: report(0, number), 1: report(1, number)}) == []
    assert judge.hear({2: report(2, 7)}) == []


def test_what_is_remembered_is_bounded() -> None:
    judge = Judge(CONFIG, 1)
    for number in range(200):
        hear(judge, report(0, number))
    assert len(judge._probes) == 64
    assert 0 in judge._probes
