# SPDX-License-Identifier: Apache-2.0
"""A KV connector whose other side has the KV of some prompts, and loads it in the step
that admits their requests."""

from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class RemoteLoad(NamedTuple):
    """Positions of a request whose KV comes from the other side."""

    req_id: str
    start: int
    end: int


@dataclass
class RemoteLoads(KVConnectorMetadata):
    loads: list[RemoteLoad] = field(default_factory=list)


class Remote(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side. `ForwardPasses` writes what is loaded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._rng = Random(extra["seed"])
        self._alignment = extra["alignment"]
        self._found: dict[str, tuple[int, int]] = {}
        self._metadata = RemoteLoads()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        end = (request.num_tokens - 1) // self._alignment * self._alignment
        if end <= num_computed_tokens or self._rng.random() < 0.7:
            return 0, False
        self._found[request.request_id] = num_computed_tokens, end
        return end - num_computed_tokens, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            found = self._found.pop(request.request_id)
            self._metadata.loads.append(RemoteLoad(request.request_id, *found))

    def build_connector_meta(self, scheduler_output: Any) -> RemoteLoads:
        metadata, self._metadata = self._metadata, RemoteLoads()
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...
