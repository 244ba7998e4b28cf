from pathlib import Path

import pytest

from jaxtrain.config.cluster import CLUSTERS, cluster_names, load_cluster
from jaxtrain.errors import ConfigError

FACTS = {  # memory in GB, cores, bandwidth in TB/s, capability
    "a100": (85, 108, 2.04, (8, 0)),
    "b200": (192, 148, 7.67, (10, 0)),
    "h100": (85, 132, 3.35, (9, 0)),
    "h200": (151, 132, 4.8, (9, 0)),
}


def test_the_shipped_clusters_hold_what_the_makers_say() -> None:
    assert cluster_names() == sorted(FACTS)
    for name, (memory, cores, bandwidth, capability) in FACTS.items():
        cluster = load_cluster(name)
        assert cluster.devices_per_host == 8
        gpu = cluster.gpu
        assert (round(gpu.memory / 1e9), gpu.cores, round(gpu.memory_bandwidth / 1e12, 2)) == (memory, cores, bandwidth)
        assert gpu.compute_capability == capability
        assert gpu.name.startswith(name.upper())


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_file_opens_with_its_command(name: str) -> None:
    assert (
        f"python -m jaxtrain.compile configs/llama3-8b.yml --target {name} --devices 8"
        in (CLUSTERS / f"{name}.yml").read_text()
    )


def test_a_file_of_ones_own_may_stand_on_a_shipped_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yml"
    mine.write_text(
        f"base: {CLUSTERS / 'h100.yml'}\ngpu: {{name: H100 NVL, memory: 100000000000}}\ndevices_per_host: 4\n"
    )
    cluster = load_cluster(str(mine))
    assert (cluster.gpu.name, cluster.gpu.memory, cluster.gpu.cores, cluster.devices_per_host) == (
        "H100 NVL", 100000000000, 132, 4,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [("h10", "did you mean h100"), ("H100", "did you mean h100"), ("tpu", "known are a100, b200, h100, h200")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown target {name}; {message}"):
        load_cluster(name)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("gpu: {cores: many}", 'mine.yml:2: gpu.cores: .*, not "many"'),
        ("gpu: {core: 3}", "mine.yml:2: unknown key gpu.core; keys here are name, .*cores"),
        ("hosts: 3", "mine.yml:2: unknown key hosts; keys here are gpu, devices_per_host"),
        ("devices_per_host: 0", "mine.yml:2: devices_per_host: .*greater than 0"),
        ("gpu: {compute_capability: [9, 0, 0]}", "mine.yml:2: gpu.compute_capability"),
    ],
)
def test_a_wrong_file_is_refused_with_line_and_key(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "mine.yml").write_text(f"base: {CLUSTERS / 'h100.yml'}\n{text}\n")
    with pytest.raises(ConfigError, match=line):
        load_cluster(str(tmp_path / "mine.yml"))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text("gpu: {name: mine}\n")
    with pytest.raises(ConfigError, match=r"mine.yml:1: gpu.memory is missing"):
        load_cluster(str(tmp_path / "mine.yml"))
    with pytest.raises(ConfigError, match=r"no\.yml: no such file"):
        load_cluster(str(tmp_path / "no.yml"))
