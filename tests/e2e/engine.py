# SPDX-License-Identifier: Apache-2.0
"""A real engine whose scheduler lives in this process."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from .release import ENVIRONMENT

# Before vLLM is imported. The scheduler in this process, small engines without
# threads of their own, and no claim to cores that others may use.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.update(ENVIRONMENT | dict(os.environ))

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_tier.memory.regions import flatten
from vllm.v1.kv_tier.releases import uses_v2_model_runner
from vllm.v1.metrics.reader import Counter, Gauge

COUNTERS = (
    "vllm:kv_tier_",
    "vllm:num_preemptions",
    "vllm:external_prefix_cache_hits",
    "vllm:spec_decode_",
)


class Answer(TypedDict):
    """What came back for one prompt."""

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    """Top 5 (token, logprob) for each token."""
    others: list[list[int]]
    """Tokens of the second and further samples."""
    prompt_logprobs: list[list[tuple[int, float]]]
    cached_tokens: int


class Engine:
    """An `LLM`, and what tests must know of its insides."""

    def __init__(self, **llm: Any) -> None:
        self.llm = LLM(
            enforce_eager=True,
            disable_log_stats=False,
            **{"skip_tokenizer_init": True, **llm},
        )
        self._engine = self.llm.llm_engine
        self.core = self._engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._model = llm["model"]
        self._names: list[str] = []
        self._done: dict[str, RequestOutput] = {}
        self._num_requests = 0
        self._loras: dict[Path, int] = {}

    @property
    def pool(self) -> Any:
        return self.core.scheduler.kv_cache_manager.block_pool

    @property
    def facts(self) -> dict[str, Any]:
        """How the engine really runs."""
        config = self.core.vllm_config
        return {
            # Not all releases have it.
            "async_scheduling": getattr(
                config.scheduler_config, "async_scheduling", False
            ),
            "world_size": config.parallel_config.world_size,
            "runner_v2": uses_v2_model_runner(config),
            "num_device_blocks": self.pool.num_gpu_blocks,
            "num_host_slots": self.pool.host.num_slots if self.has_tier else 0,
            "pool": type(self.pool).__name__,
        }

    @property
    def groups(self) -> list[str]:
        """Spec of each KV cache group."""
        groups = self.core.scheduler.kv_cache_config.kv_cache_groups
        return [type(group.kv_cache_spec).__name__ for group in groups]

    @property
    def layout(self) -> dict[str, Any]:
        """How KV blocks lie in memory."""
        config = self.core.scheduler.kv_cache_config
        group_of = {
            layer: i
            for i, group in enumerate(config.kv_cache_groups)
            for layer in group.layer_names
        }
        ((addresses, num_sharing),) = self.on_ranks(kv_of_layers)
        groups_at: dict[int, set[int]] = {}
        for layer, address in addresses.items():
            if layer in group_of:
                groups_at.setdefault(address, set()).add(group_of[layer])
        return {
            "block_sizes": [g.kv_cache_spec.block_size for g in config.kv_cache_groups],
            # Groups overlay each other: a block belongs to one of them at a time.
            "groups_share_memory": any(len(each) > 1 for each in groups_at.values()),
            "layers_without_kv": num_sharing,
            # Of a block, what its group needs.
            "copies_groups": self.has_tier and config.kv_tier.copies_groups,
        }

    @property
    def has_tier(self) -> bool:
        return hasattr(self.pool, "host")

    def counters(self) -> dict[str, float]:
        return {
            m.name.removeprefix("vllm:"): m.value
            for m in self.llm.get_metrics()
            if m.name.startswith(COUNTERS) and isinstance(m, Counter | Gauge)
        }

    def reset(self) -> bool:
        """Whether the cache was reset."""
        was_reset = self.llm.reset_prefix_cache()
        # The first releases do not tell.
        return self.num_cached()[0] == 0 if was_reset is None else was_reset

    def num_cached(self) -> tuple[int, int]:
        """Blocks with content in the device cache and in the host's."""
        num_device = sum(block.block_hash is not None for block in self.pool.blocks)
        return num_device, len(self.pool.host) if self.has_tier else 0

    def reload_weights(self, folder: Path | None = None) -> None:
        """Weights of another model of the same shape; without, those of the first."""
        path = str(folder or self._model)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def generate(
        self,
        prompts: list[list[int]],
        salt: str | None = None,
        lora: Path | LoRARequest | None = None,
        **params: Any,
    ) -> list[Answer]:
        self.start(prompts, salt, lora, **params)
        return self.finish()

    def generate_with_aborts(
        self,
        prompts: list[list[int]],
        victims: list[int],
        after_steps: int,
        **params: Any,
    ) -> list[Answer]:
        """Answers to all prompts but the victims."""
        self.start(prompts, **params)
        self.steps(after_steps)
        names = [self._names[i] for i in victims]
        self._engine.abort_request(names)
        self._names = [n for n in self._names if n not in names]
        return self.finish()

    def embed(self, prompt: list[int]) -> tuple[list[float], int | None]:
        """The embedding, and how many tokens were cached, if the release tells."""
        # Releases differ in the type of what they give.
        found: Any
        (found,) = self.llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        return found.outputs.embedding, getattr(found, "num_cached_tokens", None)

    def start(
        self,
        prompts: list[list[int]],
        salt: str | None = None,
        lora: Path | LoRARequest | None = None,
        priority: int = 0,
        images: Sequence[Any] = (),
        embeddings: Any = None,
        **params: Any,
    ) -> None:
        """Begin to answer prompts.

        Args:
            prompts: Tokens of each.
            salt: Cache salt.
            lora: Folder of an adapter, or how to ask for it.
            priority: The smaller, the more important.
            images: Those that each prompt has tokens for.
            embeddings: A table of them, of which prompts are given those of their
                tokens instead of these.
            **params: Of `SamplingParams`.

        """
        sampling = SamplingParams(
            **{"temperature": 0.0, **params},
            logprobs=5,
            detokenize=False,
            ignore_eos=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        if isinstance(lora, Path):
            number = self._loras.setdefault(lora, len(self._loras) + 1)
            lora = LoRARequest(lora.name, number, str(lora))
        for tokens in prompts:
            prompt: dict[str, Any] = {"prompt_token_ids": tokens}
            if embeddings is not None:
                prompt = {"prompt_embeds": embeddings[tokens]}
            if salt is not None:
                prompt["cache_salt"] = salt
            if images:
                prompt["multi_modal_data"] = {"image": list(images)}
            name = str(self._num_requests)
            self._num_requests += 1
            self._names.append(name)
            self._engine.add_request(
                name,
                prompt,  # type: ignore[arg-type]
                sampling,
                lora_request=lora,
                priority=priority,
            )

    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if not self._engine.has_unfinished_requests():
                # Some releases cannot make a step without any.
                return
            for output in self._engine.step():
                if output.finished:
                    assert isinstance(output, RequestOutput)
                    self._done[output.request_id] = output

    def finish(self) -> list[Answer]:
        """Answers to what was started, in that order."""
        while self._engine.has_unfinished_requests():
            self.steps(1)
        names, self._names = self._names, []
        done, self._done = self._done, {}
        return [_answer(done[name]) for name in names]

    def slots(self) -> list[Any]:
        """Filled host slots."""
        return self.pool.host.filled_slots()

    def oldest_slot(self) -> int:
        """The host slot that was filled first."""
        return min(self.pool.host.filled_slots(), key=lambda slot: slot.store_seq).index

    def slots_of(self, group: int) -> set[int]:
        """Host slots with blocks of a KV cache group."""
        slots = self.pool.host.filled_slots()
        return {s.index for s in slots if get_group_id(s.keys[0]) == group}

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(worker_wrapper, *args)` of every rank."""
        return self.core.model_executor.collective_rpc(function, args=args)


def kv_of_layers(wrapper: Any) -> tuple[dict[str, int], int]:
    """Of a rank: where the KV cache of each attention layer begins, and how many
    layers read that of another one."""
    compilation = wrapper.vllm_config.compilation_config
    found: dict[str, int] = {}
    num_sharing = 0
    for name, layer in compilation.static_forward_context.items():
        tensor = next(flatten(getattr(layer, "kv_cache", ())), None)
        if tensor is not None:
            found[name] = tensor.data_ptr()
        target = getattr(layer, "kv_sharing_target_layer_name", None)
        num_sharing += target is not None
    return found, num_sharing


def _answer(output: RequestOutput) -> Answer:
    first, *others = output.outputs
    return Answer(
        tokens=list(first.token_ids),
        logprobs=[_top(d) for d in first.logprobs or []],
        others=[list(o.token_ids) for o in others],
        prompt_logprobs=[_top(d) for d in output.prompt_logprobs or [] if d],
        cached_tokens=output.num_cached_tokens or 0,
    )


def _top(logprobs: Any) -> list[tuple[int, float]]:
    best = sorted(logprobs.items(), key=lambda item: -item[1].logprob)[:5]
    return [(token, entry.logprob) for token, entry in best]
