import io

import pytest
from rich.console import Console

from jaxtrain.sharding import ShardingError
from jaxtrain.sharding.table import TableRow, parameter_rows, refuse_silent_replication, render_table
from tests.runs import make_layout

PARAMETERS = {"up": ((64, 128), ("embed", "mlp")), "norm": ((64,), ("norm",))}


def table(**axis_sizes: int) -> list[TableRow]:
    layout = make_layout(**axis_sizes)
    shardings = {name: layout.parameter(axes, shape, name) for name, (shape, axes) in PARAMETERS.items()}
    return parameter_rows({name: shape for name, (shape, _) in PARAMETERS.items()}, shardings)


def axis_sizes(**sizes: int) -> dict[str, int]:
    return {"pipeline": 1, "data": 1, "fsdp": 1, "expert": 1, "context": 1, "tensor": 1, **sizes}


def test_the_table_counts_float32_bytes_in_all_and_on_each_device() -> None:
    up, norm = table(fsdp=4, tensor=2)
    assert (up.bytes_total, up.bytes_per_device, up.replicated) == (64 * 128 * 4, 64 * 128 * 4 // 8, False)
    assert (norm.bytes_total, norm.bytes_per_device, norm.replicated) == (256, 256, True)


def test_data_parallelism_alone_leaves_every_parameter_whole() -> None:
    assert all(row.replicated for row in table(data=8))
    refuse_silent_replication(table(data=8), axis_sizes(data=8), allowed=False)


def test_the_printed_table_shows_shape_axes_and_bytes() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_table(table(fsdp=4, tensor=2)))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["up", "64×128", "fsdp,", "tensor", "0.00"] in lines
    assert ["norm", "64", "·", "0.00"] in lines
    assert ["total", "8,256", "of", "0.0", "MiB", "0.00"] in lines


def whole(share: float) -> list[TableRow]:
    """A table in which so large a share of the bytes is whole on every device."""
    sharding = make_layout(fsdp=8).replicated()
    count = round(1000 * share)
    return [TableRow("scale", (count,), sharding, count, count), TableRow("up", (64, 2), sharding, 1000 - count, 1)]


def test_more_than_two_percent_of_bytes_unsplit_is_refused_by_name() -> None:
    with pytest.raises(ShardingError, match=r"^2.1% of the parameter bytes .*mesh.fsdp=8: scale \(21,\)"):
        refuse_silent_replication(whole(0.021), axis_sizes(fsdp=8), allowed=False)
    with pytest.raises(ShardingError, match="mesh.fsdp=2, mesh.tensor=4.*sharding.allow_replicated: true"):
        refuse_silent_replication(whole(0.5), axis_sizes(fsdp=2, tensor=4), allowed=False)


def test_two_percent_of_bytes_unsplit_is_allowed() -> None:
    refuse_silent_replication(whole(0.02), axis_sizes(fsdp=8), allowed=False)


def test_unsplit_parameters_are_allowed_by_key() -> None:
    refuse_silent_replication(whole(0.5), axis_sizes(fsdp=8), allowed=True)
