"""MFU in a run: the same work however the batch is split, and no number where the device's peak isn't known."""

from pathlib import Path

import pytest

from jaxtrain.models.families import make_task
from jaxtrain.telemetry import utilisation
from tests.runs import FAMILIES, run_here, tiny_config


@pytest.mark.parametrize("family", ["decoder", "own"])
def test_accumulation_changes_no_work(
    family: str, tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(utilisation.PEAK_TERAFLOPS, "cpu", 3.0)
    for microbatch in (8, 2):
        run_dir, steps = tmp_path / f"{family}-{microbatch}", ["steps=3", f"microbatch={microbatch}"]
        config = tiny_config(tmp_path, tiny_data, *FAMILIES[family], *steps, f"run_dir={run_dir}")
        lines = run_here(config)
        needed = make_task(config).flops(8).training
        assert [line["mfu"] * line["step_seconds"] * 3e12 for line in lines] == pytest.approx([needed] * 3)


def test_the_peak_of_all_devices_counts(tmp_path: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(utilisation.PEAK_TERAFLOPS, "cpu", 3.0)
    config = tiny_config(tmp_path, tiny_data, *FAMILIES["own"], "steps=2", "mesh.fsdp=8")
    needed = make_task(config).flops(8).training
    lines = run_here(config, devices=8)
    assert [line["mfu"] * line["step_seconds"] * 8 * 3e12 for line in lines] == pytest.approx([needed] * 2)


def test_on_a_device_of_unknown_peak_there_is_no_number(tmp_path: Path, tiny_data: Path) -> None:
    lines = run_here(tiny_config(tmp_path, tiny_data, *FAMILIES["own"], "steps=2"))
    assert ["mfu" in line for line in lines] == [False, False]
