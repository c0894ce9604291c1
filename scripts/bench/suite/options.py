# SPDX-License-Identifier: Apache-2.0
"""The command line of `compare.py`, and what it makes of a scale."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from .configs import ALIASES, ON_DISK, Config
from .model import SHAPES
from .scales import SCALES, Scale

DEVICES = ("cuda", "cpu")
LOGPROBS = (
    "multiturn,agent,agent_tools,rotate,overfull,no_reuse,fits,trace,closed_8,closed_16"
)
EACH_REPLICA = ("sessions", "at_once", "prompts", "clients", "conversations")
"""Parameters of workloads that are of one replica: data parallelism multiplies them."""


def names(text: str) -> list[str]:
    """The names of a list with commas."""
    return text.split(",") if text else []


def parser_of(description: str, size: str) -> argparse.ArgumentParser:
    """The command line of a program with engines of one shape.

    Args:
        description: Of the program.
        size: The shape by default.

    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--device", default="cuda", choices=DEVICES)
    add("--size", default=size, choices=list(SHAPES))
    return parser


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What decides how engines run, whatever is measured of them."""
    add = parser.add_argument
    add("--scale", choices=SCALES, default="h200")
    add("--device", choices=DEVICES, default="cuda")
    add("--trace", type=Path, help="file that `trace` and `closed_N` replay")
    add("--block-size", type=int, help="tokens; vLLM's if not given")
    add("--host-gib", type=float)
    add("--device-gib", type=float)
    add(
        "--llm",
        type=json.loads,
        default={},
        metavar="JSON",
        help="arguments of the engine, for all configurations alike",
    )
    add(
        "--extra",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help='another configuration: \'big={"llm": {"block_size": 64}, "env": {}}\'; '
        '"like" names one to start from, whose dictionaries are merged with these',
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="WORKLOAD.PARAMETER=JSON",
        help="multiturn.sessions=12",
    )
    add(
        "--fresh",
        action="store_true",
        help="empty all caches before each cell, so that none finds, or pays for, what "
        "another has left; where a configuration cannot, each workload gets an engine",
    )
    add(
        "--count",
        action="store_true",
        help="all engines keep statistics, and results.jsonl has what each cell added",
    )
    add(
        "--side-by-side",
        action="store_true",
        help="engines of all configurations at once, on the same device, whose cells "
        "take turns: one start for each, where all of them fit device and host",
    )
    add_parallel_options(parser)


def add_parallel_options(parser: argparse.ArgumentParser) -> None:
    """How many devices an engine has."""
    add = parser.add_argument
    add("--tp", type=int, default=1, help="ranks that share each layer")
    add("--pp", type=int, default=1, help="stages of a pipeline")
    add("--dp", type=int, default=1, help="replicas, each with as much to do as one")
    add(
        "--no-custom-all-reduce",
        action="store_true",
        help="leave sums over ranks to the communication library",
    )


def parallel(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the engine for `add_parallel_options`; none for one device."""
    sizes = {
        "tensor_parallel_size": args.tp,
        "pipeline_parallel_size": args.pp,
        "data_parallel_size": args.dp,
    }
    llm: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
    if args.no_custom_all_reduce:
        llm["disable_custom_all_reduce"] = True
    return llm


def check_names(flag: str, given: list[str], known: list[str]) -> None:
    """End with a message if a name is unknown."""
    for name in given:
        if name not in known:
            sys.exit(f"{flag}: unknown name {name!r}. Use some of {', '.join(known)}.")


def config_names(given: list[str], known: Iterable[str]) -> list[str]:
    """The configurations to run; all but those on a disk if none are given.

    `core` and `simple` stand for what they are short for, unless an `--extra` has that
    name.
    """
    known = list(known)
    if not given:
        return [name for name in known if name not in ON_DISK]
    found = []
    for name in given:
        found += [name] if name in known else ALIASES.get(name, [name])
    check_names("--configs", found, [*known, *ALIASES])
    return list(dict.fromkeys(found))


def scaled(args: argparse.Namespace) -> Scale:
    """The scale with what the command line changes in it."""
    scale = SCALES[args.scale]
    changes: dict[str, Any] = {}
    if args.block_size:
        changes["block_size"] = args.block_size
    if args.host_gib:
        changes["host_gib"] = args.host_gib
    if args.device_gib:
        changes["device_bytes"] = int(args.device_gib * 2**30)
    workloads: dict[str, Any] = dict(scale.workloads)
    if args.dp > 1:
        workloads = {name: _times(w, args.dp) for name, w in workloads.items()}
    for text in args.set:
        name, _, value = text.partition("=")
        workload, _, parameter = name.partition(".")
        check_names(f"--set {text}", [workload], list(workloads))
        known = [f.name for f in fields(workloads[workload])]
        check_names(f"--set {text}", [parameter], known)
        number = json.loads(value)
        number = tuple(number) if isinstance(number, list) else number
        workloads[workload] = replace(workloads[workload], **{parameter: number})
    if args.trace:
        path = str(args.trace.resolve())
        for name, workload in workloads.items():
            if hasattr(workload, "path"):
                workloads[name] = replace(workload, path=path)
    return replace(scale, workloads=workloads, **changes)


def _times(workload: Any, replicas: int) -> Any:
    """As much for each replica as the scale has for one."""
    known = {f.name for f in fields(workload)} & {*EACH_REPLICA}
    changes = {name: replicas * getattr(workload, name) for name in known}
    return replace(workload, **changes)


def extra_config(text: str, known: dict[str, Config]) -> tuple[str, Config]:
    """Name and configuration of an `--extra`."""
    name, _, value = text.partition("=")
    try:
        given = json.loads(value)
        like = given.pop("like", "none")
        check_names(f"--extra {name}: like", [like], list(known))
        changes = {key: merged(asdict(known[like])[key], given[key]) for key in given}
        return name, replace(known[like], **changes)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        keys = ", ".join(f.name for f in fields(Config))
        sys.exit(f"--extra {text}: {error!r}. Use NAME={{...}} with like, {keys}.")


def merged(old: Any, new: Any) -> Any:
    """`new` over `old`; dictionaries are merged at every depth."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: merged(old.get(key), new[key]) for key in new}
