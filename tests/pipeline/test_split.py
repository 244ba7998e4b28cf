import itertools

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.pipeline.split import split_layers


def in_order(split):
    """Layers by virtual stage."""
    return [counts[chunk] for chunk in range(len(split[0])) for counts in split]


def largest_load(counts, layer, first, last):
    loads = [count * layer for count in counts]
    loads[0] += first
    loads[-1] += last
    return max(loads)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (2, 1), (4, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize(("layer", "first", "last"), [(1, 0, 0), (1, 0.3, 2.5), (2, 5, 1), (0.1, 0.7, 0.05), (3, 1, 8)])
def test_no_split_has_a_smaller_largest_load(stages, chunks, layer, first, last):
    virtual = stages * chunks
    for layers in range(virtual, 10):
        counts = in_order(split_layers(layers, stages, chunks, layer, first, last))
        others = [each for each in itertools.product(range(1, layers + 1), repeat=virtual) if sum(each) == layers]
        assert tuple(counts) in others
        least = min(largest_load(each, layer, first, last) for each in others)
        assert largest_load(counts, layer, first, last) == pytest.approx(least)


def test_layers_that_divide_are_even():
    assert split_layers(32, 4, 1, 1.0, 0.0, 0.0) == ((8,),) * 4
    assert split_layers(32, 4, 2, 1.0, 0.0, 0.0) == ((4, 4),) * 4


def test_126_layers_fit_8_stages():
    assert split_layers(126, 8, 1, 1.0, 0.1, 1.5) == ((16,), (16,), (16,), (16,), (16,), (16,), (16,), (14,))
    assert sorted(in_order(split_layers(126, 8, 1, 1.0, 0.0, 0.0))) == [15, 15, 16, 16, 16, 16, 16, 16]
    assert sum(in_order(split_layers(126, 8, 3, 1.0, 0.1, 1.5))) == 126


def test_the_first_and_the_last_stage_get_the_fewer_layers_where_loads_are_equal():
    """The eleventh layer makes a load of 4 wherever it goes."""
    assert split_layers(11, 4, 1, 1.0, 1.0, 1.0) == ((2,), (4,), (3,), (2,))


def test_embedding_and_head_weigh_on_the_first_and_the_last_virtual_stage():
    """These are the first chunk of the first stage and the last chunk of the last stage."""
    assert split_layers(16, 2, 2, 1.0, 3.0, 2.0) == ((2, 5), (6, 3))


def test_a_head_heavier_than_all_leaves_its_stage_one_layer():
    assert split_layers(9, 3, 1, 1.0, 0.0, 100.0) == ((4,), (4,), (1,))


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "nearest"),
    [
        (4, 8, 1, ["mesh.pipeline: 4", "model.layers: 8"]),
        (12, 8, 3, ["mesh.pipeline: 4", "pipeline.chunks: 1", "model.layers: 24"]),
        (2, 1, 3, ["pipeline.chunks: 2", "model.layers: 3"]),
    ],
)
def test_fewer_layers_than_virtual_stages_are_refused_with_what_works(layers, stages, chunks, nearest):
    with pytest.raises(ConfigError) as refusal:
        split_layers(layers, stages, chunks, 1.0, 0.0, 0.0)
    message = str(refusal.value)
    for word in [f"mesh.pipeline={stages}", f"pipeline.chunks={chunks}", f"model.layers={layers}", *nearest]:
        assert word in message
    for name, value in (text.split(": ") for text in nearest):
        fixed = {"model.layers": layers, "mesh.pipeline": stages, "pipeline.chunks": chunks} | {name: int(value)}
        split_layers(*fixed.values(), 1.0, 0.0, 0.0)


@pytest.mark.parametrize("costs", [(0.0, 1.0, 1.0), (1.0, -1.0, 0.0), (1.0, 0.0, float("nan")), (float("inf"), 0, 0)])
def test_costs_that_are_none_are_refused(costs):
    with pytest.raises(ValueError, match="costs"):
        split_layers(8, 2, 1, *costs)
