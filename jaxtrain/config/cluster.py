"""What a cluster is made of: one YAML file a kind of GPU, such as `configs/clusters/h100.yml`."""

from difflib import get_close_matches
from functools import reduce
from pathlib import Path

from pydantic import Field, ValidationError

from jaxtrain.config.base import Section, setting
from jaxtrain.config.explain import place_of, show
from jaxtrain.config.source import overlay, places, plain, read_chain
from jaxtrain.errors import ConfigError

CLUSTERS = Path(__file__).resolve().parents[2] / "configs" / "clusters"


class GpuConfig(Section):
    """One GPU, as its compiler needs to know it. Sizes are bytes."""

    name: str = setting(..., "What people call it.")
    compute_capability: tuple[int, int] = setting(..., "Major and minor version of its instructions.", strict=False)
    memory: int = setting(..., "Device memory.", gt=0)
    memory_bandwidth: int = setting(..., "Bytes a second from and to device memory.", gt=0)
    cores: int = setting(..., "Streaming multiprocessors.", gt=0)
    fpus_per_core: int = setting(128, "Float32 units in each of them.", gt=0)
    clock_ghz: float = setting(..., "Highest clock.", gt=0)
    l2_cache: int = setting(..., "Level-two cache.", gt=0)
    shared_memory_per_core: int = setting(..., "Shared memory of a multiprocessor.", gt=0)
    shared_memory_per_block: int = setting(..., "Shared memory that one block of threads can ask for.", gt=0)


class ClusterConfig(Section):
    """Hosts of equal GPUs."""

    gpu: GpuConfig = Field(description="The GPU in it.")
    devices_per_host: int = setting(8, "GPUs in a host.", gt=0)


def cluster_names() -> list[str]:
    """The clusters that are described beside the configurations."""
    return sorted(path.stem for path in CLUSTERS.glob("*.yml"))


def load_cluster(name: str) -> ClusterConfig:
    """The cluster that a name (`h100`) or the path of a YAML file stands for.

    Raises:
        ConfigError: no such cluster, or a file that doesn't describe one, with line and key of each fault.
    """
    is_path = name.endswith((".yml", ".yaml")) or "/" in name
    if not is_path and name not in cluster_names():
        close = get_close_matches(name.lower(), cluster_names(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(cluster_names())}"
        raise ConfigError(
            f"unknown target {name}; {hint} The path of a YAML file like configs/clusters/h100.yml works too"
        )
    path = Path(name) if is_path else CLUSTERS / f"{name}.yml"
    problems: list[str] = []
    cluster = None
    tree = reduce(overlay, read_chain(path, problems))
    try:
        cluster = ClusterConfig.model_validate(plain(tree))
    except ValidationError as error:
        problems += _faults(error, dict(places(tree)), str(path))
    if cluster is None or problems:
        raise ConfigError("\n".join(problems))
    return cluster


def _faults(error: ValidationError, origins: dict[str, str], file: str) -> list[str]:
    lines = []
    for details in error.errors(include_url=False):
        path = ".".join(str(part) for part in details["loc"])
        where = place_of(path, origins, file)
        if details["type"] == "extra_forbidden":
            section = GpuConfig if path.startswith("gpu.") else ClusterConfig
            lines.append(f"{where}: unknown key {path}; keys here are {', '.join(section.model_fields)}")
        elif details["type"] == "missing":
            lines.append(f"{where}: {path} is missing")
        else:
            lines.append(f"{where}: {path}: {details['msg'].lower()}, not {show(details['input'])}")
    return lines
