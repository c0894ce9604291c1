# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` with files below the host: what survives a server, and what must not."""

import shutil
from pathlib import Path

import pytest

from vllm.v1.kv_tier.stores.format import ObjectFormat

from ..unit.stores.servers import until
from .jobs import BLOCK_BYTES
from .model import make_llama, make_tokenizer
from .secondary import (
    HIT,
    MAX_GIB,
    NEEDS_KEYS,
    ask,
    counted,
    directory,
    hit_tokens,
    objects,
    prompts,
    serving,
    writes,
)

pytestmark = NEEDS_KEYS

PROMPTS = prompts(300, 8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of its own, to be changed."""
    model = make_llama(tmp_path_factory.mktemp("stored"))
    make_tokenizer(model)
    return model


@pytest.fixture(scope="module")
def stored(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """What a server left that was killed, and what it had answered."""
    folder = tmp_path_factory.mktemp("below")
    root = folder / "kv"
    with serving(model, [directory(root)], folder / "log") as server:
        texts = [ask(server, prompt)[0] for prompt in PROMPTS]
        assert len(set(texts)) == len(PROMPTS)
        writes(server, 5 * len(PROMPTS), before=0)
        # What is killed while it writes leaves temporary files.
        gauge = "vllm:kv_tier_secondary_writing_blocks"
        until(lambda: server.metrics("vllm:kv_tier_")[gauge] == 0)
    return root, texts


def copy(stored: tuple[Path, list[str]], to: Path) -> Path:
    root = to / "kv"
    shutil.copytree(stored[0], root)
    root.chmod(0o700)
    return root


def test_a_killed_server_comes_back_with_what_it_had_written(
    model: Path, stored: tuple[Path, list[str]], tmp_path: Path
) -> None:
    root = copy(stored, tmp_path)
    assert not list(root.rglob("*.tmp"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in objects(root))
    with serving(model, [directory(root)], tmp_path / "log") as server:
        found = [ask(server, prompt) for prompt in PROMPTS]
        assert [answer for answer, _ in found] == stored[1]
        assert [hits for _, hits in found] == [HIT] * len(PROMPTS)
        assert counted(server, "secondary_loaded_blocks") >= 5 * len(PROMPTS)
        assert "from now on" not in server.log()
        # The same prompts for another user: nothing of it is theirs.
        before = hit_tokens(server)
        server.complete(PROMPTS[0], max_tokens=1, cache_salt="another")
        assert hit_tokens(server) == before
        assert server.terminate() == 0


def test_what_is_damaged_is_computed(
    model: Path, stored: tuple[Path, list[str]], tmp_path: Path
) -> None:
    root = copy(stored, tmp_path)
    files = objects(root)
    for i, path in enumerate(files):
        content = bytearray(path.read_bytes())
        match i % 4:
            case 0:
                path.write_bytes(content[: len(content) // 2])
            case 1:
                content[-1 - i] ^= 1
                path.write_bytes(content)
            case 2:
                path.unlink()
            case 3:
                other = files[(i + 8) % len(files)]
                path.write_bytes(other.read_bytes() if other.exists() else b"")
    with serving(model, [directory(root)], tmp_path / "log") as server:
        found = [ask(server, prompt) for prompt in PROMPTS]
        assert [answer for answer, _ in found] == stored[1]
        assert sum(hits for _, hits in found) == 0
        assert counted(server, "secondary_missed_blocks") > 0


def test_bytes_that_are_wrong_and_look_right_change_answers(
    model: Path, stored: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """The negative control: what is served is what lies in the files."""
    root = copy(stored, tmp_path)
    files = objects(root)
    (folder,) = {path.parent.parent for path in files}
    form = ObjectFormat(folder.parent.name, int(folder.name[1:]))
    rows = [bytearray(BLOCK_BYTES) for _ in files]
    for path, row in zip(files, rows):
        with path.open("rb") as file:
            key = bytes.fromhex(path.stem)
            assert form.read(file.fileno(), key, memoryview(row))
    for path, row in zip(files, rows[1:] + rows[:1]):
        with path.open("wb") as file:
            form.write(file.fileno(), bytes.fromhex(path.stem), memoryview(row))
    with serving(model, [directory(root)], tmp_path / "log") as server:
        found = [ask(server, prompt) for prompt in PROMPTS]
        assert [hits for _, hits in found] == [HIT] * len(PROMPTS)
        assert all(a != right for (a, _), right in zip(found, stored[1]))


def test_other_weights_find_nothing(
    model: Path, stored: tuple[Path, list[str]], tmp_path: Path
) -> None:
    root = copy(stored, tmp_path)
    other = tmp_path / "model"
    shutil.copytree(model, other)
    (weights,) = other.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    # The lowest bits of a number in the last tensor.
    content[-4] ^= 1
    weights.write_bytes(content)
    with serving(other, [directory(root)], tmp_path / "log") as server:
        _, hits = ask(server, PROMPTS[0])
        assert hits == 0 and counted(server, "secondary_loaded_blocks") == 0


def test_new_weights_are_not_kept_under_the_name_of_the_old_ones(
    model: Path, stored: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Also before the reset that upstream asks for, while many steps run."""
    root, other = copy(stored, tmp_path), make_llama(tmp_path / "other", seed=1)
    written = {path: path.read_bytes() for path in objects(root)}
    dev_mode = {"VLLM_SERVER_DEV_MODE": "1"}
    served = tmp_path / "model"
    shutil.copytree(model, served)
    with serving(served, [directory(root)], tmp_path / "log1", (), dev_mode) as server:
        assert ask(server, PROMPTS[0]) == (stored[1][0], HIT)
        # Not all releases reload from another place.
        for file in other.glob("*.safetensors"):
            file.replace(served / file.name)
        server.post("/collective_rpc", {"method": "reload_weights"})
        log = server.log()
        assert log.count("reload_weights of the ranks was called") == 1
        before = counted(server, "secondary_stored_blocks")
        texts = []
        for prompt in (*PROMPTS[1:], *prompts(350, 20), *PROMPTS[1:]):
            answer, _ = ask(server, prompt)
            texts.append(answer)
        assert texts[:7] == texts[-7:] != stored[1][1:]
        assert counted(server, "secondary_loaded_blocks") == 5
        assert counted(server, "secondary_stored_blocks") == before
        assert server.terminate() == 0
    assert {path: path.read_bytes() for path in objects(root)} == written
    # As it starts again, it has the weights of the files.
    with serving(model, [directory(root)], tmp_path / "log2") as server:
        assert ask(server, PROMPTS[1]) == (stored[1][1], HIT)


def test_two_servers_share_a_directory(
    model: Path, stored: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """Each finds what the other has written, while both run."""
    root = tmp_path / "kv"
    with (
        serving(model, [directory(root)], tmp_path / "log1") as first,
        serving(model, [directory(root)], tmp_path / "log2") as second,
    ):
        for one, other, prompt, right in (
            (first, second, PROMPTS[0], stored[1][0]),
            (second, first, PROMPTS[1], stored[1][1]),
        ):
            assert ask(one, prompt) == (right, 0)
            writes(one, 5)
            assert ask(other, prompt) == (right, HIT)
    assert sum(path.stat().st_size for path in root.rglob("*")) <= MAX_GIB * 2**30
