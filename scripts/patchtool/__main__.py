# SPDX-License-Identifier: Apache-2.0
"""`python3 -m patchtool COMMAND`: what the Makefile's targets call."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Callable
from functools import partial

from . import differs, series
from .carryall import carry_change
from .check import check_patches
from .config import Layout, ToolError, check_tag_name, exit_with, host_arch, say
from .env import make_env, sync
from .index import sha256_file
from .mutate import mutate
from .newtag import new_tag
from .quilt import ensure_quilt, environment
from .seamtests import seam_tests
from .tagspage import write_page
from .tree import apply_patches
from .wheel import build_wheel


def run_quilt(layout: Layout, tag: str, args: list[str]) -> int:
    """Quilt's own exit status; what it asks and prints goes to the terminal."""
    if not layout.tree(tag).is_dir():
        raise ToolError(f"no tree of {tag}; run `make apply-patches TAG={tag}` first")
    ensure_quilt()
    command = ["quilt", "--quiltrc", str(layout.quiltrc), *args]
    return subprocess.call(command, cwd=layout.tree(tag), env=environment(layout, tag))


def show_wheel(layout: Layout, tag: str, device: str, arch: str) -> None:
    wheel = build_wheel(layout, tag, device, arch)
    say(f"{wheel.relative_to(layout.root)}  sha256 {sha256_file(wheel)}")


def show_questions(layout: Layout, tag: str) -> None:
    series.rewrite(layout, tag)
    for question in differs.write(layout, tag):
        say(question.text(differs.OPEN))


def _parser() -> argparse.ArgumentParser:
    """Each command calls a function with the layout and its own arguments."""
    parser = argparse.ArgumentParser(prog="patchtool", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, call: Callable[..., object], text: str, *args: str) -> Callable:
        command = commands.add_parser(name, help=text)
        command.set_defaults(call=call)
        for arg in args:
            command.add_argument(arg)
        return command.add_argument

    more = add("apply", apply_patches, "bring build/TAG/src up to date", "tag")
    more("--force", action="store_true", help="lose edits made there")
    more = add("quilt", run_quilt, "quilt in build/TAG/src, with our settings", "tag")
    more("args", nargs=argparse.REMAINDER)
    more = add("wheel", show_wheel, "build/wheels/vllm-*.whl", "tag")
    more("--device", default="cuda", help="cuda or cpu")
    more("--arch", default=host_arch(), help="x86_64 or aarch64")
    add("env", make_env, "a venv with the patched CPU build, in build/env/TAG", "tag")
    add("sync", sync, "copy changed files into that venv", "tag")
    add("refresh", series.refresh, "rewrite every patch of TAG as quilt does", "tag")
    more = add("check", check_patches, "check all tags, or those named")
    more("tags", nargs="*")
    add("tags-page", write_page, "write docs/tags.md")
    more = add("new-tag", new_tag, "carry the series of neighbours to TAG", "tag")
    more("--from", dest="source", help="one of the neighbours only")
    more("--continue", dest="resume", action="store_true")
    more = add("carry", carry_change, "make one change in all series", "source", "name")
    more("--base", default="HEAD", help="the commit before the change")
    more("--to", dest="tags", nargs="*", default=[], help="tags; all if absent")
    add("differs", show_questions, "write the questions on a series, to answer", "tag")
    more = add("mutate", mutate, "make errors in edits; all must be noticed")
    more("--each", type=int, default=4, help="how many of a kind in each series")
    more = add("seam-tests", seam_tests, "leave each seam out, run its test", "tag")
    more("--only", default="", help="text in seam, patch or test")
    return parser


def main() -> int:
    options = vars(_parser().parse_args())
    call = partial(options.pop("call"), Layout.default())
    options.pop("command")
    named = [options.get("tag"), options.get("source"), *options.get("tags", [])]
    for tag in filter(None, named):
        check_tag_name(tag)
    result = call(**options)
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    exit_with(main)
