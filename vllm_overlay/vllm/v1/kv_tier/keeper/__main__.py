# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm.v1.kv_tier.keeper`: runs the keeper of a machine's pool."""

import argparse
import logging
import signal
from pathlib import Path
from types import FrameType

from vllm.v1.kv_tier.keeper.server import Keeper

GiB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm.v1.kv_tier.keeper", description=__doc__)
    parser.add_argument("--size", type=float, help="GiB of all engines")
    parser.add_argument("--engines", type=int, help="most engines")
    parser.add_argument("--socket", type=Path, required=True, help="where engines ask")
    parser.add_argument(
        "--succeed",
        action="store_true",
        help="take over from the keeper at --socket, which ends",
    )
    args = parser.parse_args()
    if args.succeed != (args.size is None) or args.succeed != (args.engines is None):
        parser.error("give --size and --engines, or --succeed, which keeps both")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        if args.succeed:
            keeper = Keeper.succeed(args.socket)
        else:
            keeper = Keeper.make(int(args.size * GiB), args.engines, args.socket)
            keeper.touch()
    except (OSError, ValueError) as e:
        parser.exit(1, f"{e}\n")

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, end)
    logging.info(
        "%d partitions of %.2f GiB at %s, %d with an engine.",
        keeper.geometry.num_partitions,
        keeper.geometry.partition_bytes / GiB,
        args.socket,
        keeper.num_attached,
    )
    try:
        keeper.serve()
    finally:
        keeper.close()


if __name__ == "__main__":
    main()
