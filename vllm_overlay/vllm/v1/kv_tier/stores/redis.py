# SPDX-License-Identifier: Apache-2.0
"""A store of objects in a Valkey or Redis server.

The package `redis` connects, with TLS and passwords, but copies values several times.
So this module uses its socket directly: rows are sent from and received into their
place. Commands are pipelined: all commands first, then all answers.

An object is a value under `kvtier:NAMESPACE:rRANK:KEY`. The server's own settings limit
its memory (`maxmemory`, with `maxmemory-policy allkeys-lru`). If it refuses writes, it
is still read. An operation that is given up closes its socket before the call returns,
so that nothing writes to rows later.
"""

import math
import os
import re
import select
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from time import monotonic
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from vllm.v1.kv_tier.options import SETTINGS, Above0, Count
from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.stores.breaker import Breaker
from vllm.v1.kv_tier.stores.format import ObjectFormat
from vllm.v1.kv_tier.stores.settings import StoreConfig, StoreDebug
from vllm.v1.kv_tier.stores.threads import MAX_THREADS, Threads

_SMALL_BYTES = 4096


class Refused(Exception):
    """The server answered with an error."""


def command(*arguments: bytes) -> bytes:
    parts = [b"$%d\r\n%b\r\n" % (len(argument), argument) for argument in arguments]
    return b"*%d\r\n%b" % (len(arguments), b"".join(parts))


class Wire:
    """An open connection. After an exception the caller must close it.

    Answers may still be in flight, and closing the socket discards them.

    Args:
        connection: A connection of the package `redis`, not connected yet.
        timeout_s: Seconds for an operation; it may take twice as long in the worst
            case.

    Raises:
        redis.RedisError, OSError: There is no connection.

    """

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s
        connection.connect()
        self._socket = connection._sock
        self._received = b""
        self.begin()

    def begin(self) -> None:
        """Start the time limit of an operation."""
        self._end_s = time.monotonic() + self._timeout_s

    @property
    def is_stale(self) -> bool:
        """Whether the server has closed the connection or sent unexpected data."""
        # Not `select`, which refuses the descriptors of a process with many open files.
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(self._received or poll.poll(0))

    def close(self) -> None:
        self._connection.disconnect()

    def send(self, data: bytes | memoryview) -> None:
        self._check_time()
        self._socket.sendall(data)

    def lines(self, n: int) -> list[bytes]:
        """Receive the next `n` one-line answers."""
        while self._received.count(b"\r\n") < n:
            self._check_time()
            more = self._socket.recv(_SMALL_BYTES)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._received += more
        *lines, self._received = self._received.split(b"\r\n", n)
        return lines

    def ask(self, commands: Iterable[bytes]) -> list[bool]:
        """Send commands, and return for each whether its answer is 1.

        Raises:
            Refused: The server answered one with an error.

        """
        commands = list(commands)
        self.send(b"".join(commands))
        answers = self.lines(len(commands))
        for answer in answers:
            if not answer.startswith(b":"):
                raise Refused(answer.decode(errors="replace"))
        return [answer == b":1" for answer in answers]

    def fill(self, place: memoryview) -> None:
        """Receive bytes into `place`."""
        n = min(len(place), len(self._received))
        place[:n], self._received = self._received[:n], self._received[n:]
        while n < len(place):
            self._check_time()
            received = self._socket.recv_into(place[n:])
            if not received:
                raise ConnectionError("the server closed the connection")
            n += received

    def skip(self, num_bytes: int) -> None:
        place = memoryview(bytearray(min(num_bytes, 1 << 20)))
        while num_bytes:
            self.fill(place[:num_bytes])
            num_bytes -= min(num_bytes, len(place))

    def _check_time(self) -> None:
        if time.monotonic() > self._end_s:
            raise TimeoutError(f"no answer within {self._timeout_s:g} seconds")


_WINDOW_BYTES = 8 << 20
_WRITE_PAUSE_S = 60.0
_NUM_PROBES = 32
_Operation = Callable[[Wire], list[bool]]
# No part of the URL can contain the start of the next one, so a password is never taken
# for another part.
_URL = re.compile(
    r"(?P<scheme>rediss?)://"
    r"(?:(?P<user>[\w.~!$&'()*+,;=%-]*)(?::(?P<password>[\w.~!$&'()*+,;=%:-]*))?@)?"
    r"(?P<place>(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?)"
    r"(?P<path>/[0-9]*)?"
    r"(?:\?(?P<query>[\w.~!$'()*+,;=%:/&-]*))?",
    re.ASCII,
)
_OPTIONS = re.compile("ssl_[a-z_]+|db|username|password|client_name")
_VARIABLE = re.compile("[A-Z_][A-Z0-9_]*")


def _query_of(url: str) -> list[tuple[str, str]]:
    found = _URL.fullmatch(url)
    return parse_qsl((found and found["query"]) or "", keep_blank_values=True)


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class RedisDebug(StoreDebug):
    """`debug` of an entry of type `redis`."""

    num_connections: Annotated[Count, Field(le=MAX_THREADS)] = 2
    """Connections of each rank for reading, and as many for writing."""

    timeout_ms: Above0 = 2000.0
    """How long the server may take for an operation, in milliseconds."""

    ttl_s: Count | None = None
    """Seconds after which the server forgets an object that was not written again.
    `null`: it keeps what its memory allows."""


@dataclass(frozen=True, kw_only=True, config=SETTINGS)
class RedisConfig(StoreConfig):
    """`{"type": "redis", …}` of `secondary_tiers`: a Valkey or Redis server."""

    example = '{"type": "redis", "url": "redis://127.0.0.1:6379"}'

    url: str = field(repr=False)
    """Where the server is: `redis://[user@]host[:port][/db]`, or `rediss://` with TLS,
    where `?ssl_ca_certs=FILE` names the authority. It may contain a password, but vLLM
    logs its arguments."""

    password_env: str | None = field(default=None, repr=False)
    """Environment variable that contains the password."""

    debug: RedisDebug = field(default_factory=RedisDebug)

    # Neither is shown in a message: the one may contain a password, and a password may
    # have been given for the other.

    @field_validator("url", mode="plain")
    @classmethod
    def _check_url(cls, url: Any) -> Any:
        if not isinstance(url, str) or not url.startswith(("redis://", "rediss://")):
            raise ValueError(
                "must begin with redis:// or rediss://. Give one like "
                "redis://127.0.0.1:6379."
            )
        names = [name for name, _ in _query_of(url)]
        if not _URL.fullmatch(url) or not all(map(_OPTIONS.fullmatch, names)):
            raise ValueError(
                "must be redis://[user[:password]@]host[:port][/db], with options "
                "ssl_…, db, username, password or client_name. It is not shown, since "
                "it may have a password. Write special characters in that as %XX (%40 "
                "for @, %2F for /, %23 for #, %3F for ?), or put it into an "
                "environment variable, and name that with password_env."
            )
        return url

    @field_validator("password_env", mode="plain")
    @classmethod
    def _check_password_env(cls, name: Any) -> Any:
        if name is not None and not (isinstance(name, str) and name):
            raise ValueError(
                "must be a text that is not empty. Its value is not shown. Give the "
                "name of an environment variable, like VALKEY_PASSWORD."
            )
        return name

    @property
    def name(self) -> str:
        if not (parts := self._parts):
            return "redis://(not shown)"
        return f"{parts['scheme']}://{parts['place']}{parts['path'] or ''}"

    def without_secrets(self, text: object) -> str:
        """A message without secrets, which servers and libraries may repeat."""
        shown = str(text)
        for secret in sorted(self._secrets(), key=len, reverse=True):
            shown = shown.replace(secret, "***")
        return shown

    def check(self) -> None:
        # Raised outside of the `except` blocks, whose exceptions may contain a
        # password.
        if (fault := self._fault()) is not None:
            raise ValueError(self.without_secrets(fault))

    def _fault(self) -> str | None:
        """Why the server cannot be used; None if it can."""
        setting = f"{self.setting('url')} {self.name}"
        try:
            import redis
        except ImportError as e:
            return (
                f"{self.setting('type')} 'redis' needs the package redis, which cannot "
                f"be imported ({e}). pip install redis"
            )
        variable = self.password_env
        if variable is not None and variable not in os.environ:
            # The value may be the password itself.
            is_name = _VARIABLE.fullmatch(variable)
            return (
                f"{self.setting('password_env')} names the environment variable "
                f"{variable if is_name else '(not shown)'}, which is not set. Set it "
                f"to the password of {self.name}."
            )
        try:
            self._probe()
        except redis.AuthenticationError as e:
            return (
                f"{setting} rejects the password, or needs one ({e}). Put it into an "
                "environment variable, and set password_env to its name."
            )
        except Refused as e:
            return (
                f"{setting} refuses to keep a value ({e}). Use a server that accepts "
                "writes and is not a cluster, and a user who may SET, GET, EXISTS, "
                "TOUCH, EXPIRE and UNLINK kvtier:*."
            )
        except (redis.RedisError, OSError, ValueError, TypeError) as e:
            return (
                f"{setting} does not answer as Valkey or Redis does ({e}). Start the "
                "server there, or correct the address. Use rediss:// for servers with "
                "TLS, and redis:// for others."
            )
        return None

    def _probe(self) -> None:
        wire = Wire(self.connection(), self.debug.timeout_ms / 1e3)
        try:
            probe = b"kvtier:probe:%d" % os.getpid()
            wire.send(command(b"SET", probe, b"1", b"EX", b"60"))
            (answer,) = wire.lines(1)
            if answer != b"+OK":
                raise Refused(answer.decode(errors="replace"))
            # A node of a cluster has some names only, and refuses the others.
            names = [b"%b:%d" % (probe, i) for i in range(_NUM_PROBES)]
            wire.ask(command(b"EXISTS", name) for name in names)
            wire.ask([command(b"UNLINK", probe)])
        finally:
            wire.close()

    @property
    def _parts(self) -> dict[str, str | None]:
        found = _URL.fullmatch(self.url)
        return {} if found is None else found.groupdict()

    def _secrets(self) -> set[str]:
        """Texts that must not appear in messages."""
        parts = self._parts
        given = [parts.get("password"), os.environ.get(self.password_env or "")]
        given += [value for name, value in _query_of(self.url) if "password" in name]
        if not any(given):
            # The user may be a password in the wrong place.
            given.append(parts.get("user"))
        forms = (
            form
            for each in given
            if each
            for form in (each, unquote(each), quote(each, ""), quote(unquote(each), ""))
        )
        return {shown for form in forms for shown in (form, repr(form)[1:-1])}

    def open(self, namespace: str, rank: int, slot_bytes: int) -> "RedisStore":
        return RedisStore(self, namespace, rank, slot_bytes)

    def connection(self) -> Any:
        """A connection of the package `redis`, not connected yet.

        Raises:
            ValueError: The URL is invalid.

        """
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        seconds = self.debug.timeout_ms / 1e3
        options: dict[str, Any] = {
            "socket_timeout": seconds,
            "socket_connect_timeout": seconds,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if self.password_env is not None:
            options["password"] = os.environ.get(self.password_env)
        # Parts of the URL override these options, also a password in it.
        pool = redis.ConnectionPool.from_url(self.url, **options)
        return pool.connection_class(**pool.connection_kwargs)


class RedisStore(BlockStore):
    """The objects of one rank in one namespace, in a server.

    It connects on first use.

    Args:
        config: Checked settings.
        namespace: Digest of everything that shapes the bytes, in hex digits.
        rank: Number of the rank.
        slot_bytes: Most bytes of a row.

    """

    def __init__(
        self, config: RedisConfig, namespace: str, rank: int, slot_bytes: int
    ) -> None:
        self._config = config
        self._prefix = f"kvtier:{namespace}:r{rank}:".encode()
        self._format = ObjectFormat(namespace, rank)
        self._deadline_s = config.debug.deadline_ms / 1e3
        self._readers = Threads(config.debug.num_connections, "redis-get")
        self._writers = Threads(config.debug.num_connections, "redis-put")
        self._window = max(1, _WINDOW_BYTES // slot_bytes)
        self._idle: list[Wire] = []
        self._breaker = Breaker(config.name)
        self._writing = Breaker(
            config.name, "nothing more is written to it", _WRITE_PAUSE_S
        )

    def put(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        if not self._writing.begin_try():
            return [False] * len(keys)
        return self._in_windows(self._writers, self._put, keys, rows)

    def get(self, keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
        deadline = monotonic() + self._deadline_s
        return self._in_windows(self._readers, self._get, keys, rows, deadline)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        commands = [command(b"EXISTS", self._name(key)) for key in keys]
        return self._ask(lambda wire: wire.ask(commands), len(keys))

    def delete(self, keys: Sequence[bytes]) -> None:
        commands = [command(b"UNLINK", self._name(key)) for key in keys]
        self._ask(lambda wire: wire.ask(commands), len(keys))

    def close(self) -> None:
        self._readers.close()
        self._writers.close()
        while self._idle:
            self._idle.pop().close()

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _in_windows(
        self,
        threads: Threads,
        work: Callable[[Wire, Sequence[bytes], Sequence[memoryview]], list[bool]],
        keys: Sequence[bytes],
        rows: Sequence[memoryview],
        deadline: float = math.inf,
    ) -> list[bool]:
        """Answers of `work`; False for what has not begun by the deadline."""
        n = max(
            1, min(self._window, -(-len(keys) // self._config.debug.num_connections))
        )

        def window(keys: Sequence[bytes], rows: Sequence[memoryview]) -> list[bool]:
            return self._ask(lambda wire: work(wire, keys, rows), len(keys))

        return threads.spread_batches(window, keys, rows, n, deadline)

    def _ask(self, operation: _Operation, num_keys: int) -> list[bool]:
        """Answers of an operation; all False if the server fails."""
        if not num_keys or not self._breaker.begin_try():
            return [False] * num_keys
        try:
            with self._wire() as wire:
                answers = operation(wire)
        except Exception as e:
            # The package also raises exceptions that are no `RedisError`.
            self._breaker.record_failure(self._config.without_secrets(e))
            return [False] * num_keys
        self._breaker.record_success()
        return answers

    @contextmanager
    def _wire(self) -> Iterator[Wire]:
        wire = None
        while self._idle and wire is None:
            try:
                wire = self._idle.pop()
            except IndexError:
                break
            if wire.is_stale:
                wire.close()
                wire = None
        if wire is None:
            seconds = self._config.debug.timeout_ms / 1e3
            wire = Wire(self._config.connection(), seconds)
        wire.begin()
        try:
            yield wire
        except BaseException:
            wire.close()
            raise
        self._idle.append(wire)

    def _put(
        self, wire: Wire, keys: Sequence[bytes], rows: Sequence[memoryview]
    ) -> list[bool]:
        names = [self._name(key) for key in keys]
        # Existing objects are marked as recently used, and not sent again.
        answers = wire.ask(command(b"TOUCH", name) for name in names)
        missing = [i for i, is_there in enumerate(answers) if not is_there]
        changed = missing
        parts, end = 3, b"\r\n"
        if (seconds := self._config.debug.ttl_s) is not None:
            ttl = b"%d" % seconds
            parts, end = 5, b"\r\n$2\r\nEX\r\n$%d\r\n%b\r\n" % (len(ttl), ttl)
            there = [i for i, is_there in enumerate(answers) if is_there]
            wire.send(b"".join(command(b"EXPIRE", names[i], ttl) for i in there))
            changed = there + missing
        for i in missing:
            name, size = names[i], self._format.size(keys[i], len(rows[i]))
            begin = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n"
            wire.send(
                begin % (parts, len(name), name, size)
                + self._format.header(keys[i], rows[i])
            )
            wire.send(rows[i])
            wire.send(end)
        refused = None
        for i, answer in zip(changed, wire.lines(len(changed))):
            answers[i] = answer in (b"+OK", b":1")
            if answer not in (b"+OK", b":1", b":0"):
                refused = answer.decode(errors="replace").lstrip("-")
        # Once for all, since a server may refuse some and accept others.
        if refused is not None:
            self._writing.record_failure(self._config.without_secrets(refused))
        elif changed:
            self._writing.record_success()
        return answers

    def _get(
        self, wire: Wire, keys: Sequence[bytes], rows: Sequence[memoryview]
    ) -> list[bool]:
        wire.send(b"".join(command(b"GET", self._name(key)) for key in keys))
        answers, damaged = [], []
        for key, row in zip(keys, rows):
            (answer,) = wire.lines(1)
            is_right = self._take(wire, answer, key, row)
            answers.append(is_right is True)
            if is_right is False:
                damaged.append(command(b"UNLINK", self._name(key)))
        if damaged:
            # A server that refuses writes is still read.
            with suppress(Refused):
                wire.ask(damaged)
        return answers

    def _take(
        self, wire: Wire, answer: bytes, key: bytes, row: memoryview
    ) -> bool | None:
        """Receive a value into `row`.

        Returns:
            True if it is right, False if it is damaged, None if it is missing or cannot
            be checked here.

        """
        if answer == b"$-1":
            return None
        if answer.startswith(b"-WRONGTYPE"):
            return False
        if not answer.startswith(b"$"):
            raise Refused(answer.decode(errors="replace"))
        size = int(answer[1:])
        if size != self._format.size(key, len(row)):
            wire.skip(size + 2)
            return False
        header = bytearray(self._format.header_bytes(key))
        wire.fill(memoryview(header))
        wire.fill(row)
        wire.skip(2)
        return self._format.is_right(header, key, row)
