# SPDX-License-Identifier: Apache-2.0
"""Faults of a server that a test of hostile clients must notice."""

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "X-Planted"
LEAK, ERROR = "leak", "error"
LEAK_BYTES = 1 << 18


class Planted:
    """ASGI middleware with the fault that a request asks for in `HEADER`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._kept: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or keep memory for it, or answer with 500."""
        headers = dict(scope.get("headers", ()))
        planted = headers.get(HEADER.lower().encode(), b"").decode()
        if planted == LEAK:
            self._kept.append(b"k" * LEAK_BYTES)
        if planted == ERROR:
            return await JSONResponse({}, 500)(scope, receive, send)
        await self._app(scope, receive, send)
