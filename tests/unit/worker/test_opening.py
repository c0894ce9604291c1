# SPDX-License-Identifier: Apache-2.0
"""Which objects below the host are a rank's own, and which it has in common."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace as Bag
from typing import Any

import torch

from vllm.v1.kv_tier.stores.base import ReadOnlyStore
from vllm.v1.kv_tier.stores.fs import FsConfig
from vllm.v1.kv_tier.stores.mooncake import MooncakeConfig, MooncakeDebug
from vllm.v1.kv_tier.worker.secondary import common_objects, open_rank

from ..stores.test_identity import NUM_BLOCKS, WORKERS, worker


def opened(rank: int, replicas: int, group_bytes: Sequence[int] = ()) -> Any:
    """The store of a rank: its name, its number, and what it was opened from."""
    stores: list[Any] = []
    checked: list[int] = []
    entry = Bag(open=lambda name, rank, num_bytes: (name, rank, "writer"))
    entry.check = lambda: checked.append(rank)
    entry.of_a_reader = lambda: Bag(open=lambda name, rank, _: (name, rank, "reader"))
    wrapper = Bag(
        kv_tier=Bag(
            buffer=Bag(slots=torch.zeros(2, 8)),
            slots=Bag(group_bytes=group_bytes),
            open_secondary=stores.extend,
        ),
        worker=worker(),
        rpc_rank=0,
    )
    wrapper.worker.rank = rank
    entries: Any = [entry]
    name, _ = open_rank(wrapper, entries, "ab", NUM_BLOCKS, replicas)
    (store,) = stores
    # Its machine may be another one than the scheduler's.
    assert checked == [rank]
    if isinstance(store, ReadOnlyStore):
        store = store._store
        assert store[2] == "reader"  # type: ignore[index]
    else:
        assert store[2] == "writer"
    assert store[0] == name  # type: ignore[index]
    return store


def test_ranks_of_several_machines_have_objects_of_their_own() -> None:
    """Executors number the workers of each machine from 0 on."""
    (first, rank, _), (other, other_rank, _) = opened(0, 1), opened(2, 1)
    assert first != other and (rank, other_rank) == (0, 2)


def test_ranks_whose_groups_need_other_bytes_have_other_objects() -> None:
    names = [opened(0, 1, sizes)[0] for sizes in ((), (8, 4), (8, 5), (8, 4))]
    assert len({*names}) == 3 and names[1] == names[3]


def test_ranks_that_hold_the_same_have_objects_in_common() -> None:
    stores = [opened(rank, 2) for rank in range(4)]
    assert [store[1:] for store in stores] == [
        (0, "writer"),
        (0, "reader"),
        (2, "writer"),
        (2, "reader"),
    ]
    names = [store[0] for store in stores]
    assert names[0] == names[1] != names[2] == names[3]


def test_ranks_have_objects_in_common_if_they_name_them_alike() -> None:
    alike, other = worker(), WORKERS["attention backend"]()

    def common(workers: list[Bag], told: int) -> int:
        wrappers = [Bag(worker=each, kv_tier=None) for each in workers]

        def collective_rpc(method: Callable[..., Any], args: tuple) -> list[Any]:
            return [method(wrapper, *args) for wrapper in wrappers]

        return common_objects(Bag(collective_rpc=collective_rpc), NUM_BLOCKS, told)

    assert common([alike] * 4, 4) == 4
    # Stages may differ.
    assert common([alike, alike, other, other], 2) == 2
    assert common([alike, alike, other, other], 4) == 1
    assert common([alike, other], 2) == 1
    assert common([alike] * 3, 2) == 1
    assert common_objects(None, NUM_BLOCKS, 1) == 1


def test_a_rank_that_reads_only_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o700)
    entry = FsConfig(root_dir=str(tmp_path / "kv"), max_gib=0.001)
    writer = entry.open("ab", 0, 4)
    reader = ReadOnlyStore(entry.open("ab", 0, 4))
    rows = [memoryview(bytearray(b"kept"))]
    assert reader.put([b"key"], rows) == [True]
    assert reader.exists([b"key"]) == reader.get([b"key"], rows) == [False]
    assert writer.put([b"key"], rows) == [True]
    place = memoryview(bytearray(4))
    assert reader.exists([b"key"]) == reader.get([b"key"], [place]) == [True]
    assert place == rows[0]
    reader.delete([b"key"])
    assert writer.exists([b"key"]) == [True]
    reader.close()
    writer.close()


def test_one_rank_of_a_group_gives_memory_to_mooncake() -> None:
    entry = MooncakeConfig(master="a:1", debug=MooncakeDebug(global_segment_gib=2))
    assert entry.of_a_reader() == MooncakeConfig(master="a:1")
