"""The directory of a run: the files that it holds."""

import fcntl
import logging
import secrets
import zlib
from pathlib import Path
from typing import Any, TextIO

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from jaxtrain.config import Config, dump
from jaxtrain.errors import ConfigError
from jaxtrain.files import read_json, replace_file

_log = logging.getLogger(__name__)


class RunDirectory:
    """The files of a run.

    Attributes:
        crash: a folder with the stacks of all threads of each process, where a fault ended the run.
        timeline: a folder with what the last steps of each rank were spent on.
        tokenizer: a folder with the tokenizer of the data, so that a model can be talked to where they are not.
        excluded: which hosts are bad: a list of objects with `host`, `rank` and `reason`.
        logs: a folder with what the processes say.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.yml"
        self.info = path / "run.json"
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.norms = path / "norms.jsonl"
        self.tensorboard = path / "tensorboard"
        self.tokenizer = path / "tokenizer"
        self.timeline = path / "timeline"
        self.crash = path / "crash"
        self.logs = path / "logs"
        self.excluded = path / "excluded.json"

    def profile(self, process: int) -> Path:
        """What this process's profiler writes; two processes of one host would write to the same file."""
        return self.path / "profile" / f"process-{process}"

    def identity(self) -> str:
        """A name that no other run has, nor a copy of this one; made when it is first asked for."""
        file = self.path / "run_id"
        if not file.exists():
            replace_file(file, secrets.token_hex(8) + "\n")
        return f"{file.read_text().strip()}-{zlib.crc32(str(self.path.resolve()).encode()):08x}"

    def rows(self, process: int) -> Path:
        """Which rows each step of this process consumed."""
        return self.path / f"rows-{process}.jsonl"

    def row_logs(self) -> list[tuple[int, Path]]:
        """The row logs that are there, each with its process."""
        return [(int(path.stem.removeprefix("rows-")), path) for path in sorted(self.path.glob("rows-*.jsonl"))]

    def holds_a_run(self) -> bool:
        """Whether a run was started here."""
        return self.config.exists()

    def saved_config(self) -> dict[str, Any]:
        """The resolved config of the run that is here.

        Raises:
            ConfigError: the file can't be read.
        """
        try:
            return dict(YAML(typ="safe", pure=True).load(self.config.read_text()))
        except (OSError, YAMLError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.config}: can't be read ({error}); choose another run_dir") from error

    def saved_info(self) -> dict[str, Any]:
        """What the last start wrote into `run.json`; nothing where that can't be read."""
        try:
            return dict(read_json(self.info))
        except (OSError, ValueError, TypeError):
            return {}

    def claim(self) -> TextIO:
        """Holds the directory against every other process until the file that is returned is closed.

        The kernel lets go when the holder dies. Where the file system has no locks, nothing is held.

        Raises:
            ConfigError: another process trains here.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.events.open("a", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ConfigError(
                f"run_dir={self.path}: another process trains here; wait for its end, or choose another run_dir"
            ) from None
        except OSError as error:
            _log.info("%s can't be locked (%s)", self.events, error)
        return file

    def write_config(self, config: Config) -> None:
        """Records the resolved config."""
        replace_file(self.config, dump(config))
