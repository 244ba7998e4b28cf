"""A supervisor reads where each process is, and never half a sentence."""

from pathlib import Path

from jaxtrain.resilience.beat import Beat, read_beats, write_beat


def beat(process: int, step: int = 3) -> Beat:
    return Beat(process, pid=7, host="node0", step=step, phase="step", since=1.5, time=2.5)


def test_the_last_beat_of_each_process_is_read_back(tmp_path: Path) -> None:
    for written in (beat(0), beat(1), beat(1, step=4)):
        write_beat(tmp_path, written)
    assert read_beats(tmp_path) == {0: beat(0), 1: beat(1, step=4)}


def test_a_file_that_holds_no_beat_is_passed_over(tmp_path: Path) -> None:
    write_beat(tmp_path, beat(0))
    (tmp_path / "1.json").write_text('{"process": 1')
    (tmp_path / "2.json").write_text("[]")
    assert set(read_beats(tmp_path)) == {0}
