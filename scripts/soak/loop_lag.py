# SPDX-License-Identifier: Apache-2.0
"""How long the event loop of an API server is busy at a stretch.

    vllm serve … --middleware soak.loop_lag.LoopLag

`GET /loop_lag` answers with the longest stretch since the last call, in milliseconds of
the loop's own thread, so that other processes of the machine do not count.
"""

import asyncio
from time import thread_time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/loop_lag"
_BEAT_S = 0.001


class LoopLag:
    """ASGI middleware that answers `PATH`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._beats: asyncio.Task[None] | None = None
        self._longest = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, and see to the beats."""
        if self._beats is None:
            self._beats = asyncio.create_task(self._beat())
        if scope["type"] == "http" and scope["path"] == PATH:
            answer = JSONResponse({"longest_ms": 1e3 * self._longest})
            self._longest = 0.0
            return await answer(scope, receive, send)
        await self._app(scope, receive, send)

    async def _beat(self) -> None:
        while True:
            begin = thread_time()
            await asyncio.sleep(_BEAT_S)
            self._longest = max(self._longest, thread_time() - begin)
