"""How many layers each stage gets, where the embedding and the head weigh something too."""

import heapq
import math

from jaxtrain.errors import ConfigError


def split_layers(
    layers: int, stages: int, chunks: int, layer: float, first: float, last: float
) -> tuple[tuple[int, ...], ...]:
    """Layers for each chunk of each stage, contiguous in the order of virtual stages, with the least largest load.

    A tick costs what its slowest virtual stage does, so it is their loads that count, not sums over a stage's chunks.

    Args:
        layer: the cost of a layer, in any unit, more than 0.
        first: what the first virtual stage has besides its layers, the embedding, in the same unit.
        last: what the last one has besides, the head.

    Returns:
        [stage][chunk]: at least 1 each. Equal loads go to the middle, where no embedding and no head take memory.

    Raises:
        ConfigError: there are fewer layers than virtual stages.
        ValueError: a cost is negative or not finite.
    """
    if not (layer > 0 and first >= 0 and last >= 0 and math.isfinite(layer + first + last)):
        raise ValueError(f"costs must be finite and not negative: layer={layer}, first={first}, last={last}")
    virtual_stages = stages * chunks
    if layers < virtual_stages:
        raise ConfigError(_too_few(layers, stages, chunks))
    besides = [0.0] * virtual_stages
    besides[0] += first
    besides[-1] += last
    counts = [1] * virtual_stages

    def load(virtual: int) -> tuple[float, float, int]:
        return besides[virtual] + layer * counts[virtual], besides[virtual], virtual

    # Each layer goes to the lightest: as all weigh the same, nothing else ends lower.
    queue = [load(virtual) for virtual in range(virtual_stages)]
    heapq.heapify(queue)
    for _ in range(layers - virtual_stages):
        virtual = queue[0][-1]
        counts[virtual] += 1
        heapq.heapreplace(queue, load(virtual))
    return tuple(tuple(counts[chunk * stages + stage] for chunk in range(chunks)) for stage in range(stages))


def _too_few(layers: int, stages: int, chunks: int) -> str:
    remedies = [f"model.layers: {stages * chunks}"]
    if layers >= chunks:
        remedies.append(f"mesh.pipeline: {layers // chunks}")
    if chunks > 1 and layers >= stages:
        remedies.append(f"pipeline.chunks: {layers // stages}")
    return (
        f"mesh.pipeline={stages} × pipeline.chunks={chunks} = {stages * chunks} virtual stages, of which each needs a "
        f"layer, but model.layers={layers}; the nearest that works is {' or '.join(remedies)}"
    )
