# SPDX-License-Identifier: Apache-2.0
"""Settings that come as JSON: their types, and one plain message for each fault."""

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import ConfigDict, Field, ValidationError

FLAG = "--kv-offloading-config"
DEBUG = "debug"
"""The key of the object that has what operators need not touch."""

SETTINGS = ConfigDict(extra="forbid", hide_input_in_errors=True)
"""Of all dataclasses of settings. Values may be passwords."""

# JSON says of what type a value is, so nothing is converted.
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Count = Annotated[Whole, Field(ge=1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Above0 = Annotated[Number, Field(gt=0)]
From0 = Annotated[Number, Field(ge=0)]

T = TypeVar("T")


def make(
    cls: type[T], values: Mapping[str, Any], setting: str = FLAG, **more: Any
) -> T:
    """An object of settings from a JSON object.

    Args:
        cls: A dataclass of pydantic.
        values: Of its fields.
        setting: What the object is called. Messages begin with it.
        more: Fields that are no keys of the object.

    Raises:
        ValueError: A line for each wrong setting names it, its value and the fix.

    """
    known = keys_of(cls, *more)
    lines = [*_unknown(cls, values, known, setting)]
    debug_class = get_type_hints(cls).get(DEBUG)
    if isinstance(debug := values.get(DEBUG), Mapping) and debug_class is not None:
        lines += _unknown(cls, debug, keys_of(debug_class), setting, DEBUG)
        debug = {k: v for k, v in debug.items() if k in keys_of(debug_class)}
        values = {**values, DEBUG: debug}
    faults: Sequence[Any] = ()
    try:
        made = cls(**{k: v for k, v in values.items() if k in known}, **more)
    except ValidationError as e:
        faults = e.errors(include_url=False)
    lines += dict.fromkeys(_line(cls, fault, setting) for fault in faults)
    # Not raised where another exception is known, which may have a password.
    if lines:
        raise ValueError("\n".join(lines))
    return made


def keys_of(cls: type, *others: str) -> list[str]:
    """The keys of a JSON object of settings.

    Args:
        cls: What it becomes.
        others: Fields that are no keys.

    """
    return [f.name for f in fields(cls) if f.init and f.name not in others]  # type: ignore[arg-type]


def with_debug(
    cls: type, values: Mapping[str, Any], setting: str = FLAG
) -> tuple[dict[str, Any], list[str]]:
    """A JSON object with settings of `debug` where they are now, and what was moved.

    Raises:
        ValueError: A setting is in both places.

    """
    debug, known = values.get(DEBUG, {}), keys_of(cls)
    inner = keys_of(get_type_hints(cls)[DEBUG])
    old = {k: v for k, v in values.items() if k in inner and k not in known}
    if not old or not isinstance(debug, Mapping):
        return dict(values), []
    if twice := [key for key in old if key in debug]:
        raise ValueError(
            f"{setting}: {', '.join(twice)} is given in {DEBUG} and outside of it. "
            f"Keep the one in {DEBUG}."
        )
    kept = {k: v for k, v in values.items() if k not in old}
    return {**kept, DEBUG: {**debug, **old}}, [path(setting, DEBUG, k) for k in old]


def path(setting: str, *keys: object) -> str:
    """A setting as messages name it: `FLAG: debug.verify`, `FLAG: quotas['a']`."""
    named = "" if setting == FLAG else setting
    for key in keys:
        if isinstance(key, str) and key.isidentifier():
            named += f".{key}" if named else key
        else:
            named += f"[{key!r}]"
    return named if setting != FLAG else f"{FLAG}: {named}"


def _unknown(
    cls: type,
    values: Mapping[str, Any],
    known: Sequence[str],
    setting: str,
    *inside: str,
) -> Iterator[str]:
    """A line for each key of an object, or of one inside, that is no setting."""
    hints = get_type_hints(cls)
    places = {key: key for key in keys_of(cls)}
    if DEBUG in hints:
        places |= {key: f"{DEBUG}.{key}" for key in keys_of(hints[DEBUG])} | places
    where = path(setting, *inside) if inside else setting
    for key, value in values.items():
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), places, n=1)
        meant = f"Did you mean {places[near[0]]}? " if near else ""
        # A text may be a password, and so may be what is called one.
        is_plain = isinstance(value, int | float) and "pass" not in str(key).lower()
        shown = f" (value {value!r})" if is_plain else ""
        yield (
            f"{where}: unknown key {key!r}{shown}. {meant}"
            f"Known keys: {', '.join(known)}."
        )


_MUST_BE = {
    "missing": "must be given",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be a text",
    "dict_type": "must be an object",
    "dataclass_type": "must be an object",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be {ge:g} or more",
    "less_than_equal": "must be {le:g} or less",
    "literal_error": "must be {expected}",
    "string_too_short": "must have {min_length} characters or more",
    "string_too_long": "must have {max_length} characters or less",
    "too_long": "must have {max_length} entries or less",
}
"""Plain words for errors of pydantic, with the names of what these carry."""


def _line(cls: type, fault: Mapping[str, Any], setting: str) -> str:
    """What is wrong, in one line.

    Args:
        cls: Of the object.
        fault: An error of pydantic.
        setting: What the object is called.

    """
    context = fault.get("ctx", {})
    *keys, last = fault["loc"] or ("",)
    if fault["type"] in ("value_error", "assertion_error"):
        # Of our own validators, which say what there is to do.
        text = str(context["error"])
        is_whole = text.startswith(FLAG)
        return text if is_whole else f"{path(setting, *fault['loc'])} {text}"
    must_be = _MUST_BE.get(fault["type"], "is wrong: {msg}")
    text = must_be.format(**context, msg=fault["msg"])
    if last == "[key]":
        return f"{path(setting, *keys[:-1])}: a name {text}, got {keys[-1]!r}."
    named = path(setting, *fault["loc"])
    if fault["type"] == "missing":
        example = inspect.getattr_static(cls, "example", None)
        return f"{named} is missing. Give it" + (
            f", as in {example}." if isinstance(example, str) else "."
        )
    return f"{named} {text}, got {_shown(fault['input'])}."


def _shown(value: object) -> str:
    """A value in a message. What is in lists and objects may be a password."""
    if isinstance(value, Mapping | list | tuple):
        return "an object" if isinstance(value, Mapping) else "a list"
    return repr(value)
