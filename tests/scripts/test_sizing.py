# SPDX-License-Identifier: Apache-2.0
"""The sizing tool: what it counts must be what a plain model of caches counts."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reference import ROOT
from size import of_one, table, tiers, together, work
from sizing.below import Below, Traffic
from sizing.kv_bytes import kv_bytes_per_token
from sizing.replay import Engine, Outcome, Replay, Tier, replay
from sizing.shift import shifted
from sizing.trace import (
    Call,
    Senders,
    conversations,
    read_trace,
    unbounded_hit_rate,
)
from vllm.v1.kv_tier.policy import POLICIES

BLOCK_BYTES = 1 << 20


def engine(device_blocks: int, block_size: int = 512, **more: Any) -> Engine:
    fields: dict[str, Any] = {
        "block_size": block_size,
        "block_bytes": BLOCK_BYTES,
        "device_bytes": device_blocks * BLOCK_BYTES,
        "prefill_tokens_per_s": 1e6,
        "seconds_per_output_token": 1e-3,
        "max_running": 64,
    }
    return Engine(**fields | more)


def call(at: float, ids: list[int], output_tokens: int = 1, tail: int = 0) -> Call:
    """A request whose prompt ends `tail` tokens before its last id does."""
    return Call(at, 512 * len(ids) - tail, output_tokens, tuple(ids))


def chat(num_calls: int, seed: int = 0) -> list[Call]:
    """Conversations that go on now and then; a common head."""
    rng = random.Random(seed)
    new = iter(range(1, 10**6))
    talks: list[list[int]] = [[0]]
    calls = []
    for i in range(num_calls):
        if rng.random() < 0.3:
            talks.append([0])
        talk = rng.choice(talks)
        talk += [next(new) for _ in range(rng.randint(1, 4))]
        calls.append(call(0.1 * i, talk, rng.randint(1, 40), rng.randint(0, 500)))
    return calls


def write(path: Path, calls: list[Call]) -> Path:
    lines = (
        {
            "timestamp": round(1e3 * c.arrival_s),
            "input_length": c.input_tokens,
            "output_length": c.output_tokens,
            "hash_ids": c.hash_ids,
        }
        for c in calls
    )
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_blocks_smaller_than_an_id_share_what_the_ids_share() -> None:
    a, b = call(0, [1, 2], tail=200), call(0, [1, 3])
    assert len(a.block_ids(512)) == 2 and len(a.block_ids(128)) == 7
    common = set(a.block_ids(128)) & set(b.block_ids(128))
    assert common == set(call(0, [1]).block_ids(128))


def test_the_unbounded_rate_counts_prefixes_only() -> None:
    calls = [call(0, [1, 2, 3]), call(1, [1, 2, 4]), call(2, [9, 2, 3])]
    assert unbounded_hit_rate(calls, 512) == pytest.approx(2 / 9)


@pytest.mark.parametrize("block_size", [512, 128])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_host_that_holds_everything_is_the_unbounded_cache(
    policy: str, block_size: int
) -> None:
    calls = chat(120)
    per_id = 512 // block_size
    tier = Tier(10_000 * per_id * BLOCK_BYTES, policy)
    # Conversations are long: what runs at once must not wait for blocks of its own.
    found = replay(engine(300 * per_id, block_size), tier, calls)
    assert found.hit_rate == pytest.approx(unbounded_hit_rate(calls, block_size))
    assert found.too_long == 0


def test_without_a_tier_the_device_alone_answers() -> None:
    calls = chat(120)
    small, large = (replay(engine(n), Tier(0), calls) for n in (150, 10_000))
    assert small.host_hits == large.host_hits == 0
    assert small.hit_rate < large.hit_rate
    assert large.hit_rate == pytest.approx(unbounded_hit_rate(calls, 512))


@pytest.mark.parametrize("store_policy", ["write_back", "write_through"])
def test_more_host_memory_has_more_hits(store_policy: Any) -> None:
    calls = chat(200)
    rates = [
        replay(engine(150), Tier(n * BLOCK_BYTES, "lru", store_policy), calls).hit_rate
        for n in (0, 20, 100, 1000)
    ]
    assert rates[0] < rates[2] < rates[3] and rates == sorted(rates)


def test_running_requests_hold_their_blocks() -> None:
    # Each takes 4 blocks for 10 s; there are 6.
    calls = [call(0, [i, i + 100, i + 200], 10_000, tail=100) for i in range(3)]
    calls = [Call(c.arrival_s, c.input_tokens, 512, c.hash_ids) for c in calls]
    run = Replay(engine(6, seconds_per_output_token=10 / 512), Tier(0))
    run.run(calls)
    ends = [end for end, *_ in run._running]
    assert len(ends) == 1 and 29 < ends[0] < 31


def test_conversations_begin_behind_what_many_share() -> None:
    # 20 conversations behind one system prompt, two turns each.
    turns = [[0, i, i + 1, i + 2][:n] for n in (3, 4) for i in range(100, 300, 10)]
    calls = [call(second, ids) for second, ids in enumerate(turns)]
    assert conversations(calls) == 2 * list(range(100, 300, 10))


def test_who_says_that_a_conversation_is_over() -> None:
    names = 20 * [1, 2, 3, 4] + [5]
    last = {76, 77, 78, 79, 80}
    assert Senders().last_calls(names) == set()
    assert Senders(told=1.0).last_calls(names) == last
    assert Senders(told=0.5).last_calls(names) < last
    wrong = Senders(told=1.0, wrong=0.4).last_calls(names)
    assert len(wrong) == 5 and len(wrong - last) == 2
    # One call alone cannot come too early.
    assert 80 in Senders(told=1.0, wrong=1.0).last_calls(names)


def test_hints_keep_what_returns() -> None:
    """Chats that go on, among questions that are asked once."""
    numbers = iter(range(10**6, 10**7))
    calls = []
    for turn in range(10):
        for chat in range(4):
            calls.append(call(0.0, [1000 * chat + i for i in range(turn + 2)]))
            for _ in range(3):
                calls.append(call(0.0, [next(numbers) for _ in range(6)]))
    calls = [replace(c, arrival_s=float(i)) for i, c in enumerate(calls)]
    none, told, wrong = (
        replay(
            engine(16), Tier(48 * BLOCK_BYTES, "lru", senders=senders), calls
        ).hit_rate
        for senders in (Senders(), Senders(1.0), Senders(1.0, 1.0))
    )
    assert told == unbounded_hit_rate(calls, 512)
    assert told > wrong > none


# ------------------------------------------------------------- a tier below the host

FAST = Below(
    num_bytes=10_000 * BLOCK_BYTES,
    read_bytes_per_s=1e12,
    write_bytes_per_s=1e12,
    latency_s=0.0,
    store_from_use=1,
    deadline_s=1.0,
)


def rounds(num_rounds: int = 3, num_prompts: int = 30) -> list[Call]:
    """Prompts that all come back after the host has forgotten each of them."""
    prompts = [list(range(4 * i, 4 * i + 4)) for i in range(num_prompts)]
    return [call(float(i), ids) for i, ids in enumerate(num_rounds * prompts)]


def below(store: Below | None, calls: list[Call], **more: Any) -> Outcome:
    """With room for 3 prompts on the device and for 8 on the host."""
    tier = Tier(32 * BLOCK_BYTES, "lru", below=store)
    return replay(engine(16, **more), tier, calls)


def test_a_store_that_holds_everything_is_the_unbounded_cache() -> None:
    calls = rounds()
    none, found = below(None, calls), below(FAST, calls)
    assert none.hit_rate == 0 and none.traffic is None
    assert found.hit_rate == unbounded_hit_rate(calls, 512) == pytest.approx(2 / 3)
    assert found.below_hits == 2 * 4 * 30 and found.host_hits == 0
    traffic = found.traffic
    assert traffic is not None and traffic.dropped_bytes == 0
    assert traffic.read_bytes == found.below_hits * BLOCK_BYTES
    # Each block once, but for those that the device still has.
    assert 4 * 27 <= traffic.written_bytes / BLOCK_BYTES <= 4 * 30
    # 30 prompts come back in each of the two minutes.
    assert traffic.read_bytes_per_s == 30 * 4 * BLOCK_BYTES / 60


def test_a_store_of_no_size_is_none() -> None:
    calls = chat(120)
    none, empty = below(None, calls), below(replace(FAST, num_bytes=0), calls)
    assert none == replace(empty, tier=none.tier)


def test_a_larger_store_has_more_hits() -> None:
    calls = chat(200)
    unbounded = unbounded_hit_rate(calls, 512)
    rates = []
    for num_blocks in (0, 100, 200, 10_000):
        store = replace(FAST, num_bytes=num_blocks * BLOCK_BYTES)
        tier = Tier(80 * BLOCK_BYTES, "lru", below=store)
        rates.append(replay(engine(150), tier, calls).hit_rate)
    assert rates == sorted(rates) and rates[0] < rates[2] < rates[3]
    # A prompt takes a quarter of the host at a time, and some are longer.
    assert unbounded - 0.02 < rates[3] < unbounded


def test_a_store_slower_than_prefill_brings_nothing() -> None:
    calls = rounds()
    # A block is computed in half a second, and read in one.
    slow = replace(FAST, read_bytes_per_s=BLOCK_BYTES)
    found = below(slow, calls, prefill_tokens_per_s=1024)
    assert found.hit_rate == 0
    assert found.traffic is not None and found.traffic.late_requests > 0
    # It was tried twice before it had been measured, and then with 4 blocks each ten
    # seconds.
    num_trials = 2 + found.traffic.seconds / 10
    assert 0 < found.traffic.read_bytes <= num_trials * 4 * BLOCK_BYTES


def test_what_a_store_has_no_time_to_write_is_dropped() -> None:
    calls = rounds()
    found = below(replace(FAST, write_bytes_per_s=BLOCK_BYTES), calls)
    assert found.traffic is not None and found.traffic.dropped_bytes > 0
    assert 0 < found.hit_rate < 2 / 3
    assert found.traffic.written_bytes_per_s < 1.1 * BLOCK_BYTES


def test_from_the_second_use_on_only_what_was_hit_comes_back() -> None:
    prompts = [c.hash_ids for c in rounds(1, 22)]
    # 6 of them are hit on the host, before the others come and it forgets all.
    asked = [*prompts[:6], *prompts[:6], *prompts[6:], *prompts]
    calls = [call(float(i), list(ids)) for i, ids in enumerate(asked)]
    assert below(FAST, calls).below_hits == 22 * 4
    assert below(replace(FAST, store_from_use=2), calls).below_hits == 6 * 4


def test_others_pass_a_request_that_waits_for_the_store() -> None:
    # One waits for a store that is far away, while the next one is computed.
    calls = [*rounds(1), call(100.0, [0, 1, 2, 3]), call(100.1, [900, 901])]
    far = replace(FAST, latency_s=0.25, deadline_s=5.0)
    alone = below(far, calls[:-1]).traffic
    both = below(far, calls).traffic
    assert alone is not None and both is not None
    assert alone.seconds > 100.2
    assert both.seconds < alone.seconds + 0.01


def test_a_request_that_can_never_run_is_left_out() -> None:
    found = replay(engine(4), Tier(0), [call(0, [1, 2, 3, 4, 5]), call(1, [1])])
    assert (found.too_long, found.prompt_blocks) == (1, 1)


def test_wrong_lines_of_a_trace_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", chat(3))
    assert len(read_trace(path)) == 3
    path.write_text(path.read_text() + '\n{"timestamp": 1}')
    with pytest.raises(ValueError, match="line 4.*hash_ids"):
        read_trace(path)
    path.write_text('{"timestamp":0,"input_length":9,"output_length":1,"hash_ids":[]}')
    with pytest.raises(ValueError, match="line 1.*0 hash_ids"):
        read_trace(path)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    "tp, dtype, expected",
    [
        (1, "auto", 2 * 32 * 8 * 128 * 2),
        (8, "fp8", 2 * 32 * 8 * 128),
        # Two ranks have a copy of each head.
        (16, "auto", 2 * 32 * 16 * 128 * 2),
    ],
)
def test_bytes_of_a_token(tmp_path: Path, tp: int, dtype: str, expected: int) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert kv_bytes_per_token(file, tp, dtype) == (expected, "")
    assert kv_bytes_per_token(tmp_path, tp, dtype) == (expected, "")


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such config.json"):
        kv_bytes_per_token(tmp_path, 1, "auto")


def test_engines_with_one_pool_have_more_hits_than_apart() -> None:
    served, num = shifted([], chat(400)), 4
    shares = [len(of_one(served, n).calls) for n in (1, num)]
    assert shares[0] == 400 and 60 < shares[1] < 140
    apart = of_one(served, num).calls
    one = replay(engine(8), Tier(16 * BLOCK_BYTES), apart)
    pool = replay(together(engine(8), num), Tier(64 * BLOCK_BYTES), served.calls)
    assert pool.device_rate + pool.host_rate > one.device_rate + one.host_rate + 0.1


def test_the_table_has_a_row_for_each_pair() -> None:
    cases = tiers([0, 1, 2], ["lru", "arc"], ["write_back"])
    assert len(cases) == 5 and cases[-1] == Tier(0)
    outcomes = [Outcome(t, 100, 5, t.host_bytes >> 30, 0, 0, 0, 0) for t in cases]
    lines = table(outcomes).splitlines()
    assert lines[0] == "| GiB | 0 | 1 | 2 |"
    assert lines[2] == "| lru, write_back | 5.0 + 0.0 | 5.0 + 1.0 | 5.0 + 2.0 |"
    assert len(lines) == 4


def test_the_table_has_a_row_for_each_store() -> None:
    cases = tiers([0, 1], ["lru"], ["write_back"], stores_below=[None, FAST])
    assert [case.below for case in cases] == [None, FAST, None]
    traffic = Traffic(2 << 30, 1 << 30, 1 << 30, 1e9, 5e8, 3, 10.0)
    outcomes = [
        Outcome(case, 100, 5, 4, 0, 0, 0, 0, 30, traffic)
        if case.below
        else Outcome(case, 100, 5, 6, 0, 0, 0, 0)
        for case in cases
    ]
    lines = table(outcomes).splitlines()
    assert lines[2] == "| lru, write_back | 5.0 + 6.0 | 5.0 + 6.0 |"
    size = f"{FAST.num_bytes / 2**30:.4g} GiB below"
    # Without a host there is nothing below it either.
    assert lines[3] == f"| lru, write_back, {size} | 5.0 + 6.0 | 5.0 + 4.0 + 30.0 |"
    lines = work(outcomes).splitlines()
    cells = f"lru, write_back, {size} | 1 | 0.21 (1.00) | 0.11 (0.50) | 50.0 | 3"
    assert lines[2:] == [f"| {cells} |"]
    assert work(outcomes[:1]) == ""


def test_the_command_simulates_a_store(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", chat(60))
    command = [sys.executable, str(ROOT / "scripts" / "size.py")]
    command += ["--trace", str(trace), "--kv-bytes-per-token", "2048", "--jobs", "1"]
    command += ["--device-gib", "0.05", "--host-gib", "0.05", "--below-gib", "0", "9"]
    command += ["--below-store-from-use", "1", "--eviction-policy", "lru"]
    command += ["--store-policy", "write_back", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| lru, write_back, from use auto, 9 GiB below |" in done.stdout
    result = json.loads((tmp_path / "out" / "size.json").read_text())
    stored, none = result["outcomes"]
    assert none["traffic"] is none["below"] is None
    assert stored["below"]["store_from_use"] == 1
    assert stored["below_hit_rate"] > 0 and stored["traffic"]["written_bytes"] > 0
    wrong = [*command, "--below-read-gb-s", "0"]
    failed = subprocess.run(wrong, capture_output=True, text=True)
    assert failed.returncode == 2 and "--below-read-gb-s must be above" in failed.stderr


def test_the_command_writes_table_numbers_and_picture(tmp_path: Path) -> None:
    trace = write(tmp_path / "trace.jsonl", chat(60))
    command = [sys.executable, str(ROOT / "scripts" / "size.py")]
    command += ["--trace", str(trace), "--kv-bytes-per-token", "2048"]
    command += ["--device-gib", "0.15", "--host-gib", "0", "0.125", "8"]
    command += ["--out", str(tmp_path / "out"), "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # No host, and each other size with each policy and each way to store.
    num_cases = 1 + 2 * len(POLICIES) * 2
    assert "| s3fifo, write_through, from use auto |" in done.stdout
    assert f"{num_cases}/{num_cases}" in done.stderr
    assert "leaked" not in done.stderr
    result = json.loads((tmp_path / "out" / "size.json").read_text())
    best = max(o["device_hit_rate"] + o["host_hit_rate"] for o in result["outcomes"])
    assert best == pytest.approx(result["unbounded_hit_rate"])
    assert (tmp_path / "out" / "size.png").stat().st_size > 10_000
    wrong = subprocess.run(
        [*command, "--model", str(tmp_path)], capture_output=True, text=True
    )
    assert wrong.returncode == 2 and "either --model or" in wrong.stderr
