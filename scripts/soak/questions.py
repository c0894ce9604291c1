# SPDX-License-Identifier: Apache-2.0
"""What is asked, and the right answers: those of a server without a tier."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.e2e.model import VOCAB_SIZE

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ 't5 ' if m.role == 'user' else 't6 ' }}"
    "{{ m.content }} {% endfor %}t6"
)

CLEAR_MARGIN = 1e-3
"""Nats between the best and the second token. Sums in another order move logprobs by
less in float32; where the choice is closer, either token is right."""


@dataclass
class Question:
    """A request, and the tokens that must come back."""

    path: str
    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    is_clear: bool = True
    """Whether no other answer is right."""


@dataclass
class Conversation:
    """Questions of which each holds the one before and its answer."""

    model: str
    is_chat: bool
    sayings: list[str]
    max_tokens: int
    questions: list[Question] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Of the last question with its answer: all KV of the conversation."""
        said = sum(len(text.split()) + 2 * self.is_chat for text in self.sayings)
        return said + sum(len(question.tokens) for question in self.questions)


def make_conversations(
    models: Sequence[str], number: int, num_turns: int, first: int, later: int
) -> list[Conversation]:
    """Conversations about nothing.

    Args:
        models: Served models, which take turns.
        number: Of conversations; every other one is a chat.
        num_turns: Questions of each.
        first: About so many tokens begin a conversation.
        later: About so many continue it.

    """
    conversations = []
    for i in range(number):
        rng = random.Random(i)
        sayings = []
        for turn in range(num_turns):
            size = rng.randint(*(first * 3 // 4, first) if turn == 0 else (1, later))
            words = (f"t{rng.randrange(7, VOCAB_SIZE)}" for _ in range(size))
            sayings.append(" ".join(words))
        model = models[i % len(models)]
        max_tokens = rng.choice([4, 8, 16, 24])
        conversations.append(Conversation(model, i % 2 == 0, sayings, max_tokens))
    return conversations


async def learn_answers(
    url: str, conversations: Sequence[Conversation], at_a_time: int = 6
) -> None:
    """Hold the conversations with the server at `url`, and keep its answers."""
    places = asyncio.Semaphore(at_a_time)

    async def learn(conversation: Conversation) -> None:
        async with places:
            await _hold(client, conversation)

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client:
        await asyncio.gather(*map(learn, conversations))


async def _hold(client: httpx.AsyncClient, conversation: Conversation) -> None:
    messages: list[dict[str, str]] = []
    for saying in conversation.sayings:
        messages.append({"role": "user", "content": saying})
        question = _question(conversation, messages)
        wants_logprobs = (
            {"logprobs": True, "top_logprobs": 2}
            if conversation.is_chat
            else {"logprobs": 2}
        )
        response = await client.post(question.path, json=question.body | wants_logprobs)
        response.raise_for_status()
        (choice,) = response.json()["choices"]
        question.tokens = choice["token_ids"]
        question.is_clear = min(_margins(choice["logprobs"])) > CLEAR_MARGIN
        conversation.questions.append(question)
        answer = " ".join(f"t{token}" for token in question.tokens)
        messages.append({"role": "assistant", "content": answer})


def _question(
    conversation: Conversation, messages: Sequence[dict[str, str]]
) -> Question:
    body: dict[str, Any] = {
        "model": conversation.model,
        "max_tokens": conversation.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if conversation.is_chat:
        return Question("/v1/chat/completions", body | {"messages": list(messages)})
    prompt = " ".join(message["content"] for message in messages)
    return Question("/v1/completions", body | {"prompt": prompt})


def _margins(logprobs: dict[str, Any]) -> list[float]:
    if "content" in logprobs:
        tops = [
            [top["logprob"] for top in token["top_logprobs"]]
            for token in logprobs["content"]
        ]
    else:
        tops = [list(top.values()) for top in logprobs["top_logprobs"]]
    best = [sorted(top, reverse=True)[:2] for top in tops]
    return [top[0] - top[1] if len(top) > 1 else 0.0 for top in best]
