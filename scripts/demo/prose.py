# SPDX-License-Identifier: Apache-2.0
"""What the users say: a novel, read to the model passage by passage."""

import re
from itertools import cycle
from pathlib import Path

# Lewis Carroll, Alice's Adventures in Wonderland (1865), in the public domain:
# `alice29.txt` of the Canterbury corpus, as the sdist of brotli 1.2.1 carries it
# (sha256 7467306ee0feed4971260f3c87421154a05be571d944e9cb021a5713700c38f0),
# without control characters, trailing blanks and repeated empty lines.
NOVEL = Path(__file__).with_name("alice.txt")
QUESTIONS = (
    "Who speaks in this passage, and what do they want?",
    "What has changed since the part before?",
    "Which sentence would you leave out, and why?",
    "Tell it again in your own words.",
    "What do you expect to happen next?",
)
_SENTENCE_END = re.compile(r"[.!?][')]*\s")


def chapters() -> list[str]:
    """The novel's twelve chapters, each on one line."""
    text = NOVEL.read_text(encoding="ascii")
    bodies = re.split(r"^\s*CHAPTER [IVX]+$", text, flags=re.MULTILINE)[1:]
    return [" ".join(body.split()) for body in bodies]


def conversation(
    chapter: str, turns: int, first_chars: int, later_chars: int
) -> list[str]:
    """What the user says in each turn: the next passage, and a question on it.

    Args:
        chapter: the text to read from its beginning.
        turns: how many times the user speaks.
        first_chars: the first passage's characters, up to the sentence's end.
        later_chars: those of every later passage.

    Raises:
        ValueError: the chapter is too short.

    """
    said = []
    start = 0
    for turn, question in zip(range(turns), cycle(QUESTIONS)):
        wanted = later_chars if turn else first_chars
        end = _SENTENCE_END.search(chapter, start + wanted)
        if end is None:
            raise ValueError(
                f"turns={turns} of {first_chars} and then {later_chars} characters "
                f"read past the end of a chapter of {len(chapter)}: read less"
            )
        said.append(f"{chapter[start : end.end()]}{question}")
        start = end.end()
    return said
