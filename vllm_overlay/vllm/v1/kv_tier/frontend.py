# SPDX-License-Identifier: Apache-2.0
"""Where hints come in: over HTTP, from Python, and in upstream's envelope."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.api.afterwards import check, tell_all, tell_one
from vllm.v1.kv_tier.api.heard import heard
from vllm.v1.kv_tier.api.translation import from_envelope
from vllm.v1.kv_tier.config import BACKEND
from vllm.v1.kv_tier.hints import KEY, Hints, for_tier

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

PARAMS = "kv_transfer_params"


class HintError(releases.VLLMValidationError, ValueError):
    """A hint is not as the schema says.

    It is the client's fault. Newer releases tell that by the class, and answer a plain
    ValueError with a status of 500.
    """


def with_hints(
    vllm_config: "VllmConfig", params: Any, envelope: Any | None = None
) -> Any:
    """The parameters of a request with all that was said of its KV.

    What the client says in `kv_transfer_params.kv_tier` counts more than the envelope,
    and that more than fields of other APIs.

    Args:
        vllm_config: Settings of the engine. Does nothing when its tier is off.
        params: Of the request; not changed.
        envelope: Upstream's `KvHintsEnvelope`, if the request has one.

    Raises:
        HintError: A hint is not as the schema says. The message names field, value
            and mend; upstream makes an HTTP status 400 of it.

    """
    if releases.offloading_backend(vllm_config) != BACKEND:
        return params
    if not isinstance(params, SamplingParams):
        return params
    extra = params.extra_args or {}
    given, said = extra.get(PARAMS), heard.get()
    try:
        # Over HTTP that was checked before, but for bodies that only Python reads.
        if not isinstance(given, dict) or said.checked != for_tier(given):
            Hints.from_params(given)
        envelope_hints = from_envelope(envelope)
    except ValueError as e:
        raise HintError(str(e)) from None
    if given is None:
        given = {}
    own = given.get(KEY) or {}
    hints = {**said.hints, **envelope_hints, **own}
    prewarms = hints.get("prewarm", False)
    if hints == own and not prewarms:
        return params
    logger.debug("KV tier: a request says %s.", hints)
    params = copy.copy(params)
    params.extra_args = {**extra, PARAMS: {**given, KEY: hints}}
    if prewarms:
        params.max_tokens, params.min_tokens = 1, 0
    return params


def add_hint_doors(app: Any, args: Any) -> None:
    """Let a FastAPI application read hints, if its engine has a tier.

    Args:
        app: Upstream's, with no middleware yet.
        args: The parsed command line.

    """
    if releases.offloading_backend(args) != BACKEND:
        return
    from vllm.v1.kv_tier.api.http import AFTERWARDS, HintsOfRequests, hear_afterwards

    app.add_middleware(HintsOfRequests)
    app.add_api_route(AFTERWARDS, hear_afterwards, methods=["POST"])


def tell(llm: Any, hints: Mapping[str, Any]) -> dict[str, int]:
    """Say something of a conversation of an `LLM` after its requests.

    Args:
        llm: An `LLM` with the tier.
        hints: As the body of `POST /v1/kv_tier/hints`.

    Returns:
        Counts, as that has them: `released_blocks`, `running_requests`, `engines`.

    Raises:
        ValueError: They are not understood, or there is no tier. The message names
            field, value and mend.

    """
    _check_tier(llm.llm_engine.vllm_config)
    return tell_one(llm.llm_engine, check(hints))


async def tell_async(llm: Any, hints: Mapping[str, Any]) -> dict[str, int]:
    """As `tell`, for an `AsyncLLM`, and for all of its engines."""
    _check_tier(llm.vllm_config)
    return await tell_all(llm, check(hints))


def _check_tier(vllm_config: "VllmConfig") -> None:
    backend = vllm_config.cache_config.kv_offloading_backend
    if backend != BACKEND:
        raise ValueError(
            f"Hints need --kv-offloading-backend {BACKEND}, but the backend is "
            f"{backend!r}."
        )
