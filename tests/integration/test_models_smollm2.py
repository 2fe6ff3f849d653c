"""The real model: four stages against the unsplit model in transformers, both fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_llama import Chain
from tokenizers import Tokenizer

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "2 + 2 = 4. 12 x 12 = ",
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def tokenizer(smollm2_bundle: Path) -> Any:
    return Tokenizer.from_file(str(smollm2_bundle / "tokenizer.json"))


@pytest.fixture(scope="module")
def chain(smollm2_bundle: Path) -> Chain:
    return Chain(smollm2_bundle)


def test_greedy_ids_equal_the_reference(chain: Chain, smollm2_reference: Any, tokenizer: Any) -> None:
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    found = chain.generate(prompts, NEW_TOKENS)
    for prompt, ids in zip(prompts, found, strict=True):
        with torch.inference_mode():
            logits = smollm2_reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.topk(2).values.diff().abs().flatten()
        for step, (token, best) in enumerate(zip(ids, logits.argmax(-1).tolist(), strict=True)):
            assert token == best or gaps[step] < 5e-4, f"step {step}: {token} instead of {best}"
    assert "Paris" in tokenizer.decode(found[0])


def test_the_description_says_how_a_chat_ends(chain: Chain, tokenizer: Any) -> None:
    pipeline = chain.pipeline
    assert pipeline.eos == [tokenizer.token_to_id("<|im_end|>")]
    assert pipeline.bos is None
    assert pipeline.special_tokens["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in pipeline.chat_template
    assert (pipeline.context_length, pipeline.vocab_size, pipeline.hidden_size) == (8192, 49152, 576)


@pytest.mark.slow
def test_tokenizer_equals_transformers_own_conversion(tokenizer: Any) -> None:
    from transformers import AutoTokenizer

    from keystage.bundle.source import source_files

    (path,) = source_files("smollm2")
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    texts = [
        *PROMPTS,
        "In 2024, 1,234 people paid $5.67 -- don't ask!  Two  spaces,\ttabs\n\n\nand lines.",
        "Größe, naïve, 東京 and 🙂🙂",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "",
    ]
    for text in texts:
        ids = tokenizer.encode(text).ids
        assert ids == theirs(text)["input_ids"], text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
