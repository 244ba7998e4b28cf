"""The lock files are what `scripts/lock` makes of pyproject.toml; a new dependency without a new lock fails here."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def entries(lock):
    """Each package's pin with the hashes below it: `{"jax": ("jax==0.10.2", ["sha256:..."])}`."""
    pins = {}
    for entry in re.split(r"\n(?=\S)", (ROOT / lock).read_text().strip()):
        pin, *hashes = entry.replace("\\\n", " ").split(" --hash=")
        requirement = Requirement(pin.strip())
        assert requirement.name not in pins, f"{lock} pins {requirement.name} twice"
        pins[canonicalize_name(requirement.name)] = (requirement, [hash_.strip() for hash_ in hashes])
    return pins


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-cuda12.lock"])
def test_every_package_has_one_exact_version_and_hashes(lock):
    for requirement, hashes in entries(lock).values():
        assert [specifier.operator for specifier in requirement.specifier] == ["=="]
        assert hashes
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", hash_) for hash_ in hashes)


@pytest.mark.parametrize("lock", ["requirements.lock", "requirements-cuda12.lock"])
def test_no_lock_names_a_place_to_download_from(lock):
    assert not re.search(r"://|--index|--find-links| @ ", (ROOT / lock).read_text())


@pytest.mark.parametrize("group", ["dependencies", "dev"])
def test_the_lock_meets_what_pyproject_asks_for(group):
    wanted = PROJECT["dependencies"] if group == "dependencies" else PROJECT["optional-dependencies"][group]
    pins = entries("requirements.lock")
    for text in wanted:
        requirement = Requirement(text)
        pinned = pins[canonicalize_name(requirement.name)][0]
        version = next(iter(pinned.specifier)).version
        assert requirement.specifier.contains(version), f"{pinned} is not {requirement}: run scripts/lock"


def test_cuda_only_adds_packages_and_is_of_the_same_jax():
    base, cuda = entries("requirements.lock"), entries("requirements-cuda12.lock")
    assert not set(base) & set(cuda)
    for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        assert cuda[name][0].specifier == base["jax"][0].specifier
