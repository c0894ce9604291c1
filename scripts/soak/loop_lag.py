# SPDX-License-Identifier: Apache-2.0
"""How long the event loop of an API server is blocked at a stretch.

    vllm serve … --middleware soak.loop_lag.LoopLag

`GET /loop_lag` answers with the longest stretch since the last call, in milliseconds.
"""

import asyncio
from time import perf_counter, process_time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/loop_lag"
_BEAT_S = 0.001


async def stretch(beat_s: float = _BEAT_S) -> float:
    """Sleep for `beat_s`. Returns for how many seconds longer the loop was blocked.

    That is at most the processor time that the process used meanwhile, in all of its
    threads: a thread that keeps the interpreter lock blocks the loop, and what other
    processes of the machine take does not count.
    """
    begin, used = perf_counter(), process_time()
    await asyncio.sleep(beat_s)
    return min(perf_counter() - begin - beat_s, process_time() - used)


class LoopLag:
    """ASGI middleware that answers `PATH`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._beats: asyncio.Task[None] | None = None
        self._longest = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and start the beats."""
        if self._beats is None:
            self._beats = asyncio.create_task(self._beat())
        if scope["type"] == "http" and scope["path"] == PATH:
            answer = JSONResponse({"longest_ms": 1e3 * self._longest})
            self._longest = 0.0
            return await answer(scope, receive, send)
        await self._app(scope, receive, send)

    async def _beat(self) -> None:
        while True:
            # A request may set it back meanwhile.
            last = await stretch()
            self._longest = max(self._longest, last)
