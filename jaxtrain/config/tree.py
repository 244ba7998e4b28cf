"""The schema as a tree of dotted keys: what exists, what a section may hold, what may change on resume."""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from jaxtrain.config.base import TARGET, OpenSection, Section, expand_home
from jaxtrain.config.schema import Config


@dataclass(frozen=True)
class Key:
    """One key of the schema, by its dotted path, with its default as plain data."""

    path: str
    is_section: bool
    may_change: bool
    default: Any

    @property
    def has_default(self) -> bool:
        """Whether the key may be left out; a section that can't be null has the defaults of its keys instead."""
        return self.default is not PydanticUndefined


@dataclass(frozen=True)
class Variants:
    """The classes that a section can have; where there are several, the key `tag` tells which one it is.

    `each` is the class of the sections in a mapping by names of the user's own, or in a list.
    """

    classes: tuple[type[Section], ...]
    tag: str | None = None
    each: type[Section] | None = None

    def named(self, name: object) -> type[Section] | None:
        """The class whose tag has this value; None stands for a tag that was left out."""
        if self.tag is None:
            return self.classes[0] if self.classes else None
        for cls in self.classes:
            field = cls.model_fields[self.tag]
            if name in get_args(field.annotation) or (name is None and not field.is_required()):
                return cls
        return None

    def chosen_by(self, values: Mapping[str, Any]) -> object:
        """The tag value that a mapping chooses, by the tag or by naming its own code; None where it leaves it open."""
        if self.tag is None or self.tag in values:
            return None if self.tag is None else values[self.tag]
        return TARGET if TARGET in values and self.named(TARGET) is not None else None

    def having(self, key: str) -> list[str]:
        """The tag values of the classes that have this key."""
        if self.tag is None:
            return []
        owners = [cls for cls in self.classes if key in cls.model_fields]
        return [str(name) for cls in owners for name in get_args(cls.model_fields[self.tag].annotation)]

    def below(self, key: str) -> "Variants":
        """What the section under `key` can be; no class at all where `key` is unknown or holds no section."""
        if self.each is not None:
            return Variants((self.each,))
        fields = [cls.model_fields[key] for cls in self.classes if key in cls.model_fields]
        return variants_of(fields[0]) if fields else Variants(())


ROOT = Variants((Config,))


def belongs_to_own_code(path: str) -> bool:
    """Whether a key that the schema doesn't list may be one of somebody's own code, if the section names one."""
    variants = ROOT
    for part in path.split(".")[:-1]:
        variants = variants.below(part)
        if any(issubclass(cls, OpenSection) for cls in variants.classes):
            return True
    return False


def own_key_may_change(path: str) -> bool:
    """Whether a resumed run may have another value of a key that the schema doesn't list."""
    section = path.rpartition(".")[0]
    return any(issubclass(cls, OpenSection) and cls.own_keys_may_change for cls in variants_at(section).classes)


def variants_of(field: FieldInfo) -> Variants:
    """The section classes that a field can hold."""
    tag = field.discriminator if isinstance(field.discriminator, str) else None
    return Variants(tuple(_section_classes(field.annotation)), tag, _class_of_each(field.annotation))


def variants_at(path: str) -> Variants:
    """What the section at a dotted path can be; `""` is the top level."""
    variants = ROOT
    for part in path.split(".") if path else []:
        variants = variants.below(part)
    return variants


def key_at(path: str) -> Key | None:
    """The key at a dotted path, also below names of the user's own; None where there is none."""
    section, _, name = path.rpartition(".")
    if path in keys():
        return keys()[path]
    fields = [cls.model_fields[name] for cls in variants_at(section).classes if name in cls.model_fields]
    return _key(path, fields[0]) if fields else None


def is_nullable(field: FieldInfo) -> bool:
    """Whether the field may be null."""
    return type(None) in _members(field.annotation)


@cache
def keys() -> Mapping[str, Key]:
    """Every key of every variant, in the order of the schema."""
    found: dict[str, Key] = {}
    for key in _walk(ROOT, ""):
        found.setdefault(key.path, key)
    return found


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a plain tree by dotted path."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return found


def value_at(config: Config, path: str) -> Any:
    """The value of a key; None where the config's variants don't have it."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def _walk(variants: Variants, prefix: str) -> Iterator[Key]:
    for cls in variants.classes:
        for name, field in cls.model_fields.items():
            yield _key(prefix + name, field)
            yield from _walk(variants_of(field), f"{prefix}{name}.")


def _key(path: str, field: FieldInfo) -> Key:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    is_section = bool(variants_of(field).classes)
    return Key(path, is_section, bool(extra.get("may_change_on_resume")), _plain(field.default))


def _plain(default: Any) -> Any:
    if isinstance(default, tuple):
        return list(default)
    if not isinstance(default, Path):
        return default
    try:
        return str(expand_home(default))
    except ValueError:
        return str(default)


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _section_classes(annotation: Any) -> Iterator[type[Section]]:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, Section):
            yield member


def _class_of_each(annotation: Any) -> type[Section] | None:
    """The section class of the values of a `dict[str, …]` or `list[…]`."""
    inner = get_args(annotation)[-1] if get_origin(annotation) in (dict, list) else None
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None
