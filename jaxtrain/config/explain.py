"""Turning the schema's verdict on a tree into one line a fault: where, which key, what is wrong, what to do."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from jaxtrain.config.nearest import nearest_text, suggestion
from jaxtrain.config.tree import ROOT, is_nullable, keys, variants_at

WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "tuple_type": "a list",
    "list_type": "a list",
}
LIMITS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
SECTION_EXPECTED = {"model_type", "model_attributes_type", "dict_type"}


def explain(error: ValidationError, origins: Mapping[str, str], default_place: str) -> list[str]:
    """One line for each fault; a key without an origin is placed at its section, or at `default_place`."""
    return [line for details in error.errors(include_url=False) for line in _lines(details, origins, default_place)]


def place_of(path: str, origins: Mapping[str, str], default_place: str) -> str:
    """Where the key, or the nearest section around it, was written."""
    while path and path not in origins:
        path = path.rpartition(".")[0]
    return origins.get(path, default_place)


def show(value: object) -> str:
    """A value as one would write it in YAML."""
    if isinstance(value, Mapping):
        return "a section" if value else "an empty section"
    if isinstance(value, list):
        return "a list"
    return json.dumps(value, ensure_ascii=False, default=str)


def _lines(details: ErrorDetails, origins: Mapping[str, str], default_place: str) -> Iterator[str]:
    path, field = _locate(details["loc"])
    where = place_of(path, origins, default_place)
    value, kind, context = details["input"], details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        yield f"{where}: {_unknown(path, value)}"
    elif kind == "missing":
        yield f"{where}: {path} is missing{_described(field)}"
    elif kind == "union_tag_invalid":
        key = context["discriminator"].strip("'")
        path = f"{path}.{key}"
        choices = [choice.strip(" '") for choice in context["expected_tags"].split(",")]
        yield f"{place_of(path, origins, default_place)}: {path}: {_not_a_choice(value[key], choices)}"
    elif kind == "literal_error" and field is not None:
        yield f"{where}: {path}: {_not_a_choice(value, _choices(field))}{_or_null(field)}"
    elif kind in SECTION_EXPECTED:
        held = ", ".join(_held(path)) or "sections under names of your own"
        yield f"{where}: {path} is a section, not {show(value)}; it holds {held}{_or_null(field)}"
    elif kind in WANTED:
        yield f"{where}: {path}: {_not_wanted(value, WANTED[kind])}{_or_null(field)}"
    elif kind in LIMITS:
        limit, word = LIMITS[kind]
        yield f"{where}: {path}: must be {word} {context[limit]}, not {show(value)}{_or_null(field)}"
    elif kind == "value_error":
        yield f"{where}: {path}: {show(value)} {context['error']}"
    else:
        yield f"{where}: {path}: {details['msg']}, not {show(value)}"


def _locate(loc: Sequence[int | str]) -> tuple[str, FieldInfo | None]:
    """The dotted path of a fault, without the variant names that the validator puts between the keys."""
    parts: list[str] = []
    variants, chosen, field = ROOT, True, None
    for part in loc:
        if not chosen:
            chosen = True
            continue
        parts.append(str(part))
        field = next((cls.model_fields[part] for cls in variants.classes if part in cls.model_fields), None)
        variants = variants.below(str(part))
        chosen = variants.tag is None
    return ".".join(parts), field


def _unknown(path: str, value: object) -> str:
    section, _, name = path.rpartition(".")
    if path in keys():
        variants = variants_at(section)
        return f"{path} is only for {section}.{variants.tag}={' or '.join(variants.having(name))}"
    inside = f"in section {section}" if section else "at the top level"
    if (
        section
        and section not in keys()
        and (known := [key for cls in variants_at(section).classes for key in cls.model_fields])
    ):
        close = nearest_text(name, known)  # a section under a name of the user's own
        hint = f"did you mean {close}?" if close else f"valid keys are {', '.join(known)}"
        return f"unknown key {name} {inside}; {hint}"
    return f"unknown key {name} {inside}; {suggestion(path, holds_section=isinstance(value, Mapping))}"


def _not_wanted(value: object, wanted: str) -> str:
    if value is None:
        return f"has no value; give {wanted}"
    if isinstance(value, str):
        unquoted = "; write it without quotes" if wanted.endswith("number") and _is_number(value) else ""
        return f"{show(value)} is text, not {wanted}{unquoted}"
    if isinstance(value, bool):
        return f"{show(value)} is true or false, not {wanted}"
    if isinstance(value, float) and value.is_integer():
        return f"{show(value)} is not {wanted}; write {int(value)}"
    if wanted in ("text", "a path") and not isinstance(value, dict | list):
        return f"{show(value)} is not {wanted}; put it in quotes: '{value}'"
    return f"{show(value)} is not {wanted}"


def _not_a_choice(value: object, choices: list[str]) -> str:
    close = nearest_text(value, choices) if isinstance(value, str) else ""
    hint = f"; the nearest is {close}" if close and len(choices) > 1 else ""
    return f"must be {' or '.join(choices)}, not {show(value)}{hint}"


def _choices(field: FieldInfo) -> list[str]:
    members = get_args(field.annotation)
    choices = [choice for member in members for choice in (get_args(member) or [member])]
    return [choice if isinstance(choice, str) else show(choice) for choice in choices if isinstance(choice, str | int)]


def _held(path: str) -> list[str]:
    return [name for cls in variants_at(path).classes[:1] for name in cls.model_fields]


def _or_null(field: FieldInfo | None) -> str:
    return " (or null)" if field is not None and is_nullable(field) else ""


def _described(field: FieldInfo | None) -> str:
    text = field.description if field is not None and field.description else ""
    return f" ({text.rstrip('.')})" if text else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
