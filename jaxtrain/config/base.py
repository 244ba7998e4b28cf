"""What sections and keys are made of."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict


def setting(default: Any, description: str, *, may_change: bool = False, **limits: Any) -> Any:
    """A key of the configuration; `may_change` says whether a resumed run may have another value than it began with."""
    return Field(default, description=description, json_schema_extra={"may_change_on_resume": may_change}, **limits)


def section(cls: type["Section"], description: str) -> Any:
    """A key that holds a section; leaving it out leaves every key below at its default."""
    return Field(default_factory=cls, description=description)


def _filled_in(value: str) -> str:
    if not value.strip():
        raise ValueError("is empty")
    return value


def expand_home(path: str | Path) -> Path:
    """The path with `~` replaced; ValueError with the reason where no file can have this name."""
    if "\0" in str(path):
        raise ValueError("holds a null character, which no path can have")
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ValueError("begins with a home directory that is not known here; write the path in full") from None


def _local_path(value: object) -> object:
    if not isinstance(value, str | Path):
        return value
    if "://" in str(value):  # Path would make a directory named `gs:` of it
        raise ValueError("is a URL; a local or mounted directory is needed")
    return expand_home(_filled_in(str(value)))


def _run_name(value: str) -> str:
    return str(_local_path(value))


TARGET = "target"
"""The key that names somebody's own code; where a section has such a variant, the key alone chooses it."""


def choose_by_default(key: str, choice: str, *, or_target: bool = False) -> Callable[[object], object]:
    """Let a section that doesn't say which variant it is be the usual one, or with `or_target` its own code."""

    def choose(value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {key: TARGET if or_target and TARGET in value else choice, **value}

    return choose


def _code_name(value: str) -> str:
    module, _, name = value.partition(":")
    if not all(part.isidentifier() for dotted in (module, name) for part in dotted.split(".")):
        raise ValueError("must be MODULE:NAME, such as my_package.my_module:MyTask")
    return value


def _plain(value: object) -> object:
    """Checks that a printed configuration can hold the value and be read back equal."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str):
                raise ValueError(f"holds the key {key!r}; a key must be text")
            _plain(child)
    elif isinstance(value, list):
        for child in value:
            _plain(child)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("is no finite number")
    elif not (value is None or isinstance(value, bool | int | float | str)):
        raise ValueError(f"is a {type(value).__name__}, not a number, text, list or section; put it in quotes")
    return value


LocalPath = Annotated[Path, Strict(False), BeforeValidator(_local_path)]
Count = Annotated[int, Field(le=2**31 - 1)]
"""A number that devices count with: int32."""
Seconds = Annotated[int, Field(le=2_000_000)]
"""A time limit: as milliseconds it is still an int32."""
Names = Annotated[tuple[str, ...], Strict(False)]
"""A list of names."""
Address = Annotated[str, AfterValidator(_filled_in)]
CodeName = Annotated[str, AfterValidator(_code_name)]
"""MODULE:NAME of somebody's own code."""


RunName = Annotated[str, AfterValidator(_run_name)]
"""`RUN` or `RUN@STEP`: a directory, and perhaps a step in it."""


class Section(BaseModel):
    """A mapping of the configuration: unknown keys and values of another type are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)


class OpenSection(Section):
    """A section for somebody's own code: the keys that aren't listed here are that code's, and it judges them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_plain)]]
    own_keys_may_change: ClassVar[bool] = False
    """Whether a resumed run may have other ones than it began with."""

    @property
    def own_keys(self) -> dict[str, Any]:
        """The keys that aren't listed in the schema, with their values."""
        return dict(self.model_extra or {})
