# SPDX-License-Identifier: Apache-2.0
"""The demo's prose: all of the novel, in passages that nobody else reads."""

import hashlib
from itertools import combinations

import pytest

from demo.prose import NOVEL, QUESTIONS, chapters, conversation


def test_novel_is_the_named_source() -> None:
    digest = hashlib.sha256(NOVEL.read_bytes()).hexdigest()
    assert digest == "26efca2d22eac08c875f7b1a6062a414dd99dd7016132e21de8a1d2c23b42a5a"


def test_chapters_are_the_whole_novel() -> None:
    found = chapters()
    assert len(found) == 12
    assert found[0].startswith("Down the Rabbit-Hole Alice was beginning to get")
    assert found[-1].endswith("the happy summer days. THE END")
    headings = NOVEL.read_text().split("CHAPTER")[0].split()
    words = sum(len(chapter.split()) for chapter in found)
    assert len(NOVEL.read_text().split()) == len(headings) + words + 2 * len(found)


def test_passages_follow_each_other_and_end_with_sentences() -> None:
    chapter = chapters()[0]
    said = conversation(chapter, 5, 2000, 1000)
    passages = [
        saying.removesuffix(question) for saying, question in zip(said, QUESTIONS)
    ]
    assert chapter.startswith("".join(passages))
    assert all(passage.rstrip(" ')")[-1] in ".!?" for passage in passages)
    assert len(passages[0]) >= 2000
    assert all(1000 <= len(passage) < 2000 for passage in passages[1:])


def test_conversations_share_no_prefix() -> None:
    first = [conversation(chapter, 1, 500, 500)[0] for chapter in chapters()]
    assert all(one[:16] != other[:16] for one, other in combinations(first, 2))


def test_too_short_a_chapter_is_refused() -> None:
    with pytest.raises(ValueError, match="turns=3 of 10 and then 10 characters"):
        conversation("One sentence. Another one. ", 3, 10, 10)
