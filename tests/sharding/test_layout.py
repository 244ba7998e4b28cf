import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxtrain.sharding import MESH_AXES, ShardingError, constrain, current_layout, use_layout
from tests.runs import make_layout


def test_a_mesh_has_all_axes_outermost_first_and_is_automatic() -> None:
    mesh = make_layout(data=2, fsdp=2, tensor=2).mesh
    assert mesh.axis_names == MESH_AXES == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert mesh.devices.shape == (1, 2, 2, 1, 1, 2)
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_neighbouring_devices_share_the_tensor_axis() -> None:
    mesh = make_layout(data=4, tensor=2).mesh
    assert mesh.devices.ravel().tolist() == jax.devices()[:8]


def test_a_layout_counts_devices_and_keeps_only_axes_that_split() -> None:
    layout = make_layout(data=4, tensor=2)
    assert layout.size("data", "fsdp", "tensor") == 8
    assert layout.split_axes("data", "fsdp", "tensor") == ("data", "tensor")


def test_without_a_layout_nothing_is_constrained() -> None:
    x = jnp.ones((3, 5))
    assert current_layout() is None
    assert constrain(x, "batch", "nothing known") is x


def test_a_layout_is_in_force_only_inside_its_block() -> None:
    outer, inner = make_layout(data=8), make_layout(fsdp=8)
    with use_layout(outer):
        with pytest.raises(RuntimeError, match="inside"), use_layout(inner):
            assert current_layout() is inner
            raise RuntimeError("inside")
        assert current_layout() is outer
    assert current_layout() is None


def test_an_activation_is_split_as_its_names_say() -> None:
    with use_layout(make_layout(data=2, tensor=4)):
        y = jax.jit(lambda x: constrain(x, "batch", "residual_seq", "embed"))(jnp.ones((4, 8, 3)))
    assert y.sharding.spec == PartitionSpec("data", "tensor")
    assert y.addressable_shards[0].data.shape == (2, 2, 3)


def test_an_activation_that_does_not_divide_is_refused_instead_of_silently_replicated() -> None:
    # Case 17: with_sharding_constraint alone accepts this and leaves the array whole on every device.
    with use_layout(make_layout(tensor=8)), pytest.raises(ShardingError, match="'mlp' has size 68.*mesh.tensor=8"):
        jax.jit(lambda x: constrain(x, "batch", "seq", "mlp"))(jnp.ones((4, 8, 68)))
