import re
from collections import Counter

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from jaxtrain.errors import ConfigError
from jaxtrain.pipeline.picture import SHADES, draw_schedule
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.pipeline.simulation import simulate


def drawn(folder, *arguments):
    path = folder / "schedule.svg"
    draw_schedule(simulate(make_schedule(*arguments), 1.0, 2.0), path)
    return path.read_text()


def fills(svg):
    """How many boxes of each colour there are, with one in the legend."""
    return Counter(re.findall(r"fill: (#[0-9a-f]{6})", svg))


def test_there_is_a_box_for_every_work_in_its_direction_and_chunk_s_colour(tmp_path):
    counted = fills(drawn(tmp_path, "interleaved_1f1b", 4, 8, 2))
    colours = [to_hex(shade) for shades in SHADES.values() for shade in shades]
    assert len(set(colours)) == 4
    for colour in colours:
        assert counted[colour] == 4 * 8 + 1


def test_boxes_hold_the_numbers_of_their_microbatches_where_these_are_legible(tmp_path):
    def numbers(svg):
        return Counter(re.findall(r"<!-- (\d\d) -->", svg))

    few = numbers(drawn(tmp_path, "1f1b", 8, 16))
    assert all(few[str(number)] >= 2 * 8 for number in range(10, 16))  # time has a few numbers more
    many = drawn(tmp_path, "1f1b", 8, 90)
    assert max(numbers(many).values(), default=0) < 2 * 8


def test_the_title_tells_the_bubble(tmp_path):
    assert "1f1b: 4 stages, 8 micro-batches, bubble 27.3%" in drawn(tmp_path, "1f1b", 4, 8)


def test_idle_time_is_white_in_a_picture_of_points(tmp_path):
    """The first of two stages does a forward, waits for the other one's two works, and does a backward."""
    path = tmp_path / "schedule.png"
    draw_schedule(simulate(make_schedule("1f1b", 2, 1), 1.0, 1.0), path)
    pixels = imread(path)[..., :3]
    coloured = pixels.max(axis=2) - pixels.min(axis=2) > 0.1
    line = coloured[np.argwhere(coloured.any(axis=1)).min() + 5]  # near the upper edge, above the number
    first, last = np.argwhere(line)[[0, -1], 0]
    eighths = first + (last - first) * np.arange(1, 8, 2) // 8
    assert list(line[eighths]) == [True, False, False, True]
    assert (pixels[np.argwhere(coloured.any(axis=1)).min() + 5, eighths[1:3]] == 1).all()


def test_the_same_schedule_is_the_same_file(tmp_path):
    assert drawn(tmp_path, "gpipe", 2, 3) == drawn(tmp_path, "gpipe", 2, 3)


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--output .*missing/schedule.png"):
        draw_schedule(simulate(make_schedule("1f1b", 2, 2), 1.0, 2.0), tmp_path / "missing" / "schedule.png")
