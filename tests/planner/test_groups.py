import numpy as np
import pytest

from jaxtrain.planner.groups import MeshShape, read_groups
from jaxtrain.planner.hlo import HloError

MESH = MeshShape({"data": 2, "fsdp": 4, "expert": 1, "tensor": 2})
"""Device number = 8 · data + 2 · fsdp + tensor."""

NUMBERS = np.arange(16).reshape(2, 4, 2)
OVER_FSDP = NUMBERS.transpose(0, 2, 1).reshape(-1, 4)
OVER_TENSOR = NUMBERS.reshape(-1, 2)
OVER_DATA = NUMBERS.reshape(2, 8).T
OVER_DATA_AND_TENSOR = NUMBERS.transpose(1, 0, 2).reshape(-1, 4)

FORMS = {
    "listed": ("replica_groups={{0,2,4,6},{1,3,5,7},{8,10,12,14},{9,11,13,15}}, dimensions={0}", OVER_FSDP, ("fsdp",)),
    "counted": ("replica_groups=[8,2]<=[16], dimensions={0}", OVER_TENSOR, ("tensor",)),
    "counted and transposed": ("replica_groups=[8,2]<=[2,8]T(1,0)", OVER_DATA, ("data",)),
    "counted, transposed in three dimensions": (
        "replica_groups=[4,4]<=[2,4,2]T(1,0,2), channel_id=1", OVER_DATA_AND_TENSOR, ("data", "tensor"),
    ),
    "by a mesh of its own": ("replica_groups=mesh['a'=2,'b'=4,'c'=2] {'b'}, dimensions={1}", OVER_FSDP, ("fsdp",)),
    "by a mesh, along two axes": (
        "replica_groups=mesh['a'=2,'b'=4,'c'=2] {'a','c'}", OVER_DATA_AND_TENSOR, ("data", "tensor"),
    ),
    "by a mesh with an axis of one": ("replica_groups=mesh['a'=8,'b'=1,'c'=2] {'c'}", OVER_TENSOR, ("tensor",)),
    "by a mesh, along the first part of an axis": ("replica_groups=mesh['a'=16] {'a':(1)2}", OVER_DATA, ("data",)),
    "by a mesh, along the middle of an axis": ("replica_groups=mesh['a'=16] {'a':(2)4}", OVER_FSDP, ("fsdp",)),
    "by a mesh that counts its devices otherwise": (
        "replica_groups=mesh['a'=8,'b'=2], device_ids=([8,2]<=[2,8]T(1,0)) {'b'}", OVER_DATA, ("data",),
    ),
    "by a mesh with a list of its devices": (
        "replica_groups=mesh['a'=2,'b'=8], device_ids=(8,9,10,11,12,13,14,15,0,1,2,3,4,5,6,7) {'a'}",
        OVER_DATA[:, ::-1], ("data",),
    ),
    "all devices, unsaid": (
        "replica_groups={}, use_global_device_ids=true", np.arange(16)[None], ("data", "fsdp", "tensor"),
    ),
    "pairs": (
        "channel_id=1, source_target_pairs={{0,2},{2,4},{4,6},{6,0}}",
        np.array([[0, 2], [2, 4], [4, 6], [6, 0]]), ("fsdp",),
    ),
    "half of an axis": ("replica_groups={{0,2},{4,6}}", np.array([[0, 2], [4, 6]]), ("fsdp",)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_groups_are_read_and_named_by_the_mesh_axes_along_which_they_lie(form: str) -> None:
    attributes, groups, axes = FORMS[form]
    found = read_groups(f'{attributes}, metadata={{op_name="replica_groups={{{{9,9}}}}"}}', MESH.devices)
    np.testing.assert_array_equal(found, groups)
    assert MESH.axes_of(found) == axes


@pytest.mark.parametrize(
    "attributes", ["dimensions={0}", "replica_groups=everyone", "replica_groups=mesh['a'=2] {'a':x}"]
)
def test_groups_in_an_unknown_form_are_refused(attributes: str) -> None:
    with pytest.raises(HloError, match="form that isn't known here"):
        read_groups(attributes, 2)
