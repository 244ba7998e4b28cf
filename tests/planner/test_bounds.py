import jax
import pytest

from jaxtrain.config import load
from jaxtrain.planner.bounds import bounds_of, data_bound, fsdp_bound, tensor_bound
from jaxtrain.program import build
from tests.runs import ROOT
from tests.sizes import PARAMETERS

GIB = 2**30


def test_the_bound_of_8b_on_fsdp_is_three_times_its_weights() -> None:
    assert fsdp_bound(PARAMETERS["llama3-8b"]) / GIB == pytest.approx(44.9, abs=0.05)


def test_the_bound_of_70b_on_fsdp32_tensor8_is_its_weights_and_eleven_residuals_a_layer() -> None:
    residual = 2 * 8192 * 8192 * 2  # bytes of bfloat16 [2 rows, 8,192 tokens, 8,192 wide]
    weights, layers = fsdp_bound(PARAMETERS["llama3-70b"], tensor=8), tensor_bound(80, residual)
    assert (weights + layers) / GIB == pytest.approx(269, abs=0.5)


def test_layers_that_are_kept_need_not_be_gathered_again() -> None:
    assert tensor_bound(80, 1000, recompute=False) == 80 * 8 * 1000


MESHES = {
    "fsdp": (["mesh.fsdp=8"], 3 * 2 * PARAMETERS["llama3-8b"], 0, 0),
    "fsdp and tensor": (
        ["mesh.fsdp=4", "mesh.tensor=2"],
        3 * 2 * PARAMETERS["llama3-8b"] // 2, 0, 11 * 32 * (16 // 4 * 8192 * 4096 * 2),
    ),
    "fsdp and tensor without recomputation": (
        ["mesh.fsdp=4", "mesh.tensor=2", "remat=none"],
        3 * 2 * PARAMETERS["llama3-8b"] // 2, 0, 8 * 32 * (16 // 4 * 8192 * 4096 * 2),
    ),
    "data and fsdp": (
        ["mesh.data=2", "mesh.fsdp=4"],
        3 * 2 * PARAMETERS["llama3-8b"], data_bound(PARAMETERS["llama3-8b"], split=4), 0,
    ),
    "frozen embedding and head": (
        ["mesh.fsdp=8", 'optimizer.frozen=["embed.table", "head.projection"]'],
        2 * (3 * PARAMETERS["llama3-8b"] - 2 * 128_256 * 4096), 0, 0,
    ),
    "a ramp from a larger batch": (
        ["mesh.fsdp=4", "mesh.tensor=2", "batch_ramp=[{steps: 1, global_batch: 32}]"],
        3 * 2 * PARAMETERS["llama3-8b"] // 2, 0, 11 * 32 * (32 // 4 * 8192 * 4096 * 2),
    ),
    "float32": (["mesh.fsdp=8", "precision=float32"], 3 * 4 * PARAMETERS["llama3-8b"], 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_the_bounds_of_a_program_follow_its_mesh(mesh: str) -> None:
    overrides, weights, gradients, residual = MESHES[mesh]
    config = load(ROOT / "configs" / "llama3-8b.yml", overrides)
    bounds = bounds_of(build(config, jax.devices()))
    assert (bounds.weights, bounds.gradients, bounds.residual) == (weights, gradients, residual)
    assert bounds.total == weights + gradients + residual
