# SPDX-License-Identifier: Apache-2.0
"""`make report`: a run as one HTML page that needs no network.

    PYTHONPATH=scripts python -m page build/demo --out build/report.html

The folder is that of `make demo`, or that of a benchmark (`compare.py --out`).
"""

import argparse
import sys
from pathlib import Path

from .demo import demo_page


def page(folder: Path) -> str:
    """The page of whatever ran in `folder`.

    Raises:
        ValueError: Nothing did.

    """
    if (folder / "report.json").is_file():
        return demo_page(folder)
    if (folder / "results.jsonl").is_file():
        from .bench import bench_page

        return bench_page(folder)
    raise ValueError(
        f"{folder} has neither report.json (make demo) nor results.jsonl (a benchmark)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="page", description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/report.html"))
    arguments = parser.parse_args()
    try:
        text = page(arguments.folder)
    except ValueError as error:
        print(f"error: {error}")
        return 1
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    print(f"wrote {arguments.out}, {len(text) / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
