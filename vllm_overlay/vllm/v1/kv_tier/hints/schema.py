# SPDX-License-Identifier: Apache-2.0
"""The schema of hints: what clients know about the KV of their requests.

Hints are part of `kv_transfer_params`, which every release accepts over HTTP and, in
`SamplingParams.extra_args`, from Python:

    {"kv_transfer_params": {"kv_tier": {"conversation": "c42", "release": true}}}

Hints affect the order of eviction, and limit what is stored and loaded. None of them
pins a block or changes an answer.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import cache
from reprlib import Repr
from typing import Any

KEY = "kv_tier"
VERSION = 1
"""Version of the schema. New optional fields do not change it; new meanings do."""
MAX_NAME = 256
"""Most characters in the name of a conversation or tenant."""
MAX_NUMBER = 2**53 - 1
"""Largest number of tokens or seconds. All JSON parsers read integers up to this one
exactly, and messages between processes can contain them."""
MAX_RANGES = 8
"""Most ranges that a request can retain."""
NO_HINT = 50
"""Priority without a hint."""
MAX_HINT = 1 << 16
"""Most bytes of a hint over HTTP, about ten times as many as the schema allows."""
CAPS = ("max_load_tokens", "max_offload_tokens")
"""Fields next to `kv_tier` that upstream's connectors read. The tier reads them too."""

_FIELDS = frozenset((KEY, *CAPS))
_PARAMS = "kv_transfer_params"
_WHERE = f"{_PARAMS}.{KEY}"


@dataclass(frozen=True)
class Retain:
    """How long to keep a range of tokens, compared to others."""

    priority: int
    """From 0 to 100. Above 50 is evicted after blocks without a hint, higher ones
    later; below 50 before them. 50 is no hint."""

    ttl: float | None = None
    """Seconds for which this is valid after the latest use by a request with this hint.
    None: until the block is evicted."""

    start: int = 0
    """First token of the range in the prompt."""

    end: int | None = None
    """Token after the last one of the range. None: the end of the prompt. Blocks that
    are partly in the range count."""

    answer: bool = False
    """Whether generated tokens are included, wherever the range ends."""

    @classmethod
    def from_given(cls, given: object, where: str) -> "Retain":
        """Parse the value of the field `where`.

        Raises:
            ValueError: It does not match the schema.

        """
        _check_fields(cls, given, where)
        assert isinstance(given, Mapping)
        if "priority" not in given:
            raise ValueError(
                f"{where}.priority is missing: give a whole number from 0 to 100 "
                f"({NO_HINT} is no hint), got {shown(given)}."
            )
        retain = cls(**given)
        if not (_is_int(retain.priority) and retain.priority <= 100):
            raise ValueError(
                f"{where}.priority must be a whole number from 0 to 100 ({NO_HINT} is "
                f"no hint), got {shown(retain.priority)}."
            )
        ttl = retain.ttl
        is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
        if ttl is not None and not (is_number and 0 < ttl <= MAX_NUMBER):
            raise ValueError(
                f"{where}.ttl must be a number of seconds above 0 and up to "
                f"{MAX_NUMBER}, or null (until it is evicted), got {shown(ttl)}."
            )
        if not _is_int(retain.start):
            raise ValueError(
                f"{where}.start must be the index of a token, from 0 to {MAX_NUMBER}, "
                f"got {shown(retain.start)}."
            )
        end = retain.end
        if end is not None and not (_is_int(end) and end > retain.start):
            raise ValueError(
                f"{where}.end must be the index of a token behind start "
                f"({retain.start}), at most {MAX_NUMBER}, or null (the end of the "
                f"prompt), got {shown(end)}."
            )
        _check_bool(retain.answer, f"{where}.answer")
        return retain


@dataclass(frozen=True)
class Hints:
    """The hints of one request."""

    version: int = VERSION
    """Version of the schema that the client uses."""

    conversation: str | None = None
    """Name of the conversation, session or agent of the request. A request without one
    is its own conversation. Names are known to one engine, separately for each cache
    salt."""

    release: bool = False
    """The conversation is over after this request. Blocks that only this conversation
    has used are then evicted first, on the device and on the host, and no longer
    stored. Until then they serve hits."""

    prewarm: bool = False
    """Only compute or load the prompt, for a later request. The answer ends after one
    token."""

    retain: tuple[Retain, ...] = ()
    """What to keep longer or less long: a range, or in requests a list of at most
    `MAX_RANGES`. Where ranges overlap, the last one applies."""

    tenant: str | None = None
    """Tenant whose quota the request's blocks count for. None: that of its cache salt,
    if a quota has that name."""

    store: bool = True
    """Whether to store the request's blocks. False: they stay on the device only,
    unless a request without this hint uses them."""

    max_load_tokens: int | None = None
    """Most tokens that the tier may load for the request; the rest is computed. None:
    no limit."""

    max_offload_tokens: int | None = None
    """Store only the first `max_offload_tokens` tokens of the request. None: all."""

    @property
    def offload_limit(self) -> int | None:
        """Number of tokens, from the beginning, that may be stored. None: all."""
        return self.max_offload_tokens if self.store else 0

    def kinds(self) -> list[str]:
        """Names of the fields that are set."""
        return [name for name, unsaid in _UNSAID.items() if vars(self)[name] != unsaid]

    @classmethod
    def from_params(cls, params: object) -> "Hints | None":
        """Parse the hints in the `kv_transfer_params` of a request.

        Returns:
            None if there are none.

        Raises:
            ValueError: They do not match the schema. The message has field, value and
                fix.

        """
        if params is None:
            return None
        if not isinstance(params, Mapping):
            raise ValueError(
                f"{_PARAMS} must be an object, or null (no hints), got {shown(params)}."
            )
        outside = {cap: params[cap] for cap in CAPS if params.get(cap) is not None}
        given = params.get(KEY)
        if given is None and not outside:
            return None
        for cap, value in outside.items():
            _check_cap(value, f"{_PARAMS}.{cap}")
        hints = cls() if given is None else cls._from_given(given)
        for cap, value in outside.items():
            inside = vars(hints)[cap]
            if inside is None or value < inside:
                hints = replace(hints, **{cap: value})
        return hints

    @classmethod
    def _from_given(cls, given: object) -> "Hints":
        _check_fields(cls, given, _WHERE)
        assert isinstance(given, Mapping)
        hints = cls(**{**given, "retain": _ranges(given.get("retain"))})
        if hints.version != VERSION or not _is_int(hints.version):
            raise ValueError(
                f"{_WHERE}.version must be {VERSION}, the only one that this engine "
                f"knows, got {shown(hints.version)}."
            )
        for name in ("conversation", "tenant"):
            value = vars(hints)[name]
            if value is not None and not (
                isinstance(value, str) and 0 < len(value) <= MAX_NAME and is_text(value)
            ):
                raise ValueError(
                    f"{_WHERE}.{name} must be a string of 1 to {MAX_NAME} characters "
                    f"that UTF-8 can encode, got {shown(value)}."
                )
        for name in ("release", "prewarm", "store"):
            _check_bool(vars(hints)[name], f"{_WHERE}.{name}")
        for name in CAPS:
            if (value := vars(hints)[name]) is not None:
                _check_cap(value, f"{_WHERE}.{name}")
        return hints


KINDS = tuple(field.name for field in fields(Hints) if field.name != "version")
"""Kinds of hints: the names of the fields."""
# Defaults are also attributes of the class.
_UNSAID = {name: vars(Hints)[name] for name in KINDS}


def _ranges(given: object) -> tuple[Retain, ...]:
    where = f"{_WHERE}.retain"
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return (Retain.from_given(given, where),)
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ValueError(
            f"{where} must be an object with {_names(Retain)}, or a list of at most "
            f"{MAX_RANGES} of them, got {shown(given)}."
        )
    if len(given) > MAX_RANGES:
        raise ValueError(
            f"{where} must have at most {MAX_RANGES} ranges, got {len(given)}. Join "
            "adjacent ranges."
        )
    return tuple(
        Retain.from_given(one, f"{where}[{place}]") for place, one in enumerate(given)
    )


@cache
def _fields_of(schema: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(schema))


def _names(schema: type) -> str:
    return ", ".join(_fields_of(schema))


def _check_fields(schema: type, given: object, where: str) -> None:
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{where} must be an object with {_names(schema)}, got {shown(given)}."
        )
    known = _fields_of(schema)
    for name in given:
        if name not in known:
            raise ValueError(
                f"{where}: unknown field {shown(name)} (value {shown(given[name])}). "
                f"Use {_names(schema)}."
            )


def _check_bool(value: object, where: str) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{where} must be true or false, got {shown(value)}.")


def _check_cap(value: object, where: str) -> None:
    if not _is_int(value):
        raise ValueError(
            f"{where} must be a whole number of tokens from 0 to {MAX_NUMBER}, or null "
            f"(no limit), got {shown(value)}."
        )


def _is_int(value: object) -> bool:
    """Whether it is an integer from 0 to `MAX_NUMBER`."""
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and 0 <= value <= MAX_NUMBER
    )


def is_text(value: str) -> bool:
    """Whether UTF-8 can encode it. JSON can contain single surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


_short = Repr()
_short.maxdict = _short.maxlist = _short.maxtuple = 4
_short.maxlevel = 3
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: object) -> str:
    """A short form of `value` for messages, however large or deep it is."""
    try:
        return _short.repr(value)
    except Exception:
        # Python does not print integers of more than some thousand digits.
        return f"<{type(value).__name__}>"


def are_in(params: object) -> bool:
    """Whether a request's `kv_transfer_params` contain hints."""
    # Called in each step, and usually there are none.
    return (
        params is not None
        and isinstance(params, Mapping)
        and not _FIELDS.isdisjoint(params)
    )


def for_tier(params: Mapping[str, Any]) -> dict[str, Any]:
    """The tier's fields of a request's `kv_transfer_params`."""
    return {name: params[name] for name in (KEY, *CAPS) if name in params}


@dataclass(frozen=True)
class RequestContext:
    """Hints of the HTTP request that is being served."""

    hints: dict[str, Any] = field(default_factory=dict)
    """Hints from other APIs, as checked fields of `Hints`."""
    checked: Mapping[str, Any] = field(default_factory=dict)
    """The tier's fields of `kv_transfer_params`, checked."""


NOTHING = RequestContext()

request_context: ContextVar[RequestContext] = ContextVar(
    "kv_tier_request", default=NOTHING
)
"""Passes the hints to the engine's input processor.

Not every API of every release has a field that reaches the engine. An endpoint works in
the context of its request, or in tasks that inherit it, so a context variable does.
"""
