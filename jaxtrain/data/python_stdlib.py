"""Real text that is on every machine: the sources of the running Python's standard library."""

import platform
import sysconfig
from pathlib import Path

from jaxtrain.data.dataset import Dataset, open_dataset
from jaxtrain.data.manifest import has_manifest
from jaxtrain.data.prepare import Recipe, Report, Rules, SourceFile, prepare, refuse_other, source_file
from jaxtrain.errors import ConfigError, DataError, refusing_os_errors

# Not the library itself (installed packages, tests), generated (character tables, help topics, build settings, the
# grammar of lib2to3), or programs that not every distribution has.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
_LEFT_OUT_PREFIXES = ("_sysconfigdata", "_sysconfig_vars", "config-")
_FEWEST_DOCUMENTS = 100
# Small enough that these few megabytes fill several shards, as real data do.
_SHARD_TOKENS = 1_000_000


def ensure_python_stdlib(directory: Path | str, vocab: int, held_out: float, report: Report | None = None) -> Dataset:
    """Opens the data set of the standard library in `directory`, after preparing it if there is none.

    About 470 documents, 9 MB, a few seconds. Another Python version has another text; a data set that is there is used
    whichever version made it.

    Raises:
        ConfigError: `vocab` or `held_out` is out of its range, or the data set in `directory` was made with others.
        DataError: the data set in `directory` is damaged, or this Python comes without its sources.
    """
    directory = Path(directory).absolute()
    about = {"python": platform.python_version()}
    rules = Rules(text_key="text", skip_invalid=False, held_out=held_out, seed=0)
    recipe = Recipe(rules, vocab, name="python_stdlib", about=about, shard_tokens=_SHARD_TOKENS)
    if not has_manifest(directory):
        with refusing_os_errors(f"data.dir={directory}", "choose a directory that can be written and has space"):
            return prepare(directory, stdlib_files(), recipe, report=report)
    dataset = open_dataset(directory)
    refuse_other(dataset, {"name": recipe.name, "vocab": vocab, "held_out": held_out})
    return dataset


def stdlib_files(root: Path | None = None) -> list[SourceFile]:
    """The `.py` files below `root` (default: of the running Python), named by their path from there.

    Files that aren't UTF-8, that are empty, or that repeat another one are left out.

    Raises:
        DataError: this Python comes without its sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files: dict[str, SourceFile] = {}  # by content: the first of equal files stays
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in _LEFT_OUT or part.startswith(_LEFT_OUT_PREFIXES) for part in relative.parts):
            continue
        try:
            content = path.read_text(encoding="utf-8")
            if content.strip() and content not in files:
                files[content] = source_file(path, relative.as_posix())
        except (UnicodeDecodeError, OSError, ConfigError):
            continue
    if len(files) < _FEWEST_DOCUMENTS:
        raise DataError(
            f"{root}: only {len(files)} source files here, this Python has no standard library in source form: "
            "use another Python or prepare other data"
        )
    return list(files.values())
