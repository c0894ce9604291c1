# SPDX-License-Identifier: Apache-2.0
"""An engine behind a socket, for who needs several of them: token ids in and out.

    python -m suite.engine_server JOB.json

Each connection is one request: a line of JSON, answered by lines of JSON. The socket is
there once the engine is ready. The engine core is a child, as in `vllm serve`.

    {"do": "ask", "prompt": [..], "max_tokens": 8, "transfer": {..} or null}
        {"tokens": [..]} as they come; the last line has "cached" and "transfer", too
    {"do": "count"}
        {NAME: value}: what /metrics has of vLLM, summed over labels
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

# Imported at the top: an engine core, forked or spawned, does the same.
from . import plants
from .counters import counted
from .engines import LONGEST_LINE, PLANTS, Job
from .loader import LOAD_FORMAT

for name in filter(None, os.getenv(PLANTS, "").split(",")):
    getattr(plants, name)()


async def serve(job: Job) -> None:
    """Start the engine, and answer until somebody ends the process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args: dict[str, Any] = {"load_format": LOAD_FORMAT, "skip_tokenizer_init": True}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**args | job.llm))
    try:
        server = await asyncio.start_unix_server(
            partial(_answer, engine, count()), job.socket, limit=LONGEST_LINE
        )
        async with server:
            await server.serve_forever()
    finally:
        engine.shutdown()


async def _answer(
    engine: Any,
    numbers: "count[int]",
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    request = json.loads(await reader.readline())
    do = request.pop("do")
    try:
        if do == "count":
            await _tell(writer, counted())
            return
        async for told in _ask(engine, f"{next(numbers)}", **request):
            await _tell(writer, told)
    except Exception as error:
        await _tell(writer, {"error": repr(error)})
    finally:
        writer.close()


async def _tell(writer: asyncio.StreamWriter, told: dict[str, Any]) -> None:
    writer.write(json.dumps(told).encode() + b"\n")
    await writer.drain()


async def _ask(
    engine: Any,
    number: str,
    prompt: list[int],
    max_tokens: int,
    transfer: dict[str, Any] | None,
) -> AsyncIterator[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args=transfer and {"kv_transfer_params": transfer},
    )
    async for output in engine.generate({"prompt_token_ids": prompt}, params, number):
        told: dict[str, Any] = {"tokens": list(output.outputs[0].token_ids)}
        if output.finished:
            told["cached"] = output.num_cached_tokens or 0
            told["transfer"] = output.kv_transfer_params
        yield told


if __name__ == "__main__":
    asyncio.run(serve(Job(**json.loads(Path(sys.argv[1]).read_text()))))
