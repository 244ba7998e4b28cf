import pytest

from jaxtrain.telemetry.utilisation import model_flops_utilisation, peak_flops

H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        (H100, 989),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
    ],
)
def test_the_peak_is_that_of_each_device_and_adds_up(kind: str, teraflops: float) -> None:
    assert peak_flops([kind]) == teraflops * 1e12
    assert peak_flops([kind, H100, kind]) == (2 * teraflops + 989) * 1e12


@pytest.mark.parametrize(
    "kind", ["cpu", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A1000", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", ""]
)
def test_of_another_device_no_peak_is_claimed_not_even_beside_known_ones(kind: str) -> None:
    assert peak_flops([kind]) is None
    assert peak_flops([H100, kind]) is None


def test_no_device_has_no_peak() -> None:
    assert peak_flops([]) is None


def test_utilisation_is_work_over_what_could_have_been_done() -> None:
    assert model_flops_utilisation(4e15, seconds=2.0, peak=4e15) == 0.5
