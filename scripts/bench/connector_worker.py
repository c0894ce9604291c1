# SPDX-License-Identifier: Apache-2.0
"""What the worker side of upstream's offloading connectors reports, without copies.

Every transfer of a step is reported complete with the output of the step after: the
earliest that a worker which copies beside the forward pass can be sure of.
"""

from collections.abc import Callable, Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, LoadStoreSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import (
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
)


class ConnectorWorker:
    """Completes transfers one step late.

    Attributes:
        num_loaded: Blocks that the last step loads.
        num_stored: Blocks that the last step stores.

    """

    def __init__(self) -> None:
        self.num_loaded = 0
        self.num_stored = 0
        self._due: KVConnectorOutput | None = None

    def step(self, metadata: KVConnectorMetadata) -> KVConnectorOutput | None:
        """Take the transfers of a step; return the report on the step before."""
        report, self._due = self._due, _HANDLERS[type(metadata)](self, metadata)
        return report

    def _simple_cpu(self, metadata: SimpleCPUOffloadMetadata) -> KVConnectorOutput:
        self.num_loaded = len(metadata.load_gpu_blocks)
        self.num_stored = len(metadata.store_gpu_blocks)
        loaded = metadata.load_event_to_reqs.get(metadata.load_event)
        stored = None
        if metadata.store_event >= 0:
            stored = SimpleCPUOffloadWorkerMetadata({metadata.store_event: 1})
        return KVConnectorOutput(
            finished_recving=set(loaded) if loaded else None,
            kv_connector_worker_meta=stored,
        )

    def _offloading(self, metadata: OffloadingConnectorMetadata) -> KVConnectorOutput:
        loads, stores = metadata.load_jobs.values(), metadata.store_jobs.values()
        self.num_loaded = _num_blocks(job.dst_spec for job in loads)
        self.num_stored = _num_blocks(job.src_spec for job in stores)
        done = OffloadingWorkerMetadata()
        for job_id in (*metadata.load_jobs, *metadata.store_jobs):
            done.mark_completed(job_id)
        return KVConnectorOutput(
            finished_recving={job.req_id for job in loads} or None,
            kv_connector_worker_meta=done if done.completed_jobs else None,
        )


def _num_blocks(specs: Iterable[LoadStoreSpec]) -> int:
    return sum(
        len(spec.block_ids) for spec in specs if isinstance(spec, BlockIDsLoadStoreSpec)
    )


_HANDLERS: dict[type, Callable[..., KVConnectorOutput]] = {
    SimpleCPUOffloadMetadata: ConnectorWorker._simple_cpu,
    OffloadingConnectorMetadata: ConnectorWorker._offloading,
}
