# SPDX-License-Identifier: Apache-2.0
"""Watches what hints do, and knows by itself what they may."""

from collections.abc import Callable, Hashable
from typing import Any

from vllm.v1.kv_tier.eviction.hinted import Hinted
from vllm.v1.kv_tier.hints.tracker import ConversationTracker

from .content import Violation


class WatchedHints:
    """Sees whose blocks are released, and which slots make room.

    Args:
        releasing: Follows the requests of the engine.

    """

    def __init__(self, releasing: ConversationTracker) -> None:
        self._releasing = releasing
        self._watched: Hinted | None = None
        # By key, for blocks that one conversation has computed: who has used it since.
        self._users: dict[Hashable, set[Hashable]] = {}
        self._watch_uses()

    def _watch_uses(self) -> None:
        releasing, users = self._releasing, self._users
        computed, hit = releasing._sole_users.record_computed, releasing.on_hit
        put_first = releasing._put_first

        def watched_computed(key: Hashable, owner: Hashable) -> None:
            if key not in releasing._sole_users:
                # Of too many owners the oldest are forgotten.
                users.pop(key, None)
            computed(key, owner)
            users.setdefault(key, set()).add(owner)
            self._begin_anew(key)

        def watched_hit(request: Any, used: Any) -> None:
            hit(request, used)
            speaks = releasing.has_hints(request)
            speaker = releasing.follow(request) if speaks else None
            user = None if speaker is None else speaker.owner
            for key in used.keys:
                if key in users:
                    users[key].add(user)
                    self._begin_anew(key)

        def watched_put_first(owner: bytes, keys: Any) -> None:
            for key in keys:
                if users.get(key) != {owner}:
                    raise Violation("released", f"{key!r} is not only of {owner!r}")
            put_first(owner, keys)
            # What its requests still use is the conversation's until they end.
            for key in keys:
                if key not in releasing._sole_users:
                    del users[key]

        releasing._sole_users.record_computed = watched_computed  # type: ignore[method-assign]
        releasing.on_hit = watched_hit  # type: ignore[method-assign]
        releasing._put_first = watched_put_first  # type: ignore[method-assign]

    def _begin_anew(self, key: Hashable) -> None:
        """Nobody owns what several have used."""
        if len(self._users[key]) > 1:
            del self._users[key]

    def watch(self, hinted: Hinted) -> None:
        """From now on, which slots make room; call it in each step."""
        if self._watched is not None:
            return
        self._watched = hinted
        evict = hinted.evict

        def watched(is_pinned: Callable[[Hashable], bool]) -> Hashable | None:
            expired = {key for key in hinted._kept if self._has_expired(key)}
            victim = evict(is_pinned)
            if expired and victim not in expired:
                raise Violation("hints", f"{victim!r} goes, {expired} have expired")
            return victim

        hinted.evict = watched  # type: ignore[method-assign]

    def _has_expired(self, key: Hashable) -> bool:
        assert self._watched is not None
        about = self._watched._hints.about(key)
        return about is not None and about.until <= self._watched._hints.clock()
