"""Reading a configuration: YAML files, the files they are based on, and overrides, with the place of every value.

YAML is read as YAML 1.2 (`1e-4` is a number, `010` is ten, `on` is text) from its node graph, because only nodes know
their lines and still show a key that was given twice. Nothing here knows types; the schema judges the merged tree.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, MappingNode, ScalarNode
from ruamel.yaml import Node as YamlNode
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from jaxtrain.config.base import OpenSection, Section, expand_home
from jaxtrain.config.nearest import suggestion
from jaxtrain.config.tree import Variants, belongs_to_own_code, keys
from jaxtrain.errors import ConfigError

DEEPEST = 50
OVERRIDE = re.compile(r"(?:--)?(?P<key>[\w.-]+)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Node:
    """A value and where it was written: `FILE:LINE` or the override. A mapping's value is `dict[str, Node]`."""

    value: Any
    place: str


def plain(node: Node) -> Any:
    """The values alone."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    return node.value


def as_node(values: Any, place: str) -> Node:
    """Plain values as a tree that was all written at one place."""
    if isinstance(values, Mapping):
        return Node({str(key): as_node(child, place) for key, child in values.items()}, place)
    return Node(values, place)


def places(node: Node, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The place of every key below, by dotted path."""
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield prefix + key, child.place
            yield from places(child, f"{prefix}{key}.")


def read_chain(path: Path, problems: list[str]) -> list[Node]:
    """The file and those it is based on, the outermost base first.

    Appends a line to `problems` for each fault that leaves the rest readable. Raises ConfigError for a file that can't
    be read or isn't YAML, and for bases that go in a circle.
    """
    chain: list[Node] = []
    visited: dict[str, Path] = {}
    asked_by = ""
    while True:
        real = os.path.realpath(path)
        if real in visited:
            circle = " -> ".join(str(file) for file in [*visited.values(), path])
            raise ConfigError(f"{asked_by}base goes in a circle: {circle}; remove one of these base lines")
        visited[real] = path
        tree = read_file(path, problems, asked_by)
        chain.insert(0, tree)
        base = tree.value.pop("base", None)
        if base is None:
            return chain
        if not isinstance(base.value, str) or not base.value:
            problems.append(f"{base.place}: base: must be the path of a YAML file, relative to this one")
            return chain
        try:
            path, asked_by = path.parent / expand_home(base.value), f"{base.place}: "
        except ValueError as error:
            problems.append(f"{base.place}: base: {json.dumps(base.value)} {error}")
            return chain


def read_file(path: Path, problems: list[str], asked_by: str = "") -> Node:
    """The mapping that a YAML file holds."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{asked_by}{path}: no such file{_similar_file(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{asked_by}{path}: is a directory; name a YAML file in it") from None
    except OSError as error:
        raise ConfigError(f"{asked_by}{path}: can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{asked_by}{path}: is not text in UTF-8, so not a YAML file") from None
    reader = _Reader(str(path), problems, numbered=True)
    root = reader.read(text)
    if root is None:
        raise ConfigError(f"{asked_by}{path}: is empty; a configuration has at least run_dir: PATH")
    if not isinstance(root.value, dict):
        raise ConfigError(f"{asked_by}{path}: must be lines of `key: value`, not {_kind(root.value)}")
    return root


def read_overrides(overrides: Sequence[str], problems: list[str]) -> Node:
    """`key.path=value` texts as one tree; appends a line to `problems` for each that can't be used."""
    tree: dict[str, Any] = {}
    given: dict[str, str] = {}
    for text in overrides:
        place = f"override {text}"
        match = OVERRIDE.fullmatch(text)
        if match is None:
            problems.append(f"{place}: must have the form key.path=value, such as optimizer.learning_rate=1e-3")
            continue
        key, value = match["key"], match["value"]
        if key not in keys() and not belongs_to_own_code(key):
            problems.append(f"{place}: unknown key {key}; {suggestion(key)}")
            continue
        if key in given:
            problems.append(f"{place}: {key} is given twice, first as {given[key]}; keep one")
            continue
        given[key] = text
        try:
            node = _Reader(place, problems).read(value)
        except ConfigError as error:
            problems.append(f"{error}; put the value in quotes if it is text")
            continue
        if node is None:
            problems.append(f"{place}: has no value; write {key}=null for none")
            continue
        for part in reversed(key.split(".")):
            node = Node({part: node}, place)
        tree = overlay(Node(tree, ""), node).value
    return Node(tree, "")


def overlay(base: Node, child: Node, variants: Variants | None = None) -> Node:
    """`child` over `base`: mappings key by key, everything else replaced.

    Where the child makes a section another variant (`optimizer.name`, `schedule.kind`, `model.target`), what the base
    says about keys that this variant doesn't have is dropped: it was right for the other. `variants` None keeps all.
    """
    if not isinstance(base.value, dict) or not isinstance(child.value, dict):
        return child
    merged = dict(base.value)
    if variants is not None and (name := _chosen(variants, child)) is not None:
        old, new = _named(variants, _chosen(variants, base)), _named(variants, name)
        if old and new and old is not new:
            # What the schema doesn't list belongs to somebody's own code, and goes with it.
            leaving = merged if issubclass(old, OpenSection) else old.model_fields
            merged = {key: node for key, node in merged.items() if key not in leaving or key in new.model_fields}
            merged.pop(str(variants.tag), None)  # the child may have chosen without it
    for key, node in child.value.items():
        below = None if variants is None else variants.below(key)
        merged[key] = overlay(merged[key], node, below) if key in merged else node
    return Node(merged, child.place)


def _chosen(variants: Variants, node: Node) -> object:
    return variants.chosen_by({key: child.value for key, child in node.value.items()})


def _named(variants: Variants, name: object) -> type[Section] | None:
    return variants.named(name) if name is None or isinstance(name, str) else None


class _Reader:
    """Turns one YAML text into nodes with places."""

    def __init__(self, source: str, problems: list[str], *, numbered: bool = False) -> None:
        self.source, self.problems, self.numbered = source, problems, numbered
        self.yaml = YAML(typ="safe", pure=True)
        self.open: list[YamlNode] = []

    def read(self, text: str) -> Node | None:
        """The document; None if it is empty. Raises ConfigError if it isn't YAML."""
        try:
            root = self.yaml.compose(text)
        except MarkedYAMLError as error:
            where = self._place(error.problem_mark or error.context_mark)
            raise ConfigError(f"{where}: not valid YAML: {_explained(error)}") from None
        except YAMLError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{self.source}: not valid YAML: {reason}") from None
        except RecursionError:
            raise ConfigError(f"{self.source}: nested too deeply to be a configuration") from None
        return None if root is None else self._node(root, "", self._place(root.start_mark))

    def _node(self, node: YamlNode, path: str, place: str) -> Node:
        if node in self.open:
            raise ConfigError(f"{place}: {path}: this alias stands inside what it stands for")
        if len(self.open) == DEEPEST:
            raise ConfigError(f"{place}: nested too deeply to be a configuration")
        if not isinstance(node, MappingNode):
            return Node(self._scalar(node, path, place), place)
        self.open.append(node)
        children: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = self._place(key_node.start_mark)
            if not isinstance(key_node, ScalarNode):
                self.problems.append(f"{where}: a key must be a word, not {_kind(key_node.value)}")
                continue
            key = str(key_node.value)
            child = path + "." + key if path else key
            if key in children:
                self.problems.append(f"{where}: {child} is given twice, first at {children[key].place}; keep one")
                continue
            if "." in key:
                self.problems.append(f"{where}: {child}: in a file, sections are nested; dots are for overrides")
                continue
            children[key] = self._node(value_node, child, where)
        self.open.pop()
        return Node(children, place)

    def _scalar(self, node: YamlNode, path: str, place: str) -> Any:
        try:
            value = self.yaml.constructor.construct_object(node, deep=True)
        except RecursionError:
            raise ConfigError(f"{place}: nested too deeply to be a configuration") from None
        except (YAMLError, ValueError) as error:
            reason = _explained(error) if isinstance(error, MarkedYAMLError) else str(error).splitlines()[0]
            raise ConfigError(f"{place}: {path or 'value'}: {reason}") from None
        if isinstance(value, dict):
            raise ConfigError(f"{place}: {path or 'value'}: a list tagged as a mapping; write lines of `key: value`")
        return value

    def _place(self, mark: Any) -> str:
        return f"{self.source}:{mark.line + 1}" if self.numbered and mark is not None else self.source


def _explained(error: MarkedYAMLError) -> str:
    problem = str(error.problem or error.context).splitlines()[0]
    if "'\\t'" in problem:
        return "a tab can't indent or separate here; use spaces"
    if "another document" in problem:
        return "a second document starts here (`---`); keep one"
    return problem


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else f"the value {value}"


def _similar_file(path: Path) -> str:
    here = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    close = get_close_matches(path.name, here, n=1, cutoff=0.8)
    return f"; did you mean {path.parent / close[0]}?" if close else ""
