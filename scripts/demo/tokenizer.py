# SPDX-License-Identifier: Apache-2.0
"""A real tokenizer for a model of random weights."""

import shutil
from importlib.resources import as_file, files
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import LlamaTokenizer, PreTrainedTokenizerBase

# Mistral's 32,768-piece SentencePiece model, which mistral-common ships.
TOKENIZER = "mistral_instruct_tokenizer_240323.model.v3"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "[INST]{{ message.content }}[/INST]"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def write_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Writes the tokenizer and its chat template to `folder`; returns it."""
    with TemporaryDirectory() as temporary:
        with as_file(files("mistral_common.data") / TOKENIZER) as source:
            shutil.copyfile(source, Path(temporary, "tokenizer.model"))
        tokenizer: PreTrainedTokenizerBase = LlamaTokenizer.from_pretrained(temporary)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer
