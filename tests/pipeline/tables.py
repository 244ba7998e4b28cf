"""Every shape of table that the tests walk through, but for the number of micro-batches."""

from jaxtrain.pipeline.schedule import Schedule, make_schedule

TABLES: list[tuple[str, int, int]] = [
    (kind, stages, chunks)
    for kind, most_chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3))
    for stages in range(1, 9)
    for chunks in range(1, most_chunks + 1)
]
"""Kind, stages, chunks."""

NAMES = ["-".join(map(str, table)) for table in TABLES]


def make(table: tuple[str, int, int], microbatches: int) -> Schedule:
    kind, stages, chunks = table
    return make_schedule(kind, stages, microbatches, chunks)
