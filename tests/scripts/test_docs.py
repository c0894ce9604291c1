# SPDX-License-Identifier: Apache-2.0
"""What the documentation says of the code: settings, messages, metrics."""

import ast
import importlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import reference
from reference import ROOT, with_reference
from tests.promtool import asked
from vllm.v1.kv_tier.config import COPY_ENGINES
from vllm.v1.kv_tier.policy import POLICIES

from .test_ops import published

OVERLAY = ROOT / "vllm_overlay" / "vllm" / "v1" / "kv_tier"
ELLIPSIS = "…"


@pytest.mark.parametrize(
    "key, names", [("eviction_policy", POLICIES), ("copy_engine", COPY_ENGINES)]
)
def test_a_setting_names_what_it_takes(key: str, names: Iterable[str]) -> None:
    rows = [
        *reference.settings().splitlines(),
        *reference.debug_settings().splitlines(),
    ]
    (row,) = (r for r in rows if r.startswith(f"| `{key}`"))
    left_out = [name for name in names if f"`{name}`" not in row]
    assert not left_out, f"name them in the docstring of `{key}` in config.py"


@pytest.mark.parametrize("name", reference.TABLES)
def test_tables_are_those_of_the_code(name: str) -> None:
    page = ROOT / "docs" / name
    assert with_reference(page) == page.read_text(), "run `make docs`"


@pytest.mark.parametrize(
    "name, row",
    [
        ("configuration.md", "`max_load_stall_ms`"),
        ("metrics.md", "`vllm:kv_tier_slots_used`"),
    ],
)
def test_a_stale_table_is_noticed(name: str, row: str, tmp_path: Path) -> None:
    right = (ROOT / "docs" / name).read_text()
    stale = tmp_path / name
    stale.write_text(right.replace(row, "`stale`", 1))
    assert with_reference(stale) == right != stale.read_text()


def test_a_page_without_marks(tmp_path: Path) -> None:
    (tmp_path / "metrics.md").write_text("# Metrics")
    with pytest.raises(ValueError, match="metrics.md lacks <!-- from METRICS"):
        with_reference(tmp_path / "metrics.md")


def text_of(node: ast.AST, names: dict[str, str]) -> str:
    """A message with an ellipsis for whatever is not known before it is raised."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdrg]", ELLIPSIS, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names)
    if isinstance(node, ast.Name):
        return names.get(node.id, ELLIPSIS)
    return ELLIPSIS


def module_of(path: Path) -> str:
    """`worker.streams` for worker/streams.py."""
    return ".".join(path.relative_to(OVERLAY).with_suffix("").parts)


MODULES = [p for p in sorted(OVERLAY.rglob("*.py")) if p.name != "__init__.py"]


def names_of(tree: ast.Module, module: str) -> dict[str, str]:
    """Strings that have a name in a module, whether in it or in a function."""
    loaded = importlib.import_module(f"vllm.v1.kv_tier.{module}".removesuffix("."))
    names = {k: v for k, v in vars(loaded).items() if isinstance(v, str)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = text_of(node.value, names)
            names |= {node.targets[0].id: text} if text != ELLIPSIS else {}
    return names


def is_none(node: ast.AST | None) -> bool:
    return node is None or isinstance(node, ast.Constant) and node.value is None


def messages(path: Path) -> Iterator[str]:
    """Texts of the errors of settings, and of whatever is logged as not well."""
    tree = ast.parse(path.read_text())
    names = names_of(tree, module_of(path))
    faults = [
        node
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef) and outer.name == "_fault"
        for node in ast.walk(outer)
    ]
    for node in faults:
        # Raised by who asks for it.
        if isinstance(node, ast.Return) and not is_none(node.value):
            yield text_of(node.value, names)  # type: ignore[arg-type]
    for node in ast.walk(tree):
        if isinstance(node, ast.Yield) and path.stem == "options":
            yield text_of(node.value, names)  # type: ignore[arg-type]
        if not isinstance(node, ast.Call) or not node.args:
            continue
        argument = ast.unparse(node.args[0])
        if faults and "fault" in argument or argument.endswith(".join(lines)"):
            # Made of messages that are found where they are made.
            continue
        called = ast.unparse(node.func)
        if called == "ValueError" or re.fullmatch(
            r"logger\.(warning|error|exception|critical)(_once)?", called
        ):
            yield text_of(node.args[0], names)


def listed() -> list[re.Pattern[str]]:
    """The messages of the troubleshooting page."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line[:2] == "| "]
    spans = [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return [re.compile(".*".join(map(re.escape, s.split(ELLIPSIS)))) for s in spans]


@pytest.mark.parametrize("path", MODULES, ids=module_of)
def test_every_message_is_in_troubleshooting(path: Path) -> None:
    patterns = listed()
    missing = [m for m in messages(path) if not any(p.search(m) for p in patterns)]
    assert not missing


def test_messages_are_found_with_what_their_names_stand_for() -> None:
    modules = OVERLAY / "config.py", OVERLAY / "compatibility.py"
    found = [message for path in modules for message in messages(path)]
    assert len(found) > 10
    unknown = "--kv-offloading-config: … (value …) was removed. …"
    assert unknown in found
    assert not any(p.search("a message that nobody wrote down") for p in listed())


def test_metrics_of_the_docs_exist() -> None:
    """By the names that PromQL has for them."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        named = {name for name in asked(page.read_text()) if "kv_tier" in name}
        assert named <= published(), page.name


LINK = re.compile(r"\]\(([^)#:]+\.(?:md|py|toml|svg))(?:#[^)]*)?\)")


def test_links_of_the_readme_lead_somewhere() -> None:
    # Those between the pages are checked where the site is built.
    links = LINK.findall((ROOT / "README.md").read_text())
    assert "docs/sizing.md" in links and "docs/operations.md" in links
    assert not [link for link in links if not (ROOT / link).is_file()]
