# SPDX-License-Identifier: Apache-2.0
"""Settings of stores in servers: what is wrong says so at start, with the mend."""

import contextlib
import functools
import importlib
import logging
import os
import re
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.kv_tier.stores import breaker
from vllm.v1.kv_tier.stores.base import BlockStore
from vllm.v1.kv_tier.stores.fs import FsConfig
from vllm.v1.kv_tier.stores.redis import RedisConfig
from vllm.v1.kv_tier.stores.settings import parse_tiers

from ...settings import store_config, with_debug
from .objects import KEYS, NAMESPACE, ROW_BYTES, empty, logged_by, row
from .servers import Mooncake, Valkey, free_port, until

REDIS: dict[str, Any] = {"type": "redis", "url": "redis://a:1"}
MOONCAKE: dict[str, Any] = {"type": "mooncake", "master": "a:1"}
SECRET = "very-secret"


@pytest.mark.parametrize(
    "entry, message",
    [
        (
            {"type": "redis"},
            '[0].url is missing. Give it, as in {"type": "redis", "url":',
        ),
        (REDIS | {"max_gib": 5}, "[0]: unknown key 'max_gib' (value 5). Known keys"),
        (REDIS | {"index": 5}, "[0]: unknown key 'index'"),
        (REDIS | {"url": f"http://:{SECRET}@a"}, "url must begin with redis:// or"),
        (REDIS | {"url": 6379}, "[0].url must begin with redis:// or rediss://. Give"),
        (
            with_debug(REDIS, ttl_s=0.5),
            "[0].debug.ttl_s must be a whole number, got 0.5",
        ),
        (
            with_debug(REDIS, num_connections=0),
            "num_connections must be 1 or more, got 0",
        ),
        (
            with_debug(REDIS, timeout_ms=0),
            "[0].debug.timeout_ms must be above 0, got 0.",
        ),
        (
            REDIS | {"password_env": ""},
            "[0].password_env must be a text that is not empty.",
        ),
        (MOONCAKE | {"master": "host"}, "[0].master must be host:port, got 'host'."),
        (MOONCAKE | {"master": "a:0"}, "[0].master must be host:port, got 'a:0'."),
        (MOONCAKE | {"master": 1}, "[0].master must be a text, got 1."),
        (
            MOONCAKE | {"protocol": "ib"},
            "[0].protocol must be 'tcp' or 'rdma', got 'ib'.",
        ),
        (
            with_debug(MOONCAKE, rdma_devices=1),
            "debug.rdma_devices must be a text, got 1.",
        ),
        (
            with_debug(MOONCAKE, global_segment_gib=-1),
            "[0].debug.global_segment_gib must be 0 or more, got -1.",
        ),
    ],
)
def test_what_is_wrong_says_so(entry: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        store_config(entry)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("entry", [REDIS, MOONCAKE])
def test_a_package_that_is_missing(
    entry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ValueError, match=r"cannot be imported .*\. pip install [rm]"):
        store_config(entry).check()


@pytest.mark.parametrize("entry", [REDIS, MOONCAKE])
def test_a_server_that_is_not_there(entry: dict[str, Any]) -> None:
    if entry is REDIS:
        pytest.importorskip("redis")
        wrong = {"url": f"redis://:{SECRET}@127.0.0.1:{free_port()}/0"}
    else:
        wrong = {"master": f"127.0.0.1:{free_port()}"}
        try:
            importlib.import_module("mooncake.store")
        except ImportError as e:
            pytest.skip(f"Mooncake, or what it needs, is not installed: {e}")
    with pytest.raises(ValueError, match="127.0.0.1.*Start .*correct the") as error:
        store_config(entry | wrong).check()
    assert SECRET not in str(error.value)


# -------------------------------------------------------------------- Valkey


def valkey(*options: str) -> Iterator[Valkey]:
    server = Valkey(*options)
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def open_server() -> Iterator[Valkey]:
    yield from valkey()


@pytest.fixture(scope="module")
def closed_server() -> Iterator[Valkey]:
    """One with a password."""
    yield from valkey("--requirepass", SECRET)


def check_redis(server: Valkey, **options: Any) -> Any:
    debug = {k: options.pop(k) for k in ("ttl_s",) if k in options}
    config = store_config(with_debug(server.entry | options, **debug))
    config.check()
    return config


def test_a_password(
    closed_server: Valkey,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ValueError, match="rejects the password, or needs one"):
        check_redis(closed_server)
    monkeypatch.setenv("STORE_PASSWORD", "wrong")
    with pytest.raises(ValueError, match="rejects the password, or needs one"):
        check_redis(closed_server, password_env="STORE_PASSWORD")
    monkeypatch.setenv("STORE_PASSWORD", SECRET)
    config = check_redis(closed_server, password_env="STORE_PASSWORD")
    with caplog.at_level(logging.DEBUG):
        store = config.open(NAMESPACE, 0, ROW_BYTES)
        assert store.put(KEYS[:1], [row(0)]) == [True]
        closed_server.kill("server")
        assert store.put(KEYS[:1], [row(0)]) == [False]
        store.close()
    closed_server.start()
    url = f"redis://:{SECRET}@127.0.0.1:{closed_server.port}"
    config = check_redis(closed_server, url=url)
    assert SECRET not in f"{config!r} {config.name} {caplog.text}"
    assert config.name == f"redis://127.0.0.1:{closed_server.port}"
    monkeypatch.delenv("STORE_PASSWORD")
    with pytest.raises(ValueError, match="STORE_PASSWORD, which is not set"):
        check_redis(closed_server, password_env="STORE_PASSWORD")


WITH_PASSWORDS = [
    "redis://:{}@127.0.0.1:1",
    "redis://{}@127.0.0.1:1",
    "redis://kv:{}@127.0.0.1:1/0?x=1",
    "redis://kv:{}@127.0.0.1:1/0?socket_timeout=1",
    "redis://kv:a%zz{}@127.0.0.1:1/0",
    "redis://:a/{}@127.0.0.1:1",
    "redis://:{}/a@127.0.0.1:1",
    "redis://kv:1/{}@127.0.0.1:1",
    "redis://kv:1?{}@127.0.0.1:1",
    "redis://kv:1?a={}@127.0.0.1:1",
    "redis://kv:1#{}@127.0.0.1:1",
    "redis://kv:a@{}@127.0.0.1:1",
    "redis://kv:{}@a@127.0.0.1:1",
    "redis://kv:[{}@127.0.0.1:1",
    "redis://kv:\u2100{}@127.0.0.1:1",
    "redis://kv: {}@127.0.0.1:1",
    "redis://kv:{}",
    "redis://127.0.0.1:1/{}",
    "redis://127.0.0.1:1?password={}",
    "redis://127.0.0.1:1?password=a@{}",
    "redis://127.0.0.1:1?{}",
    "redis://127.0.0.1:1#{}",
    "rediss://127.0.0.1:1?ssl_password={}",
    "rediss://127.0.0.1:1?ssl_ca_certs=/{}/none&password={}",
    "redis:///{}",
    "//{}@127.0.0.1",
    "{}",
]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize("url", WITH_PASSWORDS)
def test_a_password_in_a_url_is_in_no_message(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("redis")
    url = url.replace("{}", SECRET)
    entry = {"type": "redis", "url": url, "debug": {"timeout_ms": 200}}
    with caplog.at_level(logging.DEBUG), pytest.raises(ValueError) as error:
        config = store_config(entry)
        assert SECRET not in f"{config!r} {config.name}"
        config.check()
    shown = [f"{each} {each.args}" for each in chain(error.value)]
    assert SECRET not in f"{shown} {caplog.text}"


@pytest.mark.parametrize(
    "entry",
    [
        REDIS | {"password": SECRET},
        REDIS | {"passwd": 1234567},
        REDIS | {"password_env": SECRET},
        REDIS | {"password_env": 1234567},
        f"redis://:{SECRET}@127.0.0.1",
    ],
)
def test_a_password_in_another_setting_is_in_no_message(entry: Any) -> None:
    pytest.importorskip("redis")
    with pytest.raises(ValueError) as error:
        store_config(entry).check()
    assert SECRET not in str(error.value) and "1234567" not in str(error.value)
    with pytest.raises(ValueError) as error:
        parse_tiers(entry)
    assert SECRET not in str(error.value)


def test_a_password_that_a_server_repeats_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that does not know AUTH, or another one that answers for it."""
    password = "p%40ss%2F" + SECRET
    plain = "p@ss/" + SECRET
    monkeypatch.setenv("STORE_PASSWORD", plain)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connection.recv(1000)
                    said = f"-ERR unknown command 'AUTH', with args '{plain}' "
                    connection.sendall((said + password + "\r\n").encode())

        threading.Thread(target=answer, daemon=True).start()
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        for more in (
            {"url": f"redis://:{password}@{place}"},
            {"url": f"redis://{place}?password={password}"},
            {"url": f"redis://{place}", "password_env": "STORE_PASSWORD"},
        ):
            config = store_config(
                {"type": "redis", "debug": {"timeout_ms": 500}} | more
            )
            with pytest.raises(ValueError, match=r"\*\*\*") as error:
                config.check()
            assert len(list(chain(error.value))) == 1
            assert SECRET not in str(error.value)
            store = config.open(NAMESPACE, 0, ROW_BYTES)
            assert store.put(KEYS[:1], [row(0)]) == [False]
            store.close()
    assert "in trouble" in caplog.text and SECRET not in caplog.text


def test_an_error_that_the_package_has_not_announced_is_a_miss(
    open_server: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = check_redis(open_server).open(NAMESPACE, 0, ROW_BYTES)

    def fail(config: object) -> None:
        raise TypeError(SECRET)

    monkeypatch.setattr(RedisConfig, "connection", fail)
    assert store.exists(KEYS[:1]) == store.get(KEYS[:1], [empty()]) == [False]
    store.close()


def test_tls_where_there_is_none(open_server: Valkey) -> None:
    wrong = f"rediss://127.0.0.1:{open_server.port}"
    with pytest.raises(ValueError, match="Use rediss:// for servers with TLS"):
        check_redis(open_server, url=wrong)


def test_what_is_no_valkey(open_server: Valkey) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"redis://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(ValueError, match="does not answer as Valkey or Redis"):
            check_redis(open_server, url=url)


def test_a_server_that_takes_no_writes(open_server: Valkey) -> None:
    try:
        open_server.client.replicaof("127.0.0.1", free_port())
        with pytest.raises(ValueError, match="refuses to keep a value .*READONLY"):
            check_redis(open_server)
    finally:
        open_server.client.replicaof("NO", "ONE")


def test_a_server_without_room_is_read_on(
    open_server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    store: Any = check_redis(open_server).open(NAMESPACE, 0, ROW_BYTES)
    assert store.put(KEYS[:2], [row(0), row(1)]) == [True, True]
    try:
        open_server.client.config_set("maxmemory", 1)
        open_server.client.config_set("maxmemory-policy", "noeviction")
        for _ in range(3):
            assert store.put(KEYS[1:4], [row(i) for i in (1, 2, 3)])[1:] == [False] * 2
        places = [empty(), empty()]
        assert store.get(KEYS[:2], places) == [True, True]
        assert places == [row(0), row(1)]
    finally:
        open_server.client.config_set("maxmemory", 0)
    said = [r.getMessage() for r in caplog.records if "nothing more is" in r.message]
    assert len(said) == 1 and "OOM" in said[0]
    store._writing._next_try_s = 0
    assert store.put(KEYS[2:4], [row(2), row(3)]) == [True, True]
    store.close()


def test_a_node_of_a_cluster_is_refused_whatever_name_it_is_asked_for(
    tmp_path: Path,
) -> None:
    # Else nodes talk at a port that is higher by 10,000, and need not exist.
    bus = ["--cluster-port", str(free_port())]
    server = Valkey("--cluster-enabled", "yes", *bus, "--dir", str(tmp_path))
    try:
        server.start()
        run = server.client.execute_command
        run("CONFIG SET", "cluster-require-full-coverage", "no")
        # By chance, the name that is written first is one of this node.
        run("CLUSTER ADDSLOTS", run("CLUSTER KEYSLOT", f"kvtier:probe:{os.getpid()}"))
        until(lambda: run("CLUSTER INFO")["cluster_state"] == "ok")
        with pytest.raises(ValueError, match="is not a cluster"):
            check_redis(server)
    finally:
        server.close()


@pytest.mark.parametrize("ttl", [{}, {"ttl_s": 100}])
def test_a_server_that_refuses_writes_is_read_on(
    open_server: Valkey, ttl: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    store = check_redis(open_server, **ttl).open("b" * 32, 0, ROW_BYTES)
    assert store.put(KEYS[:3], [row(0), row(1), row(2)]) == [True] * 3
    damaged = open_server.object_name("b" * 32, 0, KEYS[1])
    open_server.client.set(damaged, b"torn")
    try:
        open_server.client.replicaof("127.0.0.1", free_port())
        assert store.put(KEYS[2:4], [row(2), row(3)]) == [not ttl, False]
        places = [empty() for _ in range(3)]
        # The damaged one cannot be removed.
        assert store.get(KEYS[:3], places) == [True, False, True]
        assert (places[0], places[2]) == (row(0), row(2))
        assert store.exists(KEYS[:4]) == [True, True, True, False]
    finally:
        open_server.client.replicaof("NO", "ONE")
    (said,) = [record.getMessage() for record in caplog.records]
    assert "READONLY" in said and "nothing more is written" in said
    store.close()


def test_writes_that_are_refused_in_part_are_logged_once(open_server: Valkey) -> None:
    config = store_config(with_debug(open_server.entry, num_connections=1))
    store = config.open("a" * 32, 0, ROW_BYTES)
    names = [open_server.object_name("a" * 32, 0, key) for key in KEYS[:16:2]]
    allow = functools.partial(
        open_server.client.execute_command, "ACL SETUSER", "default"
    )
    try:
        allow("resetkeys", "%R~*", *(f"~{name}" for name in names))
        with logged_by(breaker.__name__) as lines:
            rows = [row(i) for i in range(16)]
            assert store.put(KEYS[:16], rows) == [True, False] * 8
        assert len(lines) == 1 and "NOPERM" in lines[0]
        assert store.put(KEYS[:16], rows) == [False] * 16
    finally:
        allow("resetkeys", "allkeys")
    store.close()


def test_a_process_with_many_open_files(open_server: Valkey) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        store = check_redis(open_server).open(NAMESPACE, 0, ROW_BYTES)
        for _ in range(2):
            assert store.put(KEYS[:1], [row(0)]) == [True]
            assert store.exists(KEYS[:1]) == [True]
        store.close()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_objects_that_the_server_forgets(open_server: Valkey) -> None:
    config = check_redis(open_server, ttl_s=100)
    store = config.open("c" * 32, 0, ROW_BYTES)
    assert store.put(KEYS[:2], [row(0), row(1)]) == [True, True]
    name = open_server.object_name("c" * 32, 0, KEYS[0])
    assert 90 < open_server.client.ttl(name) <= 100
    open_server.client.expire(name, 20)
    assert store.put(KEYS[:1], [row(0)]) == [True]
    assert open_server.client.ttl(name) > 90
    place = empty()
    assert store.get(KEYS[:1], [place]) == [True] and place == row(0)
    store.close()


def test_a_connection_that_the_server_closed_is_no_trouble(
    open_server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    store = check_redis(open_server).open(NAMESPACE, 0, ROW_BYTES)
    assert store.put(KEYS[:1], [row(0)]) == [True]
    open_server.client.client_kill_filter(_type="normal", skipme=True)
    assert store.exists(KEYS[:1]) == [True]
    store.close()
    assert not caplog.records


def pump(source: socket.socket, to: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            to.sendall(data)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def tls_port(open_server: Valkey, tmp_path: Path) -> Iterator[int]:
    """Of a server with TLS, whose certificate is in the test's folder. Server binaries
    often lack it, so this is in front of one without."""
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    make = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *make.split(), *names, *files], check=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listening.accept()
            except OSError:
                return
            with contextlib.suppress(OSError):
                near = context.wrap_socket(plain, server_side=True)
                far = socket.create_connection(("127.0.0.1", open_server.port))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listening.getsockname()[1]
    listening.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_tls(open_server: Valkey, tls_port: int, tmp_path: Path) -> None:
    url = f"rediss://127.0.0.1:{tls_port}"
    with pytest.raises(ValueError, match="(?i)certificate.verify.failed"):
        check_redis(open_server, url=url)
    url = f"{url}?ssl_ca_certs={tmp_path}/certificate"
    store = check_redis(open_server, url=url).open("d" * 32, 0, ROW_BYTES)
    assert store.put(KEYS[:9], [row(i) for i in range(9)]) == [True] * 9
    places = [empty() for _ in range(9)]
    assert store.get(KEYS[:9], places) == [True] * 9
    assert places == [row(i) for i in range(9)]
    store.close()


# ------------------------------------------------------- Mooncake, import path


def test_an_engine_that_gives_memory() -> None:
    servers = Mooncake()
    try:
        servers.start()
        servers.kill("node")
        config = store_config(with_debug(servers.entry, global_segment_gib=0.1))
        for rank, gives in ((1, False), (0, True)):
            store: Any = config.open(NAMESPACE, rank, ROW_BYTES)
            memory = memoryview(bytearray(2 * ROW_BYTES))
            memory[:ROW_BYTES] = row(0)
            store.register(memory)
            assert (store._giver is not None) == gives
            if gives:
                rows = memory[:ROW_BYTES], memory[ROW_BYTES:]
                while store.put(KEYS[:1], rows[:1]) != [True]:
                    # Until the node that was killed is forgotten.
                    store._breaker._next_try_s = store._writing._next_try_s = None
                assert store.get(KEYS[:1], rows[1:]) == [True] and rows[1] == row(0)
            store.close()
    finally:
        servers.close()


def test_an_object_that_another_engine_is_writing_is_a_miss() -> None:
    servers = Mooncake()
    try:
        servers.start()
        store: Any = store_config(servers.entry).open(NAMESPACE, 0, ROW_BYTES)
        memory = memoryview(bytearray(4 * ROW_BYTES))
        rows = [memory[i * ROW_BYTES : (i + 1) * ROW_BYTES] for i in range(4)]
        store.register(memory)
        assert store.put(KEYS[:1], rows[:1]) == [True]
        name = servers.object_name(NAMESPACE, 0, KEYS[1])
        size = store._format.size(KEYS[1], ROW_BYTES)
        assert servers.client().batch_put_session_start([name], [size]) == [0]
        assert store.exists(KEYS[:2]) == [True, False]
        assert store.get(KEYS[:2], rows[2:]) == [True, False]
        assert not store._breaker.is_open
        store.close()
    finally:
        servers.close()


class OwnConfig(FsConfig):
    """What somebody else might write."""


class NoConfig(BlockStore):
    pass


def test_a_type_by_its_import_path() -> None:
    entry = {"root_dir": "/a", "max_gib": 1}
    path = f"{__name__}.OwnConfig"
    for name in (path, f"{__name__}:OwnConfig"):
        config = store_config(entry | {"type": name})
        assert type(config) is OwnConfig and config.root_dir == "/a"
    with pytest.raises(ValueError, match="unknown key 'other' .value 1.*root_dir"):
        store_config(entry | {"type": path, "other": 1})
    with pytest.raises(ValueError, match=r"type 'no\.Such' cannot be imported"):
        store_config(entry | {"type": "no.Such"})
    for name in ("NoConfig", "KEYS"):
        with pytest.raises(ValueError, match="or the import path of a StoreConfig"):
            store_config(entry | {"type": f"{__name__}.{name}"})
