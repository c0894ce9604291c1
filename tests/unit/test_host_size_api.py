# SPDX-License-Identifier: Apache-2.0
"""Changes of the host size over HTTP, and from Python."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.routing import Route

from tests.unit.hints.test_http import Engines, make_app, post
from vllm.v1.kv_tier import frontend
from vllm.v1.kv_tier.host_size_api import PATH, answer, check, serve_host_size

CONFIG = SimpleNamespace(
    cache_config=SimpleNamespace(kv_offloading_size=8.0, kv_offloading_backend="core")
)


def test_a_size_is_sent_in_bytes() -> None:
    assert check({"gib": 8}, CONFIG) == {"host_bytes": 8 << 30}
    assert check({"gib": 0.5}, CONFIG) == {"host_bytes": 1 << 29}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gib": 8.5}, "at most 8, which the engine reserved at its start"),
        ({"gib": 0}, "gib must be above 0"),
        ({"gib": float("nan")}, "gib must be above 0"),
        ({"gib": True}, "gib must be a number, got true"),
        ({"gib": "1"}, "gib must be a number"),
        ({}, 'The body must be {"gib": number}'),
        ({"gib": 1, "x": 1}, 'The body must be {"gib": number}'),
        ([], 'The body must be {"gib": number}'),
    ],
)
def test_other_sizes_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as found:
        check(given, CONFIG)
    assert message.lower() in str(found.value).lower()


def test_every_engine_is_asked() -> None:
    app = make_app(Route(PATH, serve_host_size, methods=["POST"]))
    app.state.engine_client = engines = Engines()
    engines.vllm_config = CONFIG  # type: ignore[attr-defined]
    assert post(app, PATH, json.dumps({"gib": 2}).encode())[0] == 200
    said = {"host_bytes": 2 << 30}
    assert engines.told == [("hint_kv_tier", engine, said) for engine in (0, 1)]
    for body in (b"{", b'{"gib": 9}', b"[" * 100_000):
        status, found = post(app, PATH, body)
        assert (status, found["error"]["type"]) == (400, "BadRequestError")
    assert len(engines.told) == 2


def test_shared_slots_are_refused() -> None:
    with pytest.raises(ValueError, match="share_replicas"):
        answer({"refused": 2, "engines": 2})
    assert answer({"host_slots": 4, "engines": 1}) == {"host_slots": 4, "engines": 1}


@pytest.mark.parametrize("is_dev_mode", [False, True])
def test_the_route_is_of_the_development_mode(
    is_dev_mode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", str(int(is_dev_mode)))
    paths: list[str] = []
    app = SimpleNamespace(
        add_middleware=lambda middleware: None,
        add_api_route=lambda path, serve, methods: paths.append(path),
    )
    frontend.add_hint_routes(app, SimpleNamespace(kv_offloading_backend="core"))
    assert (PATH in paths) == is_dev_mode


def test_an_engine_without_the_tier_is_named() -> None:
    cache = SimpleNamespace(kv_offloading_backend="native")
    engine = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
    with pytest.raises(ValueError, match="Host sizes need --kv-offloading-backend"):
        frontend.set_host_size(SimpleNamespace(llm_engine=engine), 1.0)
