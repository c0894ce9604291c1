# SPDX-License-Identifier: Apache-2.0
"""All cells of one configuration, in a process of its own.

`compare.py` starts it. The engine core is a child of this process, as it is in
`vllm serve`; times are taken here, where the tokens arrive.
"""

import asyncio
import gc
import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Imported at the top: a spawned engine core imports this module as its main one.
from .client import Answer, Client
from .counters import counted, counted_since
from .loader import LOAD_FORMAT
from .model import SHAPES, write_config
from .records import append, write_outputs
from .scales import SCALES, Workload
from .workloads import evict, tokens


@dataclass(frozen=True)
class Job:
    """What the process is to do; see `Config` for those with the same name.

    Attributes:
        settings: a fingerprint of all settings of the engine.
        llm: arguments of the engine.
        device_bytes: of the device cache that prompts are evicted from.
        cells: (workload, repeat, parameters, id) in the order to run them.
        logprobs: workloads whose requests ask for the two best logprobs.
        fresh: empty all caches before each cell.
        ends: no cell begins that would last longer, in seconds of `time.time`.
        told: each cell waits for a line of standard input, so that engines which are
            there at once take turns.
        counts: keep statistics, and record what each cell adds to them.

    """

    out: str
    config: str
    family: str
    scale: str
    settings: str
    llm: dict[str, Any]
    device_bytes: int
    jitter_s: float
    cells: list[tuple[str, int, dict[str, Any], str]]
    logprobs: list[str]
    fresh: bool
    ends: float
    told: bool = False
    hints: bool = False
    counts: bool = False


def machine() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    import torch

    from vllm.platforms import current_platform

    names = ("vllm", "torch", "triton", "lmcache")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["cuda"] = str(torch.version.cuda)
    found["device"] = current_platform.get_device_name()
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True)
        found["driver"] = done.stdout.strip()
    return found


async def warm_up(client: Client) -> list[int]:
    """Whatever is compiled or set up at its first use, and a device cache that is full.

    A prompt, others that evict it, and the prompt again: stores and loads happen too.

    Returns:
        That prompt. All caches hold it, as long as nothing else has evicted it.

    """
    length = client.max_prompt_tokens // 2
    prompt = tokens(client.vocab, length, "warm-up")
    await client.ask("warm-up", prompt, 4)
    for logprobs in (False, True):
        client.logprobs = logprobs
        await evict(client, "warm-up", int(logprobs))
        await client.ask("warm-up", prompt + prompt[:64], 4)
        some = (prompt[: length // 16 + i] for i in range(8))
        await asyncio.gather(*(client.ask("warm-up", p, 16) for p in some))
    return prompt


async def refresh(engine: Any, client: Client, known: list[int], turn: int) -> None:
    """Empty all caches, see that they are empty, and fill the device with fillers.

    Args:
        engine: That `client` asks.
        client: Asks for the fillers.
        known: a prompt that the caches hold.
        turn: counts the calls, and names the fillers.

    Raises:
        RuntimeError: something of the prompt is left.

    """
    # Blocks of stores that are still under way are in use, and refused.
    until = time.monotonic() + RESET_S
    while not await engine.reset_prefix_cache(reset_connector=True):
        if time.monotonic() > until:
            raise RuntimeError(f"The caches could not be reset within {RESET_S} s.")
        await asyncio.sleep(0.1)
    answer = await client.ask("known", known, 1)
    if answer.cached_tokens:
        raise RuntimeError(
            f"After a reset the caches still had {answer.cached_tokens} of "
            f"{len(known)} tokens: --fresh cannot empty them."
        )
    await evict(client, "refresh", turn)


RESET_S = 30.0
"""How long copies may keep blocks that are to be forgotten."""


def workload_of(job: Job, name: str, parameters: dict[str, Any]) -> Workload:
    """The workload `name` of the job's scale with these parameters."""
    kind = type(SCALES[job.scale].workloads[name])
    lists = {k: tuple(v) for k, v in parameters.items() if isinstance(v, list)}
    return kind(**parameters | lists)


async def run(job: Job) -> None:
    """Start the engine and run the cells; every result is written at once."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    out = Path(job.out)
    scale = SCALES[job.scale]
    shape = SHAPES[scale.shape]
    # One path for all of them: what is compiled is kept by it.
    model = out / f"model-{job.scale}"
    write_config(model, shape, scale.dtype)
    # Tiers that outlive an engine look at the files of weights. The loader, which makes
    # the same ones in every process, has none.
    (model / "model.safetensors").write_text(LOAD_FORMAT)
    args = {"model": str(model), "load_format": LOAD_FORMAT} | job.llm
    begun = time.perf_counter()
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            **args, skip_tokenizer_init=True, disable_log_stats=not job.counts
        )
    )
    try:
        itemsize = 2 if scale.dtype == "bfloat16" else 4
        client = Client(
            engine,
            job.device_bytes // shape.kv_bytes_per_token(itemsize),
            args["max_model_len"] - 128,
            shape.vocab,
            job.jitter_s,
            args.get("data_parallel_size", 1),
            job.hints,
        )
        started = time.perf_counter()
        known = await warm_up(client)
        about = {
            "config": job.config,
            "family": job.family,
            "scale": job.scale,
            "settings": job.settings,
            "machine": machine(),
            "block_size": engine.vllm_config.cache_config.block_size,
        }
        times = {
            "start_s": round(started - begun, 2),
            "warm_up_s": round(time.perf_counter() - started, 2),
        }
        append(out, about | {"status": "started", **times, "llm": job.llm})
        await run_cells(job, engine, client, about, known)
    finally:
        engine.shutdown()


async def run_cells(
    job: Job, engine: Any, client: Client, about: dict[str, Any], known: list[int]
) -> None:
    """Run the job's cells one after the other, and write what each gave.

    Args:
        job: Whose cells.
        engine: That `client` asks.
        client: Asks for the cells.
        about: What the record of every cell begins with.
        known: A prompt that the caches hold.

    """
    out = Path(job.out)
    took: dict[str, float] = {}
    for turn, (name, repeat, parameters, digest) in enumerate(job.cells):
        if job.told and not await asyncio.to_thread(sys.stdin.readline):
            return
        about |= {"workload": name, "repeat": repeat, "cell": digest}
        if time.time() + took.get(name, 0.0) > job.ends:
            append(out, about | {"status": "not reached", "reason": "time limit"})
            continue
        begun = time.time()
        client.logprobs = name in job.logprobs
        # The prompts of earlier cells are garbage now, not in the middle of this.
        gc.collect()
        gc.freeze()
        try:
            if job.fresh:
                await refresh(engine, client, known, turn)
            before = counted() if job.counts else {}
            outcome = await workload_of(job, name, parameters).run(client, repeat)
        except (RuntimeError, ValueError) as error:
            append(out, about | {"status": "failed", "reason": str(error)})
            if engine.errored:
                raise
            continue
        took[name] = time.time() - begun
        file = f"outputs/{job.config}-{name}-{repeat}-{int(begun)}.json.gz"
        write_outputs(out / file, outcome.answers)
        found = {
            "status": "ok",
            "parameters": parameters,
            "logprobs": client.logprobs,
            "began": round(begun, 1),
            "took_s": round(took[name], 2),
            "metrics": {k: round(v, 5) for k, v in outcome.metrics.items()},
            "requests": len(outcome.answers),
            "distinct_tokens": distinct(outcome.answers),
            "outputs": file,
        }
        if job.counts:
            found["counted"] = counted_since(before)
        append(out, about | found)


def distinct(answers: list[Answer]) -> int:
    """How many different tokens were generated: few mean a degenerate model."""
    return len({token for answer in answers for token in answer.tokens})


def main() -> None:
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    asyncio.run(run(job))


if __name__ == "__main__":
    main()
