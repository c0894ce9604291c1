# SPDX-License-Identifier: Apache-2.0
"""`python3 -m patchtool COMMAND`: what the Makefile's targets call."""

from __future__ import annotations

import argparse
import subprocess

from .carryall import carry_change
from .check import check_patches
from .config import Layout, ToolError, check_tag_name, exit_with, host_arch, say
from .differs import write
from .env import make_env, sync
from .fetch import sha256_file
from .mutate import mutate
from .newtag import new_tag
from .quilt import ensure_quilt, environment
from .seamtests import seam_tests
from .series import refresh
from .tagspage import write_page
from .tree import apply_patches
from .wheel import build_wheel


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="patchtool", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text)
        command.add_argument("tag")
        return command

    command = add("apply", "bring build/TAG/src up to date")
    command.add_argument("--force", action="store_true", help="lose edits made there")
    command = add("quilt", "run quilt in build/TAG/src with the project's settings")
    command.add_argument("args", nargs=argparse.REMAINDER)
    command = add("wheel", "build/wheels/vllm-*.whl")
    command.add_argument("--device", default="cuda", help="cuda or cpu")
    command.add_argument("--arch", default=host_arch(), help="x86_64 or aarch64")
    add("env", "a venv with the patched CPU build, in build/env/TAG")
    add("sync", "copy changed files into that venv")
    add("refresh", "rewrite every patch of TAG as quilt does")
    command = commands.add_parser("check", help="check all tags, or those named")
    command.add_argument("tags", nargs="*")
    commands.add_parser("tags-page", help="write docs/tags.md")
    command = add("new-tag", "carry the series of another tag to TAG")
    command.add_argument("--from", dest="source", help="the neighbours if absent")
    command.add_argument("--continue", dest="resume", action="store_true")
    command = commands.add_parser("carry", help="make one change in all series")
    command.add_argument("tag", help="whose patch changed")
    command.add_argument("patch", help="the begin of its name")
    command.add_argument("--base", default="HEAD", help="the commit before the change")
    command.add_argument("--to", nargs="*", default=[], help="tags; all if absent")
    add("differs", "write the questions on a series, for answers by hand")
    command = commands.add_parser("mutate", help="spoil edits; all must be noticed")
    command.add_argument("--each", type=int, default=15, help="how many of each series")
    command = add("seam-tests", "take each seam out of TAG, and run the test it names")
    command.add_argument("--only", default="", help="text in seam, patch or test")
    return parser


def run_quilt(layout: Layout, tag: str, args: list[str]) -> int:
    """Quilt's own exit status; what it asks and prints goes to the terminal."""
    if not layout.tree(tag).is_dir():
        raise ToolError(f"no tree of {tag}; run `make apply-patches TAG={tag}` first")
    ensure_quilt()
    command = ["quilt", "--quiltrc", str(layout.quiltrc), *args]
    return subprocess.call(command, cwd=layout.tree(tag), env=environment(layout, tag))


def main() -> int:
    options = _parser().parse_args()
    for tag in getattr(options, "tags", []) or [getattr(options, "tag", "v0.0.0")]:
        check_tag_name(tag)
    layout = Layout.default()
    if options.command == "apply":
        apply_patches(layout, options.tag, options.force)
    elif options.command == "quilt":
        return run_quilt(layout, options.tag, options.args)
    elif options.command == "wheel":
        wheel = build_wheel(layout, options.tag, options.device, options.arch)
        say(f"{wheel.relative_to(layout.root)}  sha256 {sha256_file(wheel)}")
    elif options.command == "env":
        make_env(layout, options.tag)
    elif options.command == "sync":
        sync(layout, options.tag)
    elif options.command == "refresh":
        refresh(layout, options.tag)
    elif options.command == "check":
        check_patches(layout, options.tags or layout.tags())
    elif options.command == "tags-page":
        write_page(layout)
    elif options.command == "carry":
        carry_change(layout, options.tag, options.patch, options.base, options.to)
    elif options.command == "differs":
        for question in write(layout, options.tag):
            say(question.text("?"))
    elif options.command == "mutate":
        mutate(layout, options.each)
    elif options.command == "seam-tests":
        seam_tests(layout, options.tag, options.only)
    elif options.command == "new-tag":
        if options.source:
            check_tag_name(options.source)
        new_tag(layout, options.source, options.tag, options.resume)
    return 0


if __name__ == "__main__":
    exit_with(main)
