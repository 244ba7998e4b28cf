"""Somebody's own code, named by `target: MODULE:NAME` in a config: found, judged by its signature, called.

Nothing has to be registered. The module is looked for in the current directory and on PYTHONPATH. What is wrong with
the name, the keys or the code is one line that names the key and the place in the code; never imports jax itself.
"""

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jaxtrain.errors import ConfigError, JaxtrainError, first_line

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_target(
    section: str, target: str, keys: Mapping[str, Any], offered: Mapping[str, Any], origins: Mapping[str, str]
) -> Any:
    """What the callable `target` returns for the keys of its section.

    Args:
        section: `model` or `data`, for messages.
        target: MODULE:NAME.
        keys: the section's other keys; each is an argument of the same name.
        offered: arguments that the trainer has; passed where the callable takes one of that name.
        origins: where each key of the config was written.

    Raises:
        ConfigError: the code can't be found or imported, the keys aren't its arguments, or it refuses their values.
    """
    place = origins.get(f"{section}.target")
    at = f"{place}: " if place else ""
    function = find_target(f"{at}{section}.target={target}", target)
    problems = _argument_problems(section, target, function, keys, offered, origins)
    if problems:
        raise ConfigError("\n".join(problems))
    taken = _parameters(function)
    arguments = {**keys, **{name: value for name, value in offered.items() if name in taken}}
    try:
        return function(**arguments)
    except JaxtrainError as error:
        raise type(error)(f"{at}{section}.target={target}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{at}{section}.target={target} refuses its keys: {_told(error)}") from error


def takes(target: str, argument: str) -> bool:
    """Whether the callable of this name, which is known to exist, has an argument of that name."""
    return argument in _parameters(find_target(target, target))


def find_target(what: str, target: str) -> Callable[..., Any]:
    """The callable of this name; `what` stands at the beginning of messages.

    Raises:
        ConfigError: there is no such module or name, the module can't be imported, or the name isn't callable.
    """
    module_name, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{what}: {module_name} can't be imported: {_told(error)}") from error
        raise ConfigError(
            f"{what}: there is no module {error.name} in {here} or on PYTHONPATH; start in the folder that holds it, "
            f"or add that folder to PYTHONPATH"
        ) from None
    except (Exception, SystemExit) as error:  # a script that ends with sys.exit(main())
        raise ConfigError(f"{what}: {module_name} can't be imported: {_told(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            names = [known for known in vars(found) if not known.startswith("_")]
            raise ConfigError(f"{what}: {module_name} has no {name}{_nearest(part, names)}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{what}: is of type {type(found).__name__}, not a class or function that can be called")
    return found


def _argument_problems(
    section: str,
    target: str,
    function: Callable[..., Any],
    keys: Mapping[str, Any],
    offered: Mapping[str, Any],
    origins: Mapping[str, str],
) -> list[str]:
    """One line for each key that the callable doesn't take, and for each argument that it lacks."""
    parameters = _parameters(function)
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [name for name, parameter in parameters.items() if parameter.kind in _BY_NAME and name not in offered]
    problems = []
    for key in keys:
        place = origins.get(f"{section}.{key}")
        at = f"{place}: " if place else ""
        if key in offered:
            problems.append(f"{at}{section}.{key}: {target} is given the run's own {key}; leave the key out")
        elif key not in named and not takes_all:
            problems.append(f"{at}unknown key {section}.{key}: {target} doesn't take it{_nearest(key, named)}")
    place = origins.get(f"{section}.target")
    at = f"{place}: " if place else ""
    for name, parameter in parameters.items():
        if parameter.default is not inspect.Parameter.empty or name in keys or name in offered:
            continue
        if parameter.kind in _BY_NAME:
            problems.append(f"{at}{section}.{name} is missing: {target} needs it")
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            problems.append(f"{at}{section}.target={target} takes {name} only by position; keys are passed by name")
    return problems


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-ins have none
        return {"keys": inspect.Parameter("keys", inspect.Parameter.VAR_KEYWORD)}


def _nearest(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; it has {', '.join(sorted(known)[:12])}" if known else ""


def _told(error: BaseException) -> str:
    """The error in one line, with the line of code that raised it."""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" ({error.filename}:{error.lineno})"
    else:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
        where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{where}"
