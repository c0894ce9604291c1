# SPDX-License-Identifier: Apache-2.0
"""What a user of the server sees: answers as they stream in, and its metrics."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from openai import DefaultHttpxClient, OpenAI
from prometheus_client.parser import text_string_to_metric_families

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Attributes:
        logprobs: of the tokens in `token_ids`, in nats.
        margins: by how much each token's logprob beat the second best, in nats.
        prompt_tokens: of the whole conversation so far.
        cached_tokens: of these, the ones that no forward pass computed.
        ttft_ms: from sending the request to the first token.

    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float


class ChatClient:
    """A client of one server, for a `with` statement.

    Attributes:
        url: the server's, without the API's path.
        model: the name of the served model.

    """

    def __init__(self, url: str) -> None:
        self.url = url
        # A proxy from the environment has no business with a local server.
        self._http = DefaultHttpxClient(trust_env=False, timeout=600)
        self._openai = OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            http_client=self._http,
            max_retries=0,
        )
        self.model = self._openai.models.list().data[0].id

    def __enter__(self) -> "ChatClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._http.close()

    def ask(
        self, messages: Sequence[Message], max_tokens: int, salt: str = ""
    ) -> Answer:
        """Streams one greedy answer of exactly `max_tokens` tokens.

        Args:
            messages: the conversation so far.
            max_tokens: how many.
            salt: only requests with the same one share prefixes.

        """
        request: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "max_tokens": max_tokens,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "extra_body": {
                "ignore_eos": True,
                "return_token_ids": True,
                # The first releases name them in place of the tokens of logprobs.
                "return_tokens_as_token_ids": True,
                **({"cache_salt": salt} if salt else {}),
            },
        }
        text = ""
        token_ids: list[int] = []
        logprobs: list[float] = []
        margins: list[float] = []
        usage = None
        ttft_ms = 0.0
        start = time.perf_counter()
        for chunk in self._openai.chat.completions.create(**request):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                scored = (choice.logprobs and choice.logprobs.content) or []
                tokens = (choice.model_extra or {}).get("token_ids") or [
                    int(each.token.removeprefix("token_id:")) for each in scored
                ]
                if tokens and not token_ids:
                    ttft_ms = 1000 * (time.perf_counter() - start)
                token_ids += tokens
                text += choice.delta.content or ""
                for token in scored:
                    best, second = (top.logprob for top in token.top_logprobs[:2])
                    logprobs.append(token.logprob)
                    margins.append(best - second)
        if usage is None or len(token_ids) != max_tokens:
            raise RuntimeError(
                f"{self.url} ended its answer after {len(token_ids)} of {max_tokens} "
                f"tokens, {'with' if usage else 'without'} a usage record"
            )
        details = usage.prompt_tokens_details
        return Answer(
            text=text,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            margins=tuple(margins),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(details and details.cached_tokens) or 0,
            ttft_ms=ttft_ms,
        )

    def metrics(self) -> "Metrics":
        """The server's metrics now."""
        response = self._http.get(f"{self.url}/metrics")
        response.raise_for_status()
        return Metrics(response.text)


class Metrics:
    """One reading of a server's Prometheus page."""

    def __init__(self, page: str) -> None:
        self._samples = [
            sample
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        ]

    def value(self, name: str) -> int:
        """The sum over all engines of a counter or gauge.

        Raises:
            LookupError: the server has no such metric.

        """
        values = [sample.value for sample in self._samples if sample.name == name]
        if not values:
            raise LookupError(
                f"the server's /metrics has no {name}: is this vLLM the patched "
                "build, served with `--kv-offloading-backend core`?"
            )
        return round(sum(values))

    def label(self, name: str, label: str) -> str:
        """A label of an info metric.

        Raises:
            LookupError: the server has no such metric or label.

        """
        for sample in self._samples:
            if sample.name == name and label in sample.labels:
                return sample.labels[label]
        raise LookupError(f"the server's /metrics has no {name} with {label}")
