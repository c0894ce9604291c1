# SPDX-License-Identifier: Apache-2.0
"""The engine as a client sees it: requests that stream in, with their times."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """One greedy answer.

    Attributes:
        key: names the request within its run.
        prompt_tokens: length of the prompt.
        sent: when it was sent, in seconds of `time.perf_counter`.
        times: when each of its tokens arrived, on the same clock.
        tokens: token ids.
        gaps: by how much the best logprob beats the second best, in nats, for each
            token; empty if no logprobs were asked for.
        cached_tokens: prompt tokens that no forward pass computed.

    """

    key: str
    prompt_tokens: int
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent


class Client:
    """Sends requests to an engine of its own process.

    Args:
        engine: a `vllm.v1.engine.async_llm.AsyncLLM`.
        device_tokens: for how many tokens the device cache has room.
        max_prompt_tokens: that the engine takes.
        vocab: token ids are below it.
        jitter_s: every request is sent up to this much later than asked.
        hints: whether conversations tell the tier of themselves.
        replicas: that the engine has. A conversation stays with one of them, as it
            does behind a router that knows of prefixes.

    """

    def __init__(
        self,
        engine: Any,
        device_tokens: int,
        max_prompt_tokens: int,
        vocab: int,
        jitter_s: float = 0.0,
        replicas: int = 1,
        hints: bool = False,
    ) -> None:
        self.hints = hints
        self.device_tokens = device_tokens
        self.max_prompt_tokens = max_prompt_tokens
        self.vocab = vocab
        self.logprobs = False
        """Whether requests ask for the two best logprobs of each token."""
        self._engine = engine
        self._jitter_s = jitter_s
        self._replicas = replicas
        self._random = random.Random(0)
        self._sent = 0

    async def ask(
        self,
        key: str,
        prompt: Sequence[int],
        max_tokens: int,
        answer: Answer | None = None,
        conversation: int = 0,
        hints: dict[str, Any] | None = None,
    ) -> Answer:
        """Exactly `max_tokens` tokens; fills `answer`, if given, while they come.

        Hints are those of docs/hints.md, sent with the name of the conversation if the
        client sends any.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        extra = None
        if self.hints and hints is not None:
            told = {"conversation": f"{conversation}"} | hints
            extra = {"kv_transfer_params": {"kv_tier": told}}
        params = SamplingParams(
            extra_args=extra,
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=2 if self.logprobs else None,
            output_kind=RequestOutputKind.DELTA,
        )
        if answer is None:
            answer = Answer(key, len(prompt))
        self._sent += 1
        if self._jitter_s:
            await asyncio.sleep(self._random.uniform(0, self._jitter_s))
        answer.sent = time.perf_counter()
        stream = self._engine.generate(
            {"prompt_token_ids": list(prompt)},
            params,
            f"{self._sent}-{key}",
            data_parallel_rank=(
                conversation % self._replicas if self._replicas > 1 else None
            ),
        )
        async for output in stream:
            now = time.perf_counter()
            part = output.outputs[0]
            if not answer.times:
                answer.cached_tokens = output.num_cached_tokens or 0
            answer.times += [now] * len(part.token_ids)
            answer.tokens += part.token_ids
            for position in part.logprobs or ():
                best = sorted((p.logprob for p in position.values()), reverse=True)
                answer.gaps.append(best[0] - best[1])
        if len(answer.tokens) != max_tokens:
            raise RuntimeError(
                f"Request {key} gave {len(answer.tokens)} tokens, not {max_tokens}."
            )
        return answer
