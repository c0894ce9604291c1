# SPDX-License-Identifier: Apache-2.0
"""The demo's model: a folder that transformers reads, and answers worth comparing."""

from pathlib import Path

import pytest
import torch
from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from bench.suite.model import QWEN3, Shape, write_model
from demo.prose import chapters, conversation
from demo.tokenizer import TOKENIZER, write_tokenizer

SHAPE = Shape(256, 512, 4, 4, 2, 64, vocab=32768, max_len=4096)
SAID = range(1100, 9000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return write_tokenizer(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Qwen3ForCausalLM:
    write_model(folder, SHAPE, "cpu", QWEN3, SAID)
    model, info = Qwen3ForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    return model


def answer(model: Qwen3ForCausalLM, prompt: list[int], tokens: int = 24) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, eos_token_id=-1
    )
    return output[0, len(prompt) :].tolist()


def test_shape_counts_parameters_and_kv(folder: Path, model: Qwen3ForCausalLM) -> None:
    assert model.dtype == torch.float32
    assert write_model(folder, SHAPE, "cpu", QWEN3, SAID) == model.num_parameters()
    cache = model(torch.tensor([[1, 1100, 1101]])).past_key_values
    if hasattr(cache, "layers"):
        kept = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    else:
        # Transformers of the first releases.
        kept = [*cache.key_cache, *cache.value_cache]
    held = sum(tensor.nbytes for tensor in kept)
    assert held == 3 * SHAPE.kv_bytes_per_token(model.dtype.itemsize)


def test_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_model(folder, SHAPE, "cpu", QWEN3, SAID)
    for seed, same in ((0, True), (1, False)):
        write_model(tmp_path, SHAPE, "cpu", QWEN3, SAID, seed)
        one, other = (
            (where / "rest.safetensors").read_bytes() for where in (folder, tmp_path)
        )
        assert (one == other) is same


def test_tokenizer_is_the_sentencepiece_one(tokenizer: PreTrainedTokenizerBase) -> None:
    import mistral_common.data

    path = Path(mistral_common.data.__path__[0], TOKENIZER)
    reference = SentencePieceTokenizer(str(path))
    for chapter in chapters():
        ids = tokenizer(chapter, add_special_tokens=False).input_ids
        assert ids == reference.encode(chapter, bos=False, eos=False)


def test_later_turns_extend_the_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    messages: list[dict[str, str]] = []
    prompts = []
    for saying in conversation(chapters()[0], 3, 500, 500):
        messages.append({"role": "user", "content": saying})
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False).input_ids)
        messages.append({"role": "assistant", "content": "oddly enoughRab hearing"})
    for shorter, longer in zip(prompts, prompts[1:]):
        assert longer[: len(shorter)] == shorter
        assert len(longer) > len(shorter)


def test_answers_are_varied(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    answers = [
        answer(model, tokenizer(conversation(chapter, 1, 600, 0)[0]).input_ids)
        for chapter in chapters()[:4]
    ]
    assert len(set(map(tuple, answers))) == len(answers)
    for tokens in answers:
        assert set(tokens) <= set(SAID)
        assert len(set(tokens)) >= 0.75 * len(tokens)


def test_answer_depends_on_an_early_token(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    # Else the demo could not tell wrong KV from right KV.
    (saying,) = conversation(chapters()[0], 1, 1500, 0)
    # On some tokens no answer depends. Releases of transformers differ in
    # whether they put one in front, and so in which is which.
    prompt = tokenizer(saying, add_special_tokens=False).input_ids
    changed = prompt.copy()
    changed[20] = prompt[20] + 1
    assert answer(model, prompt) != answer(model, changed)
