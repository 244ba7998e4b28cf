"""Real text that is on every machine: the sources of the running Python's standard library."""

import platform
import sysconfig
from pathlib import Path

from jaxtrain.data.dataset import Dataset
from jaxtrain.data.prepare import Report, Text, TextSource, ensure_text_dataset
from jaxtrain.errors import DataError

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


def ensure_python_stdlib(directory: Path | str, vocab: int, held_out: float, report: Report | None = None) -> Dataset:
    """`ensure_text_dataset` of the standard library: about 470 documents, 9 MB, a few seconds.

    Another Python version has another text; a data set that is there is used whichever version made it.
    """
    source = TextSource("python_stdlib", {"python": platform.python_version()}, stdlib_documents)
    return ensure_text_dataset(directory, source, vocab, held_out, report)


def stdlib_documents(root: Path | None = None) -> list[Text]:
    """The `.py` files below `root` (default: of the running Python), named by their path from there.

    Files that aren't UTF-8, that are empty, or that repeat another one are left out.

    Raises:
        DataError: this Python comes without its sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    documents: dict[str, str] = {}  # by content: the first of equal files stays
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if any(part in _LEFT_OUT or part.startswith(_LEFT_OUT_PREFIXES) for part in relative.parts):
            continue
        try:
            content = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if content.strip():
            documents.setdefault(content, relative.as_posix())
    if len(documents) < _FEWEST_DOCUMENTS:
        raise DataError(
            f"{root}: only {len(documents)} source files here, this Python has no standard library in source form: "
            "use another Python or prepare other data"
        )
    return [Text(name, content) for content, name in documents.items()]
