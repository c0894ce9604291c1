# SPDX-License-Identifier: Apache-2.0
"""How fast are the tier's copy engines on this machine's GPU?

    python scripts/bench/copy_rate.py --out DIR

Moves random blocks of 32 regions to random slots and back, for each size of a piece (a
block of one region) and each engine, and compares with plain copies of as many bytes
between pinned memory and the device. `auto` is what the tier chooses at start for
copies beside compute. `both` is the sum of loads and stores that run at once. Copies
are launched in chunks of 64 MiB, as the tier does where no step waits, one direction
after the other from one thread. Every number is the median of some runs.

Before its rates are taken, every engine proves that it moves the right bytes: random
slots to poisoned blocks and on to poisoned slots, and nothing else is written.

The last table is the time that the worker spends on a load of 16,384 tokens of an
8B-shape Llama: 32 regions, 1,024 blocks, 64 KiB; at once, and in 16 parts, as layers
wait for them. Results go to DIR as JSON lines and markdown. Without a GPU the script
rehearses with the only engine there is.
"""

import argparse
import contextlib
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from copy_rate_table import HEADER, Row, bars

from vllm.v1.kv_tier.copying.calibrate import ENGINES, choose_engines
from vllm.v1.kv_tier.copying.engine import CopyEngine, CopyEngineUnavailable, Transfer
from vllm.v1.kv_tier.memory.buffer import HostBuffer, shared_buffer
from vllm.v1.kv_tier.memory.regions import Region
from vllm.v1.kv_tier.memory.shared import SharedMemory

GiB, KiB = 1 << 30, 1 << 10
REGIONS = 32
SIZES = [4, 8, 16, 32, 64, 128, 256]
# Enough for a steady rate, where pieces are so small that each costs more than its
# bytes.
MAX_PIECES = 1 << 17
CHECKED_BYTES = 32 << 20
CHUNK_BYTES = 64 << 20
PARTS = 16
PROMPT_TOKENS, BLOCK_TOKENS, PROMPT_PIECE = 16384, 16, 64 * KiB

Maker = Callable[[Sequence[Region], torch.Tensor], CopyEngine]


class Bench:
    """The memory that all measurements share, and two streams.

    Args:
        device: Where the regions are.
        num_bytes: What is moved in one direction at a time, at most. Device and host
            memory are twice as large.
        repeats: Runs of which the median is taken.
        memory_file: Host memory that other processes can map.

    """

    def __init__(
        self,
        device: torch.device,
        num_bytes: int,
        repeats: int,
        memory_file: bool = False,
    ) -> None:
        self.device = device
        self.num_bytes = num_bytes
        self.repeats = repeats
        self.on_gpu = device.type == "cuda"
        # One slot: plain copies must not cross from one registration to the next.
        if memory_file:
            memory = SharedMemory.create(1, 2 * num_bytes, num_ranks=1)
            self.buffer = shared_buffer(memory, 1, device, nodes=set())
        else:
            self.buffer = HostBuffer(1, 2 * num_bytes, pin=self.on_gpu)
        self.host = self.buffer.slots.view(-1)
        self.memory = torch.zeros(2 * num_bytes, dtype=torch.uint8, device=device)
        self.load_stream, self.store_stream = (
            torch.cuda.Stream(device) if self.on_gpu else None for _ in range(2)
        )
        self._plain: dict[int, tuple[float, float, float]] = {}

    def layout(self, piece: int, num_blocks: int) -> tuple[list[Region], torch.Tensor]:
        """Regions and slots of one number of blocks, at the start of the memory.

        As in vLLM, one region follows the other in one allocation.
        """
        size = num_blocks * piece
        rows = self.memory[: REGIONS * size].view(REGIONS, num_blocks, piece)
        slots = self.host[: REGIONS * size].view(num_blocks, REGIONS * piece)
        return [Region(rows[i]) for i in range(REGIONS)], slots

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def on(self, stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager:
        return torch.cuda.stream(stream) if stream else contextlib.nullcontext()

    def seconds(self, launch: Callable[[], None]) -> float:
        """Until all is copied. The first run does not count."""
        times = []
        for _ in range(1 + self.repeats):
            self.synchronize()
            started = time.perf_counter()
            launch()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def plain(self, num_bytes: int) -> tuple[float, float, float]:
        """Bytes per second of one large copy: load, store, both of them at once."""
        if num_bytes not in self._plain:
            half = self.num_bytes

            def load() -> None:
                with self.on(self.load_stream):
                    self.memory[:num_bytes].copy_(
                        self.host[:num_bytes], non_blocking=True
                    )

            def store() -> None:
                with self.on(self.store_stream):
                    self.host[half : half + num_bytes].copy_(
                        self.memory[half : half + num_bytes], non_blocking=True
                    )

            def both() -> None:
                load()
                store()

            self._plain[num_bytes] = (
                num_bytes / self.seconds(load),
                num_bytes / self.seconds(store),
                2 * num_bytes / self.seconds(both),
            )
        return self._plain[num_bytes]

    def check(self, make: Maker, piece: int) -> bool:
        """Whether bytes come back from a trip, and no others are written."""
        n = max(1, min(CHECKED_BYTES, self.num_bytes) // (REGIONS * piece))
        regions, slots = self.layout(piece, 2 * n)
        rng = np.random.default_rng(piece)
        content = torch.from_numpy(
            rng.integers(0, 256, (n, slots.shape[1]), dtype=np.uint8)
        )
        slots[:n], slots[n:] = content, 0xA5
        everything = range(REGIONS)
        blocks = rng.permutation(2 * n)[:n]
        order = rng.permutation(n)
        for region in regions:
            region.blocks.fill_(0x5A)
        self.synchronize()
        engine = make(regions, slots)
        with self.on(self.load_stream):
            engine.loads(order.tolist(), blocks.tolist()).copy(everything)
        self.synchronize()
        loaded = content[order].view(n, REGIONS, piece)
        equal = True
        for i, region in enumerate(regions):
            wanted = torch.full((2 * n, piece), 0x5A, dtype=torch.uint8)
            wanted[blocks] = loaded[:, i]
            equal &= torch.equal(region.blocks.cpu(), wanted)
        with self.on(self.store_stream):
            engine.stores(blocks.tolist(), (n + order).tolist()).copy(everything)
        self.synchronize()
        return equal and all(torch.equal(half, content) for half in slots.split(n))

    def transfers(
        self, loads: CopyEngine, stores: CopyEngine, num_pairs: int, piece: int
    ) -> tuple[list[Transfer], list[Transfer]]:
        """Loads within one half of blocks and slots, stores within the other."""
        half = loads.slots.shape[0] // 2
        rng = np.random.default_rng(0)
        a, b, c, d = (rng.permutation(half)[:num_pairs] for _ in range(4))
        size = max(1, CHUNK_BYTES // (REGIONS * piece))
        chunks = [slice(i, i + size) for i in range(0, num_pairs, size)]
        with self.on(self.load_stream):
            load = [loads.loads(a[i].tolist(), b[i].tolist()) for i in chunks]
        with self.on(self.store_stream):
            store = [
                stores.stores((half + c[i]).tolist(), (half + d[i]).tolist())
                for i in chunks
            ]
        return load, store

    def rates(
        self, loads: CopyEngine, stores: CopyEngine, piece: int
    ) -> tuple[float, float, float]:
        """Bytes per second as of `plain`. One direction alone moves half as much."""
        num_pairs = loads.slots.shape[0] // 2
        half = max(1, num_pairs // 2)
        load, store = self.transfers(loads, stores, half, piece)
        both = self.transfers(loads, stores, num_pairs, piece)

        def run(load: Sequence[Transfer], store: Sequence[Transfer]) -> None:
            for one, other in itertools.zip_longest(load, store):
                if one:
                    with self.on(self.load_stream):
                        one.copy(range(REGIONS))
                if other:
                    with self.on(self.store_stream):
                        other.copy(range(REGIONS))

        block_bytes = REGIONS * piece
        return (
            half * block_bytes / self.seconds(lambda: run(load, [])),
            half * block_bytes / self.seconds(lambda: run([], store)),
            2 * num_pairs * block_bytes / self.seconds(lambda: run(*both)),
        )

    def worker_ms(self, engine: CopyEngine, num_blocks: int) -> dict[str, float]:
        """What a load costs the thread that asks for it, in milliseconds."""
        rng = np.random.default_rng(0)
        slots, blocks = (rng.permutation(num_blocks).tolist() for _ in range(2))
        rows = REGIONS // PARTS
        parts = [range(i, i + rows) for i in range(0, REGIONS, rows)]
        found: dict[str, list[float]] = {
            "plan": [],
            "launch": [],
            "launch in parts": [],
        }
        for _ in range(1 + self.repeats):
            with self.on(self.load_stream):
                for name, ranges in (
                    ("launch", [range(REGIONS)]),
                    ("launch in parts", parts),
                ):
                    self.synchronize()
                    started = time.perf_counter()
                    transfer = engine.loads(slots, blocks)
                    planned = time.perf_counter()
                    for regions in ranges:
                        transfer.copy(regions)
                    launched = time.perf_counter()
                    found["plan"].append(1e3 * (planned - started))
                    found[name].append(1e3 * (launched - planned))
        self.synchronize()
        return {name: statistics.median(times[1:]) for name, times in found.items()}


def available_engines(bench: Bench) -> dict[str, Maker]:
    """What runs here; says why the others do not."""
    regions, slots = bench.layout(64 * KiB, 1)
    found = {}
    for name, kind in ENGINES.items():
        if kind.needs_gpu is not bench.on_gpu:
            continue
        try:
            kind.make(regions, slots)
            found[name] = kind.make
        except CopyEngineUnavailable as e:
            print(f"{name}: {e}")
    return found


def measure_rates(
    bench: Bench, sizes: Sequence[int], engines: dict[str, Maker]
) -> Iterator[Row]:
    for kib in sizes:
        piece = kib * KiB
        num_pairs = max(1, min(bench.num_bytes // piece, MAX_PIECES) // REGIONS)
        regions, slots = bench.layout(piece, 2 * num_pairs)
        plain = bench.plain(num_pairs * REGIONS * piece)
        for name, make in engines.items():
            equal = bench.check(make, piece)
            engine = make(regions, slots)
            yield Row(kib, name, equal, bench.rates(engine, engine, piece), plain)
        auto = choose_engines(regions, slots, "auto", bench.device, bench.buffer.pinned)
        rates = bench.rates(auto.loads, auto.stores, piece)
        yield Row(kib, "auto", None, rates, plain)


def measure_worker(bench: Bench, engines: dict[str, Maker]) -> Iterator[dict[str, Any]]:
    num_blocks = PROMPT_TOKENS // BLOCK_TOKENS
    num_blocks = min(num_blocks, 2 * bench.num_bytes // (REGIONS * PROMPT_PIECE))
    regions, slots = bench.layout(PROMPT_PIECE, num_blocks)
    auto = choose_engines(regions, slots, "auto", bench.device, bench.buffer.pinned)
    made = {name: make(regions, slots) for name, make in engines.items()}
    made |= {"auto, a step waits": auto.step_loads, "auto, ahead": auto.loads}
    for name, engine in made.items():
        ms = {k: round(v, 3) for k, v in bench.worker_ms(engine, num_blocks).items()}
        yield {"engine": name, "blocks": num_blocks, "worker_ms": ms}


def versions(device: torch.device) -> dict[str, Any]:
    gpu = device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if gpu else platform.machine(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gib", type=float, help="moved in each direction at once")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="in KiB")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--memory-file",
        action="store_true",
        help="host memory as processes of stores map it",
    )
    args = parser.parse_args()
    # The copies of a rehearsal are not worth a thread.
    torch.set_num_threads(1)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else None
    started = time.perf_counter()
    num_bytes = int((args.gib or (2 if gpu else 1 / 32)) * GiB)
    device = device or torch.device("cpu")
    bench = Bench(device, num_bytes, args.repeats, args.memory_file)
    if gpu and not bench.buffer.pinned:
        print("The driver refused to pin host memory: see above.", file=sys.stderr)
        return 1
    engines = available_engines(bench)
    args.out.mkdir(parents=True, exist_ok=True)

    lines = [HEADER]
    print(HEADER, flush=True)
    rows, records = [], [versions(bench.device)]
    for row in measure_rates(bench, args.sizes, engines):
        rows.append(row)
        records.append(row.record())
        lines.append(row.markdown())
        print(lines[-1], flush=True)
    rest = ["", "| bar | measured |", "|---|---|"]
    rest += [f"| {bar} | {measured} |" for bar, measured in bars(rows)]
    rest += ["", "| engine | plan, ms | launch, ms | launch in 16 parts, ms |"]
    rest += ["|---|---|---|---|"]
    for record in measure_worker(bench, engines):
        records.append(record)
        cells = " | ".join(f"{ms:.2f}" for ms in record["worker_ms"].values())
        rest.append(f"| {record['engine']} | {cells} |")
    rest += ["", f"{records[0]}, {time.perf_counter() - started:.0f} s"]
    print("\n".join(rest))

    (args.out / "copy_rate.md").write_text("\n".join([*lines, *rest]) + "\n")
    with (args.out / "copy_rate.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    if wrong := [row for row in rows if row.equal is False]:
        print(f"{len(wrong)} rows moved wrong bytes")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
