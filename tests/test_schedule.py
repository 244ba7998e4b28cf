import subprocess
import sys

import pytest

from jaxtrain.errors import EXIT_BAD_INPUT, EXIT_COMPLETE
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.pipeline.simulation import simulate
from jaxtrain.schedule import main


def shown(capsys, *arguments):
    """What the verb prints, by name."""
    assert main([str(argument) for argument in arguments]) == EXIT_COMPLETE
    return dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.replace("in flight", "in_flight").splitlines()
    )


def test_it_tells_what_a_schedule_costs(capsys):
    assert shown(capsys, "--kind", "1f1b", "--stages", 4, "--microbatches", 8) == {
        "schedule": "1f1b: 4 stages, 8 micro-batches, 14 ticks",
        "total": "33",
        "ideal": "33",
        "bubble": "27.3% of the time",
        "in_flight": "7 micro-batches at most",
    }


def test_chunks_share_the_time_of_a_stage(capsys):
    rows = shown(capsys, "--kind", "interleaved_1f1b", "--stages", 4, "--microbatches", 8, "--chunks", 2)
    assert rows["total"] == "28.5"
    assert rows["in_flight"] == "5.5 micro-batches at most (11 chunks, 2 a micro-batch)"


def test_times_can_be_given(capsys):
    times = ["--forward", 2, "--backward", 3, "--link", 0.5]
    rows = shown(capsys, "--stages", 2, "--microbatches", 3, *times)
    assert rows["total"] == "22.5, 12.5% over the ideal"  # 4 · 5 and an exchange in each of 5 ticks
    assert rows["ideal"] == "20"


def test_layers_are_split_with_embedding_and_head_as_load(capsys):
    arguments = ["--stages", 4, "--microbatches", 8, "--layers", 30, "--first", 0.5, "--last", 3]
    rows = shown(capsys, *arguments)
    assert rows["layers"] == "8, 9, 8, 5, by stage"
    assert rows["ideal"] == f"{11 * 3 * 33.5 / 4:g}"
    chunked = shown(capsys, *arguments, "--kind", "interleaved_1f1b", "--chunks", 2)
    assert chunked["layers"] == "4 + 4, 5 + 4, 4 + 4, 4 + 1, by stage"
    loads = [4.5, 5, 4, 4, 4, 4, 4, 1 + 3]  # in the order in which a micro-batch passes them
    timeline = simulate(make_schedule("interleaved_1f1b", 4, 8, 2), loads, [2 * load for load in loads])
    assert chunked["total"].split(",")[0] == f"{timeline.total:.6g}"


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_it_draws_a_picture(tmp_path, capsys, ending):
    picture = tmp_path / f"schedule.{ending}"
    assert shown(capsys, "--stages", 2, "--microbatches", 3, "--output", picture)["picture"] == str(picture)
    assert picture.read_bytes().startswith({"svg": b"<?xml", "png": b"\x89PNG"}[ending])


ARGUMENTS = {"--stages": "4", "--microbatches": "8"}
REFUSED = {
    "no such kind": ({"--kind": "1fb1"}, ["1fb1", "did you mean 1f1b"]),
    "no stage": ({"--stages": "0"}, ["--stages", "0"]),
    "half a micro-batch": ({"--microbatches": "1.5"}, ["--microbatches", "1.5"]),
    "chunks without interleaving": ({"--chunks": "2"}, ["chunks", "interleaved_1f1b"]),
    "a time before now": ({"--forward": "-1"}, ["--forward", "-1"]),
    "no number": ({"--backward": "nan"}, ["--backward", "nan"]),
    "a time without end": ({"--link": "1e300"}, ["--link", "1e300"]),
    "no time at all": ({"--forward": "0", "--backward": "0"}, ["--forward 0", "--backward 0"]),
    "too few layers": ({"--layers": "3"}, ["model.layers=3", "mesh.pipeline: 3"]),
    "a head without layers": ({"--last": "2"}, ["--last", "--layers"]),
    "another kind of picture": ({"--output": "schedule.pdf"}, ["schedule.pdf", ".svg"]),
    "a picture nowhere": ({"--output": "/nowhere/schedule.png"}, ["--output /nowhere/schedule.png"]),
    "more than can be simulated": ({"--microbatches": "1000000"}, ["4,000,016"]),
    "more stages than can be simulated": ({"--microbatches": "1", "--stages": "1000000"}, ["1,000,001,000,000"]),
    "more layers than can be split": ({"--layers": "1000000000"}, ["--layers 1,000,000,000"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_in_one_line(name, capsys):
    changes, words = REFUSED[name]
    arguments = [text for pair in (ARGUMENTS | changes).items() for text in pair]
    assert main(arguments) == EXIT_BAD_INPUT
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


def test_it_needs_neither_jax_nor_a_picture_s_library_to_tell_a_time():
    program = (
        "import sys; from jaxtrain.schedule import main; code = main(['--stages', '4', '--microbatches', '8']); "
        "sys.exit(code or any(name in sys.modules for name in ('jax', 'matplotlib', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode == 0
