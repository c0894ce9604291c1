# SPDX-License-Identifier: Apache-2.0
"""Hints over HTTP, from the clients that people have.

Conversations are closed first, while nothing is retained on the host.
"""

import asyncio
import json
import random
import time
import urllib.error
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from soak.hostile import Hostile
from soak.watch import Watch, growth

from . import planted
from .jobs import BLOCK_BYTES, BLOCK_TOKENS, GiB
from .model import make_tokenizer
from .server import Server
from .test_http import CORE, SERVE, server_environment

anthropic = pytest.importorskip("anthropic", reason="comes with newer releases")

TEMPLATE = (
    "{% for m in messages %}t5 {{ m.content }} t7 {% endfor %}"
    "{% if add_generation_prompt %}t6{% endif %}"
)
NUM_SLOTS = 40
SIZE = ["--kv-offloading-size", repr(NUM_SLOTS * BLOCK_BYTES / GiB)]
NUM_BLOCKS = 5
FULL = NUM_BLOCKS * BLOCK_TOKENS
"""Tokens of each prompt that are kept: the device has room for three such prompts and
what they generate, the host for eight."""
HINTS = "/v1/kv_tier/hints"
COUNT = "/v1/messages/count_tokens"
APIS = ("completions", "chat", "responses", "messages")
DAY, HOUR = 86400, 3600


def words(seed: int, num_tokens: int) -> str:
    """Text of so many tokens. None begins as `t1` and `t2`, which the tokenizer takes
    out of the midst of a word, since they are special."""
    rng = random.Random(seed)
    return " ".join(f"t{rng.randrange(300, 1000)}" for _ in range(num_tokens))


class Doors:
    """The endpoints of a server, each by the client that people have for it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._numbers = count(1)
        secret = {"max_retries": 0, "timeout": 120}
        url = f"{server.url}/v1"
        self.openai = openai.OpenAI(base_url=url, api_key="secret", **secret)  # type: ignore[arg-type]
        self.anthropic = anthropic.Anthropic(
            base_url=server.url, auth_token="secret", **secret
        )
        self.paths = json.loads(server.get("/openapi.json"))["paths"]

    def prompt(self) -> str:
        """Text that nobody has sent yet."""
        return words(next(self._numbers), FULL + 1)

    def ask(self, api: str, prompt: Any, stream: bool = False, **body: Any) -> Any:
        """The answer of an endpoint; `body` is sent beside what it needs."""
        common = {"model": self.server.model, "stream": stream}
        turn = [{"role": "user", "content": prompt}]
        limit = {"max_tokens": 8, "temperature": 0}
        if api == "completions":
            create: Any = self.openai.completions.create
            common |= {"prompt": prompt, **limit}
        elif api == "chat":
            create = self.openai.chat.completions.create
            common |= {"messages": turn, **limit}
        elif api == "responses":
            create = self.openai.responses.create
            common |= {"input": prompt, "max_output_tokens": 16, "temperature": 0}
        else:
            create = self.anthropic.messages.create
            # Not each version of the client has a word for the temperature.
            common |= {"messages": turn, "max_tokens": 8}
            body = {"temperature": 0, **body}
        return create(**common, extra_body=body)

    def hits(self, api: str, prompt: Any, tier: str | None = None, **body: Any) -> int:
        """Tokens of a prompt that came from `tier`, or from both.

        Where the answer tells of both it tells the same.
        """
        names = [f"{t}_hit_tokens_total" for t in ([tier] if tier else TIERS)]
        before = sum(map(self.metric, names))
        answer = self.ask(api, prompt, **body)
        found = int(sum(map(self.metric, names)) - before)
        told = cached_tokens(api, answer.usage)
        if tier is None and told is not None:
            assert told == found
        return found

    def metric(self, name: str) -> float:
        return self.server.metrics("vllm:kv_tier_")[f"vllm:kv_tier_{name}"]

    def flood(self, num_prompts: int) -> None:
        """Others, who say nothing."""
        for _ in range(num_prompts):
            self.ask("completions", self.prompt())

    def close(self, name: str) -> dict[str, int]:
        body = {"conversation": name, "release": True}
        return self.server.post(HINTS, body, Authorization="Bearer secret")

    def said(self, call: Callable[[], Any]) -> list[str]:
        """What the server has understood of the requests that `call` makes."""
        before = len(self.server.log())
        call()
        lines = self.server.log()[before:].splitlines()
        begin = "KV tier: a request says "
        return [line.partition(begin)[2] for line in lines if begin in line]

    def needs(self, path: str) -> None:
        if path not in self.paths:
            pytest.skip(f"this release has no {path}")


TIERS = ("device", "host")


def cached_tokens(api: str, usage: Any) -> int | None:
    """As an answer tells them. None if it does not."""
    if api == "messages":
        return usage.cache_read_input_tokens
    name = "input_tokens_details" if api == "responses" else "prompt_tokens_details"
    return getattr(getattr(usage, name, None), "cached_tokens", None)


def tier_hints(**hints: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"kv_tier": hints}}


@pytest.fixture(scope="module")
def doors(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    make_tokenizer(llama)
    folder = tmp_path_factory.mktemp("doors")
    (folder / "template").write_text(TEMPLATE)
    flags = [*SERVE, *CORE, *SIZE, "--chat-template", str(folder / "template")]
    flags += ["--api-key", "secret", "--middleware", "tests.e2e.planted.Planted"]
    env = {**server_environment(), "VLLM_LOGGING_LEVEL": "DEBUG"}
    server = Server(llama, flags, env, folder / "log")
    yield Doors(server)
    server.kill()


@pytest.fixture(params=APIS)
def api(request: pytest.FixtureRequest, doors: Doors) -> str:
    if request.param in ("responses", "messages"):
        doors.needs(f"/v1/{request.param}")
    return request.param


# ------------------------------------------------------------------ afterwards


def test_a_conversation_that_was_closed_leaves_the_device_first(doors: Doors) -> None:
    """The last one that came goes, and the first one stays."""
    first, other, over = (doors.prompt() for _ in range(3))
    for name, prompt in (("first", first), ("other", other), ("over", over)):
        doors.ask("chat", prompt, **tier_hints(conversation=name))
    before = doors.metric("released_blocks_total")
    found = {"released_blocks": NUM_BLOCKS, "running_requests": 0, "engines": 1}
    assert doors.close("over") == found
    assert doors.close("over") == {**found, "released_blocks": 0}
    # It takes as many blocks as were released, and one more.
    doors.flood(1)
    assert doors.metric("released_blocks_total") - before == NUM_BLOCKS
    assert doors.hits("chat", first, "device") == FULL
    assert doors.hits("chat", over, "device") == 0


def test_a_conversation_that_was_closed_leaves_the_host_first(doors: Doors) -> None:
    """One that came before it stays."""
    stays, over = doors.prompt(), doors.prompt()
    doors.ask("chat", stays, **tier_hints(conversation="stays"))
    doors.ask("chat", over, **tier_hints(conversation="closed"))
    doors.flood(4)
    assert doors.metric("slots_used") == NUM_SLOTS
    assert doors.close("closed")["released_blocks"] == NUM_BLOCKS
    doors.flood(1)
    assert doors.hits("chat", stays, "host") == FULL
    assert doors.hits("chat", over) == 0


def test_what_is_not_closed_leaves_the_host_later(doors: Doors) -> None:
    """As the last test, but for its end: nobody closes the conversation."""
    stays, over = doors.prompt(), doors.prompt()
    doors.ask("chat", stays, **tier_hints(conversation="stays on"))
    doors.ask("chat", over, **tier_hints(conversation="goes on"))
    doors.flood(5)
    assert doors.hits("chat", over, "host") == FULL


def test_what_still_runs_is_told_of(doors: Doors) -> None:
    answer = doors.openai.completions.create(
        model=doors.server.model,
        prompt=words(0, 20),
        max_tokens=400,
        stream=True,
        extra_body={"ignore_eos": True, **tier_hints(conversation="runs")},
    )
    next(iter(answer))
    assert doors.close("runs")["running_requests"] == 1
    # On a busy machine a part has several tokens.
    assert sum(len(part.choices[0].text.split()) for part in answer) > 300


def refused(doors: Doors, body: Any, key: str = "secret") -> tuple[int, str]:
    """Status and message of what is said afterwards, in vain."""
    with pytest.raises(urllib.error.HTTPError) as found:
        doors.server.post(HINTS, body, Authorization=f"Bearer {key}")
    return found.value.code, found.value.read().decode()


def test_what_is_said_afterwards_is_checked(doors: Doors) -> None:
    for body, said in (
        ({"conversation": 7, "release": True}, "conversation must be a string"),
        ({"release": True}, "conversation is missing"),
        ({"conversation": "c"}, "release must be true"),
        ({"conversation": "c", "relase": True}, "unknown field 'relase'"),
        (["c"], "must be an object"),
    ):
        status, message = refused(doors, body)
        assert (status, said in message) == (400, True), message
    assert refused(doors, {"conversation": "c", "release": True}, "no")[0] == 401


# ------------------------------------------------------------------- bad hints


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_hint_is_an_error_that_names_it(
    doors: Doors, api: str, stream: bool
) -> None:
    ask = doors.ask
    for wrong, words_of_it in (
        (tier_hints(relase=True), "unknown field 'relase' (value True)"),
        (
            tier_hints(retain={"priority": 101}),
            "retain.priority must be a whole number from 0 to 100 (50 is no hint), "
            "got 101",
        ),
        *WRONG["anthropic" if api == "messages" else "openai"],
    ):
        with pytest.raises(
            (openai.BadRequestError, anthropic.BadRequestError)
        ) as found:
            ask(api, words(0, 20), stream, **wrong)
        assert words_of_it in str(found.value)
    assert ask(api, words(0, 20), **tier_hints(release=True)).usage


WRONG: dict[str, list[tuple[dict[str, Any], str]]] = {
    "openai": [
        (
            {"prompt_cache_retention": "48h"},
            "prompt_cache_retention must be 'in_memory' or '24h', got '48h'",
        ),
        (
            {"prompt_cache_options": {"ttl": "31m"}},
            "prompt_cache_options.ttl must be '30m' or '12h', got '31m'",
        ),
    ],
    "anthropic": [
        (
            {"cache_control": {"type": "ephemeral", "ttl": "2h"}},
            "cache_control.ttl must be '5m' or '1h', got '2h'",
        )
    ],
}

# ----------------------------------------------------------- words of other APIs


def openai_kept(seconds: int) -> str:
    """What the log says of a prompt that is retained for so long."""
    return f"{{'retain': {{'priority': 75, 'ttl': {seconds}, 'end': None}}}}."


def test_fields_of_openai_are_hints(doors: Doors, api: str) -> None:
    if api == "messages":
        pytest.skip("the fields are OpenAI's")

    def said(**body: Any) -> list[str]:
        return doors.said(lambda: doors.ask(api, words(0, 20), **body))

    assert said(prompt_cache_retention="24h") == [openai_kept(DAY)]
    assert said(prompt_cache_retention="in_memory", prompt_cache_key="k") == []
    options = {"prompt_cache_options": {"ttl": "30m"}}
    assert said(**options) == [openai_kept(HOUR // 2)]
    # What the client says in the tier's own words counts more.
    own = "{'retain': {'priority': 10}}."
    # Where the endpoint knows the field, nothing has to be added.
    assert said(**options, **tier_hints(retain={"priority": 10})) in ([], [own])


RETAINED = {
    "retention": ("completions", {"prompt_cache_retention": "24h"}),
    "options of a chat": ("chat", {"prompt_cache_options": {"ttl": "30m"}}),
    "options of a response": ("responses", {"prompt_cache_options": {"ttl": "12h"}}),
    "the end of a message": ("messages", {"cache_control": {"type": "ephemeral"}}),
    "own words": ("messages", tier_hints(retain={"priority": 80, "ttl": 600})),
}


@pytest.mark.parametrize("name", RETAINED)
def test_what_a_client_keeps_outlives_a_flood(doors: Doors, name: str) -> None:
    api, field = RETAINED[name]
    if api in ("responses", "messages"):
        doors.needs(f"/v1/{api}")
    kept, control = doors.prompt(), doors.prompt()
    doors.ask(api, kept, **field)
    doors.ask(api, control)
    before = doors.metric("retained_blocks_total")
    doors.flood(16)
    assert doors.hits(api, kept, **field) == FULL
    assert doors.metric("retained_blocks_total") - before >= NUM_BLOCKS
    assert doors.hits(api, control) == 0


def blocks(*sizes_and_ttls: tuple[str, str | None]) -> list[dict[str, Any]]:
    """The content of a turn for Anthropic's client."""
    return [
        {"type": "text", "text": text}
        | ({"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {})
        for text, ttl in sizes_and_ttls
    ]


def test_cache_control_keeps_up_to_its_block(doors: Doors) -> None:
    doors.needs(COUNT)
    # The template has a token before it, and two behind it.
    begin, rest = words(9000, 2 * BLOCK_TOKENS - 3), words(9001, FULL)
    content = blocks((begin, "1h"), (rest, None))
    assert doors.hits("messages", content) == 0
    doors.flood(16)
    assert doors.hits("messages", content) == 2 * BLOCK_TOKENS


def test_where_cache_control_ends(doors: Doors) -> None:
    doors.needs(COUNT)
    first, second = words(300, 40), words(301, 40)

    def said(*ttls: str | None) -> list[str]:
        content = blocks(*zip((first, second), ttls, strict=True))
        return doors.said(lambda: doors.ask("messages", content))

    def kept(ttl: int, end: int | None) -> str:
        return f"{{'priority': 75, 'ttl': {ttl}, 'end': {end}}}"

    # One token is before the block; two are behind it wherever a message ends there.
    hour = kept(HOUR, 1 + 40 + 2)
    assert said("1h", None) == [f"{{'retain': [{hour}]}}."]
    both = f"{{'retain': [{kept(300, None)}, {hour}]}}."
    assert said("1h", "5m") == [both]
    assert said(None, None) == []
    with pytest.raises(anthropic.BadRequestError) as found:
        said("2h", None)
    words_of_it = "messages[0].content[0].cache_control.ttl must be '5m' or '1h'"
    assert words_of_it in str(found.value)


def test_own_words_prewarm_at_every_door(doors: Doors, api: str) -> None:
    """And the turn that follows has all of it from the device."""
    prompt = doors.prompt()
    usage = doors.ask(api, prompt, **tier_hints(prewarm=True)).usage
    answered = getattr(usage, "output_tokens", None)
    assert (answered or usage.completion_tokens) == 1
    assert doors.hits(api, prompt, "device") == FULL


def test_prewarm_computes_and_keeps(doors: Doors) -> None:
    prompt = doors.prompt()
    names = [f"prewarmed_{name}blocks_total" for name in ("", "used_", "late_")]
    before = [doors.metric(name) for name in names]
    warmed = doors.ask("completions", prompt, prompt_cache_options={"prewarm": True})
    assert warmed.usage.completion_tokens == 1
    doors.flood(16)
    assert doors.hits("completions", prompt) == FULL
    found = [doors.metric(name) - number for name, number in zip(names, before)]
    assert found == [NUM_BLOCKS, NUM_BLOCKS, 0]
    answer = doors.ask("completions", prompt, ignore_eos=True)
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].text.startswith(warmed.choices[0].text)


# ------------------------------------------------------------- hostile clients


def press(doors: Doors, seconds: float, **headers: str) -> tuple[Hostile, float]:
    """Clients of all hostile kinds, and by how much the server's processes grew: the
    most of all, as a part of what they had."""
    headers["Authorization"] = "Bearer secret"
    hostile = Hostile(doors.server.url, doors.server.model, **headers)
    watch = Watch(doors.server, every_s=0.2)

    async def both() -> None:
        ends = time.monotonic() + seconds
        await asyncio.gather(hostile.press(ends), watch.run(ends))

    asyncio.run(both())
    assert watch.faults == []
    pids = map(doors.server.pid_of, ("APIServer", "EngineCore"))
    return hostile, max(growth(watch.sizes(pid)) for pid in pids)


GROWTH = 0.03
"""Of a few seconds: processes are still warming up. `make soak` asks for less."""


def test_hostile_clients_are_refused_and_memory_stays(doors: Doors) -> None:
    """A short version of `make soak ARGS=--hostile`."""
    secret = {"Authorization": "Bearer secret"}
    hostile = Hostile(doors.server.url, doors.server.model, **secret)
    looks = asyncio.run(hostile.look(times=1))
    # Other endpoints refuse these bodies for what else is missing, in their own way.
    ours = {
        name: look.outcome
        for name, look in looks.items()
        if name.endswith((" /v1/completions", HINTS))
    }
    hints = {outcome for name, outcome in ours.items() if ": hint " in name}
    assert hints == {400}
    press(doors, 8)
    pressed, grown = press(doors, 12)
    assert pressed.served > 10
    assert pressed.counts["aborted prewarms"]["given up"] > 0
    assert pressed.broken.keys() <= hostile.broken.keys()
    assert grown < GROWTH
    doors.server.get("/health")
    assert doors.hits("completions", prompt := doors.prompt()) == 0
    assert doors.hits("completions", prompt) == FULL


def test_a_leak_is_noticed_by_the_test_of_hostile_clients(doors: Doors) -> None:
    _, grown = press(doors, 6, **{planted.HEADER: planted.LEAK})
    assert grown > 2 * GROWTH


def test_an_answer_of_500_is_noticed_by_the_test_of_hostile_clients(
    doors: Doors,
) -> None:
    pressed, _ = press(doors, 1, **{planted.HEADER: planted.ERROR})
    assert "unique names: /v1/completions 500" in pressed.broken
