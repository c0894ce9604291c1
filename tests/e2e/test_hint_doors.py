# SPDX-License-Identifier: Apache-2.0
"""Hints over HTTP, from the clients that people have."""

import json
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from .jobs import BLOCK_TOKENS
from .model import make_tokenizer
from .server import Server
from .test_http import CORE, SERVE, SIZE, server_environment
from .workloads import text

TEMPLATE = (
    "{% for m in messages %}t5 {{ m.content }} t7 {% endfor %}"
    "{% if add_generation_prompt %}t6{% endif %}"
)
FULL = 5 * BLOCK_TOKENS
HINTS = "/v1/kv_tier/hints"


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    make_tokenizer(llama)
    folder = tmp_path_factory.mktemp("doors")
    (folder / "template").write_text(TEMPLATE)
    flags = [*SERVE, *CORE, *SIZE, "--chat-template", str(folder / "template")]
    flags += ["--api-key", "secret"]
    env = {**server_environment(), "VLLM_LOGGING_LEVEL": "DEBUG"}
    server = Server(llama, flags, env, folder / "log")
    yield server
    server.kill()


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)


def words(seed: int, num_tokens: int) -> str:
    return " ".join(f"t{token}" for token in text(seed, num_tokens))


Ask = Callable[..., Any]


@pytest.fixture(params=["completions", "chat", "responses", "messages"])
def ask(request: pytest.FixtureRequest, server: Server, client: openai.OpenAI) -> Ask:
    """One endpoint by its client; what else it is given stands in the body."""
    paths = json.loads(server.get("/openapi.json"))["paths"]
    turn = [{"role": "user", "content": words(1, 20)}]
    if request.param == "completions":
        return lambda stream, **body: client.completions.create(
            model=server.model,
            prompt=words(1, 20),
            max_tokens=8,
            stream=stream,
            extra_body=body,
        )
    if request.param == "chat":
        return lambda stream, **body: client.chat.completions.create(
            model=server.model,
            messages=turn,
            max_tokens=8,
            stream=stream,
            extra_body=body,
        )
    if f"/v1/{request.param}" not in paths:
        pytest.skip(f"this release has no /v1/{request.param}")
    if request.param == "responses":
        return lambda stream, **body: client.responses.create(
            model=server.model,
            input=words(1, 20),
            max_output_tokens=16,
            stream=stream,
            extra_body=body,
        )
    anthropic = pytest.importorskip("anthropic")
    messages = anthropic.Anthropic(
        base_url=server.url, auth_token="secret", max_retries=0
    ).messages
    return lambda stream, **body: messages.create(
        model=server.model,
        max_tokens=8,
        messages=turn,
        stream=stream,
        extra_body=body,
    )


def status_and_message(call: Callable[..., Any], **body: Any) -> tuple[int, str]:
    """Of a request that a client's library may report as refused."""
    try:
        call(**body)
    except Exception as e:
        # Both libraries have classes of their own.
        return vars(e)["status_code"], str(e)
    return 200, ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_hint_is_an_error_that_names_it(ask: Ask, stream: bool) -> None:
    for wrong, said in (
        ({"relase": True}, "unknown field 'relase' (value True)"),
        ({"retain": {"priority": 101}}, "retain.priority must be a whole number"),
    ):
        params = {"kv_tier": wrong}
        status, message = status_and_message(
            ask, stream=stream, kv_transfer_params=params
        )
        assert status == 400
        assert said in message
    params = {"kv_tier": {"release": True}}
    served = status_and_message(ask, stream=False, kv_transfer_params=params)
    assert served == (200, "")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention must be"),
        ({"prompt_cache_options": {"ttl": "31m"}}, "prompt_cache_options.ttl must be"),
    ],
)
def test_a_value_that_openai_does_not_have(
    server: Server, client: openai.OpenAI, wrong: dict[str, Any], said: str
) -> None:
    status, message = status_and_message(
        lambda: client.completions.create(
            model=server.model, prompt=words(1, 20), stream=True, extra_body=wrong
        )
    )
    assert (status, said in message) == (400, True)


def refused(server: Server, body: Any, key: str = "secret") -> tuple[int, str]:
    """Status and message of what is said afterwards, in vain."""
    with pytest.raises(urllib.error.HTTPError) as found:
        server.post(HINTS, body, Authorization=f"Bearer {key}")
    return found.value.code, found.value.read().decode()


def test_what_is_said_afterwards_is_checked(server: Server) -> None:
    for body, said in (
        ({"conversation": 7, "release": True}, "conversation must be a string"),
        ({"release": True}, "conversation is missing"),
        ({"conversation": "c"}, "release must be true"),
        ({"conversation": "c", "relase": True}, "unknown field 'relase'"),
        (["c"], "must be an object"),
    ):
        status, message = refused(server, body)
        assert (status, said in message) == (400, True), message
    assert refused(server, {"conversation": "c", "release": True}, "no")[0] == 401


def hit_tokens(server: Server) -> float:
    found = server.metrics("vllm:kv_tier_")
    return sum(found[f"vllm:kv_tier_{t}_hit_tokens_total"] for t in ("device", "host"))


def test_a_conversation_that_was_closed_makes_room_first(
    server: Server, client: openai.OpenAI
) -> None:
    """As one whose last request says so. The others stay."""
    prompts = [text(100 + i, FULL + 1) for i in range(12)]
    over = len(prompts) - 1

    def complete(prompt: list[int], **hints: Any) -> str:
        body = {"kv_transfer_params": {"kv_tier": hints}} if hints else {}
        extra = {"ignore_eos": True, **body}
        return (
            client.completions.create(
                model=server.model,
                prompt=prompt,
                max_tokens=8,
                temperature=0,
                extra_body=extra,
            )
            .choices[0]
            .text
        )

    def close(name: str) -> dict[str, int]:
        body = {"conversation": name, "release": True}
        return server.post(HINTS, body, Authorization="Bearer secret")

    before = server.metrics("vllm:kv_tier_")["vllm:kv_tier_released_blocks_total"]
    texts = [complete(p, conversation=f"c{i}") for i, p in enumerate(prompts)]
    found = {"released_blocks": 5, "running_requests": 0, "engines": 1}
    assert close(f"c{over}") == found
    assert close(f"c{over}") == {**found, "released_blocks": 0}
    for i in range(6):
        complete(text(200 + i, FULL + 1))
    for i, expected in ((over, 0), (over - 1, FULL), (0, FULL)):
        hits = hit_tokens(server)
        assert complete(prompts[i], conversation=f"c{i}") == texts[i]
        assert hit_tokens(server) - hits == expected
    after = server.metrics("vllm:kv_tier_")["vllm:kv_tier_released_blocks_total"]
    assert after - before == 5


def said(server: Server, call: Callable[[], Any]) -> list[str]:
    """What the server has understood of the requests that `call` makes."""
    before = len(server.log())
    call()
    lines = server.log()[before:].splitlines()
    begin = "KV tier: a request says "
    return [line.partition(begin)[2] for line in lines if begin in line]


def test_fields_of_openai_are_hints(ask: Ask, server: Server) -> None:
    if "anthropic" in str(ask.__closure__):
        pytest.skip("the fields are OpenAI's")
    kept = "{'retain': {'priority': 75, 'ttl': 86400, 'end': None}}, prewarm False."
    assert said(server, lambda: ask(False, prompt_cache_retention="24h")) == [kept]
    in_memory = {"prompt_cache_retention": "in_memory", "prompt_cache_key": "k"}
    assert said(server, lambda: ask(False, **in_memory)) == []
    options = {"prompt_cache_options": {"ttl": "30m"}}
    kept = kept.replace("86400", "1800")
    assert said(server, lambda: ask(False, **options)) == [kept]
    # What the client says in the tier's own words counts more.
    own = {"kv_transfer_params": {"kv_tier": {"retain": {"priority": 10}}}}
    assert said(server, lambda: ask(False, **options, **own)) in (
        [],
        ["{'retain': {'priority': 10}}, prewarm False."],
    )


def test_cache_control_retains_up_to_its_block(server: Server) -> None:
    anthropic = pytest.importorskip("anthropic")
    paths = json.loads(server.get("/openapi.json"))["paths"]
    if "/v1/messages/count_tokens" not in paths:
        pytest.skip("this release does not count the tokens of messages")
    client = anthropic.Anthropic(base_url=server.url, auth_token="secret")

    def send(*ttls: str | None) -> None:
        content = []
        for i, ttl in enumerate(ttls):
            control = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
            block = {"type": "text", "text": words(300 + i, 40)}
            content.append({**block, **(control if ttl else {})})
        client.messages.create(
            model=server.model,
            max_tokens=4,
            messages=[{"role": "user", "content": content}],
        )

    def kept(ttl: int, end: int | None) -> str:
        return f"{{'priority': 75, 'ttl': {ttl}, 'end': {end}}}"

    # Behind the block the template has two tokens, and one before it.
    first = f"{{'retain': [{kept(3600, 40 + 3)}]}}, prewarm False."
    assert said(server, lambda: send("1h", None)) == [first]
    both = f"{{'retain': [{kept(300, None)}, {kept(3600, 40 + 3)}]}}, prewarm False."
    assert said(server, lambda: send("1h", "5m")) == [both]
    assert said(server, lambda: send(None, None)) == []
    status, message = status_and_message(lambda: send("2h", None))
    assert status == 400
    assert "messages[0].content[0].cache_control.ttl must be '5m' or '1h'" in message


def test_prewarm_computes_and_keeps(server: Server, client: openai.OpenAI) -> None:
    prompt = text(400, FULL + 1)

    def complete(**body: Any) -> Any:
        return client.completions.create(
            model=server.model,
            prompt=prompt,
            max_tokens=8,
            temperature=0,
            extra_body={"ignore_eos": True, **body},
        )

    warmed = complete(prompt_cache_options={"prewarm": True})
    assert warmed.usage.completion_tokens == 1
    hits = hit_tokens(server)
    answer = complete()
    assert hit_tokens(server) - hits == FULL
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].text.startswith(warmed.choices[0].text)
