"""What sections and keys are made of."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

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


def choose_by_default(key: str, choice: str) -> Callable[[object], object]:
    """Let a section that doesn't say which variant it is be the usual one."""

    def choose(value: object) -> object:
        return {key: choice, **value} if isinstance(value, Mapping) else value

    return choose


LocalPath = Annotated[Path, Strict(False), BeforeValidator(_local_path)]
Count = Annotated[int, Field(le=2**31 - 1)]
"""A number that devices count with: int32."""
Seconds = Annotated[int, Field(le=2_000_000)]
"""A time limit: as milliseconds it is still an int32."""
Names = Annotated[tuple[str, ...], Strict(False)]
"""A list of names."""
Address = Annotated[str, AfterValidator(_filled_in)]


class Section(BaseModel):
    """A mapping of the configuration: unknown keys and values of another type are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True)
