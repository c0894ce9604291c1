#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All that docs/benchmarks.md has tables of, on this machine's GPU, in calls that end
# within ten minutes each. Run it again until no call says "Not run" for want of time:
# what is done is not done again.
#
#     scripts/bench/speed.sh OUT            all calls, one after the other
#     scripts/bench/speed.sh OUT 1 2        these
#     scripts/bench/speed.sh OUT report     tables of what there is, and nothing else
#
# In the order of importance; a machine that is lent for half an hour does 1 and 2:
#
#     1  contexts that take turns, within the device and beyond it (rotate, overfull)
#     2  clients that take conversations of a trace, 8 and 16 of them (needs TRACE)
#     3  agents and conversations (agent, agent_tools, multiturn)
#     4  times to first token on the idle engine, and what others feel of a load
#     5  what the tier costs where it is of no use (no_reuse, fits)
#     6  LMCache, if it is installed
#     7  outputs, which must be equal
#     8  conversations that arrive at a rising rate (needs TRACE; two H200s and 240 GiB
#        hold six engines): CUDA_VISIBLE_DEVICES=0 with ENGINES=core,device, and at the
#        same time, on the other device, ENGINES=offloading,simple,lmcache
#
# Environment: PYTHON, TRACE (a file as Mooncake has them), LIMIT (560 seconds a call),
# REPEATS (3), SCALE and DEVICE (h200, cuda), LLM (arguments of all engines alike),
# PARALLEL (--tp 2, or --dp 2 and so on; give each its own OUT), ENGINES (of call 8).
set -uo pipefail

out=${1:?"say where results go: scripts/bench/speed.sh OUT [CALL ...]"}
shift
calls=("$@")
[ $# -gt 0 ] || calls=(1 2 3 4 5 6 7 8 report)
here=$(dirname "$0")
python=${PYTHON:-python}
limit=${LIMIT:-560}
# What `vllm serve` captures graphs for on this GPU, up to 512 tokens, but fewer of them,
# so that engines start in less time. `max_num_seqs` of the scale would end them at 128:
# a step in which a request joins with 250 tokens would be launched kernel by kernel,
# and most of what is measured would be that (docs/benchmarks.md). Without TRACE,
# compare.py says what lacks one.
sizes='[1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 264, 272, 288, 320, 384, 448, 512]'
llm=${LLM-'{"compilation_config": {"cudagraph_capture_sizes": '$sizes'}}'}
read -ra parallel <<<"${PARALLEL:-}"
common=(--time-limit "$limit" --scale "${SCALE:-h200}" --device "${DEVICE:-cuda}")
common+=(--llm "$llm" ${TRACE:+--trace "$TRACE"} "${parallel[@]}")
lru=(--extra 'lru={"like": "core-write_back",
    "llm": {"kv_offloading_config": {"eviction_policy": "lru"}}}')
failed=0

run() {
    echo "+ $*"
    # The limit is compare.py's own; this is for one that hangs.
    timeout --signal=TERM $((limit + 30)) "$@" || failed=1
}

compare() {
    run "$python" "$here/compare.py" --out "$out/compare" --logprobs= \
        --repeats "${REPEATS:-3}" "${common[@]}" "$@"
}

for call in "${calls[@]}"; do
    case $call in
    1) compare --fresh --workloads rotate,overfull "${lru[@]}" \
        --configs large,core,lru,simple,offloading ;;
    2) compare --fresh --workloads closed_8,closed_16 "${lru[@]}" \
        --configs large,core,lru,simple,offloading ;;
    3) compare --fresh --workloads agent,agent_tools,multiturn "${lru[@]}" \
        --configs large,core,lru,simple,offloading ;;
    4) compare --fresh --workloads latency,interfere "${lru[@]}" \
        --configs large,core,lru,simple,offloading,offloading-sync,none ;;
    5) compare --fresh --workloads no_reuse,fits "${lru[@]}" \
        --configs core,none,core-write_through,lru ;;
    6) compare --fresh --configs lmcache \
        --workloads rotate,overfull,closed_8,agent,multiturn ;;
    7) VLLM_BATCH_INVARIANT=1 run "$python" "$here/gpu_check.py" --out "$out/check" \
        --device "${DEVICE:-cuda}" "${parallel[@]}" --block-size 16 --lengths --repeats 0 --at-once \
        --configs large,write_back,verify,race,race_ahead ;;
    8) run "$python" "$here/compare.py" --out "$out/goodput" --logprobs= --repeats "${REPEATS:-3}" \
        "${common[@]}" --llm '{"max_num_seqs": 256}' --side-by-side --count \
        --device-gib 20 --host-gib 40 --workloads goodput \
        --extra 'device={"like": "large", "device_scale": 3}' \
        --configs "${ENGINES:-core,offloading,none}" ;;
    report) ;;
    *) echo "speed.sh: no call $call; use 1 to 8, or report" >&2 && exit 2 ;;
    esac
done
[ ! -d "$out/compare" ] || run "$python" "$here/compare.py" --report "$out/compare"
exit $failed
