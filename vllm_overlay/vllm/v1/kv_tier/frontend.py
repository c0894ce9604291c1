# SPDX-License-Identifier: Apache-2.0
"""Accepts hints over HTTP, from Python, and in upstream's envelope, and changes of the
host's size."""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_tier import releases
from vllm.v1.kv_tier.hints.conversation_api import check, tell_all, tell_one
from vllm.v1.kv_tier.hints.schema import (
    KEY,
    VERSION,
    Hints,
    for_tier,
    request_context,
    shown,
)
from vllm.v1.kv_tier.layout import BACKEND

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)

PARAMS = "kv_transfer_params"
ACTION = KEY
"""`action_type` of the tier's actions in upstream's `KvHintsEnvelope`."""


class HintError(releases.VLLMValidationError, ValueError):
    """A hint is not as the schema says.

    The class marks it as the client's fault: newer releases answer a plain ValueError
    with status 500.
    """


def with_hints(
    vllm_config: "VllmConfig", params: Any, envelope: Any | None = None
) -> Any:
    """The parameters of a request with all of its hints.

    `kv_transfer_params.kv_tier` overrides the envelope, which overrides fields of other
    APIs.

    Args:
        vllm_config: Settings of the engine. Without the tier this does nothing.
        params: Parameters of the request; not changed.
        envelope: Upstream's `KvHintsEnvelope`, if the request has one.

    Raises:
        HintError: A hint does not match the schema. The message has field, value and
            fix; upstream answers with status 400.

    """
    if releases.offloading_backend(vllm_config) != BACKEND:
        return params
    if not isinstance(params, SamplingParams):
        return params
    extra = params.extra_args or {}
    given, said = extra.get(PARAMS), request_context.get()
    try:
        # The middleware has checked HTTP requests, except for bodies that only Python
        # reads.
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


def from_envelope(envelope: Any) -> dict[str, Any]:
    """Hints in upstream's `KvHintsEnvelope`, as fields of the schema.

    The tier's actions have type `ACTION`, and the fields of
    `kv_transfer_params.kv_tier` as payload. Other actions are ignored.

    Raises:
        ValueError: A payload does not match the schema, or has another version.

    """
    hints: dict[str, Any] = {}
    for action in envelope.actions if envelope is not None else ():
        if action.action_type != ACTION:
            continue
        name = action.action_id
        if action.action_version != str(VERSION):
            raise ValueError(
                f"kv_hints: action {shown(name)}: action_version must be '{VERSION}', "
                f"got {shown(action.action_version)}."
            )
        payload = {} if action.payload is None else action.payload
        try:
            Hints.from_params({KEY: payload})
        except ValueError as e:
            raise ValueError(f"kv_hints: action {shown(name)}: {e}") from None
        hints.update(payload)
    return hints


def add_hint_routes(app: Any, args: Any) -> None:
    """Add the middleware and the routes, if the engine has a tier.

    The route that changes the size is one of upstream's development mode, as those that
    reset caches.

    Args:
        app: Upstream's FastAPI application, without middleware yet.
        args: The parsed command line.

    """
    if releases.offloading_backend(args) != BACKEND:
        return
    from vllm.v1.kv_tier.hints.http import (
        AFTERWARDS,
        HintsOfRequests,
        serve_conversation_hints,
    )

    app.add_middleware(HintsOfRequests)
    app.add_api_route(AFTERWARDS, serve_conversation_hints, methods=["POST"])
    if envs.VLLM_SERVER_DEV_MODE:
        from vllm.v1.kv_tier import host_size_api as api

        app.add_api_route(api.PATH, api.serve_host_size, methods=["POST"])


def send_hints(llm: Any, hints: Mapping[str, Any]) -> dict[str, int]:
    """Give an `LLM` a hint about a conversation after its requests.

    Args:
        llm: An `LLM` with the tier.
        hints: As the body of `POST /v1/kv_tier/hints`.

    Returns:
        Counts: `released_blocks`, `running_requests` and `engines`.

    Raises:
        ValueError: The hint is invalid, or there is no tier. The message has field,
            value and fix.

    """
    _check_tier(llm.llm_engine.vllm_config)
    return tell_one(llm.llm_engine, check(hints))


async def send_hints_async(llm: Any, hints: Mapping[str, Any]) -> dict[str, int]:
    """As `send_hints`, for all engines of an `AsyncLLM`."""
    _check_tier(llm.vllm_config)
    return await tell_all(llm, check(hints))


def set_host_size(llm: Any, gib: float) -> dict[str, int]:
    """Change the size of the host tier of an `LLM`, within what it reserved.

    Its memory follows while the engine runs.

    Args:
        llm: An `LLM` with the tier.
        gib: GiB of host memory for all ranks together, at most `kv_offloading_size`.

    Returns:
        `host_slots` that it should have, `open_slots` that it has now, and `engines`.

    Raises:
        ValueError: The engine cannot have that size, or there is no tier. The message
            has the value and the fix.

    """
    from vllm.v1.kv_tier.host_size_api import answer, check

    vllm_config = llm.llm_engine.vllm_config
    _check_tier(vllm_config, "Host sizes")
    return answer(tell_one(llm.llm_engine, check({"gib": gib}, vllm_config)))


def _check_tier(vllm_config: "VllmConfig", what: str = "Hints") -> None:
    backend = vllm_config.cache_config.kv_offloading_backend
    if backend != BACKEND:
        raise ValueError(
            f"{what} need --kv-offloading-backend {BACKEND}, but the backend is "
            f"{backend!r}. Start the engine with it, or send no hints."
        )
