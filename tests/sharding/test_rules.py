import pytest
from jax.sharding import PartitionSpec

from jaxtrain.sharding import ACTIVATION_RULES, MESH_AXES, PARAMETER_RULES, ShardingError, partition_spec


def sizes(**axis_sizes: int) -> dict[str, int]:
    return {**dict.fromkeys(MESH_AXES, 1), **axis_sizes}


def test_a_parameter_is_split_over_fsdp_and_tensor_where_an_activation_is_split_over_rows() -> None:
    mesh = sizes(data=2, fsdp=2, tensor=2)
    assert partition_spec(PARAMETER_RULES, ("embed", "mlp"), (64, 128), mesh, "up") == PartitionSpec("fsdp", "tensor")
    hidden = partition_spec(ACTIVATION_RULES, ("batch", "residual_seq", "embed"), (8, 32, 64), mesh, "x")
    assert hidden == PartitionSpec(("data", "fsdp"), "tensor", None)


def test_mesh_axes_of_size_one_are_left_out_of_the_spec() -> None:
    spec = partition_spec(PARAMETER_RULES, ("embed", "mlp"), (63, 128), sizes(tensor=2), "up")
    assert spec == PartitionSpec(None, "tensor")


def test_two_dimensions_on_one_mesh_axis_are_refused_with_both_names() -> None:
    with pytest.raises(ShardingError, match="down: logical axes 'mlp' and 'vocab' both map to mesh axis 'tensor'"):
        partition_spec(PARAMETER_RULES, ("mlp", "vocab"), (128, 256), sizes(tensor=2), "down")


def test_an_unknown_logical_axis_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ShardingError, match="table: unknown logical axis 'rows'; known: embed, head_dim, heads"):
        partition_spec(PARAMETER_RULES, ("rows", "embed"), (128, 64), sizes(), "table")


def test_a_dimension_that_does_not_divide_names_parameter_axis_size_and_mesh_keys() -> None:
    message = (
        "parameter layers.mlp.up: dimension 'embed' has size 68, which mesh.fsdp=8 doesn't divide; "
        "nearest size that works: 64"
    )
    with pytest.raises(ShardingError, match=f"^{message}$"):
        partition_spec(PARAMETER_RULES, ("embed", "mlp"), (68, 128), sizes(fsdp=8), "parameter layers.mlp.up")
    with pytest.raises(ShardingError, match="dimension 'batch' has size 6, which mesh.data=2 × mesh.fsdp=4 doesn't"):
        partition_spec(ACTIVATION_RULES, ("batch", "seq"), (6, 32), sizes(data=2, fsdp=4), "tokens")


def test_the_nearest_size_that_works_is_never_zero() -> None:
    with pytest.raises(ShardingError, match="has size 3, .* nearest size that works: 8$"):
        partition_spec(PARAMETER_RULES, ("embed",), (3,), sizes(fsdp=8), "scale")


def test_a_shape_with_another_number_of_dimensions_than_names_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"up: 2 dimensions \(64, 128\) but 1 logical axes"):
        partition_spec(PARAMETER_RULES, ("embed",), (64, 128), sizes(), "up")
