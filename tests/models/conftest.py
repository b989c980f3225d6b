"""A tokenizer small enough to read: one token a byte, and the special tokens of ChatML."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MakeTokenizer = Callable[..., PreTrainedTokenizerBase]


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """`make_tokenizer(chat_template)`: by default ChatML; None is a base model's tokenizer."""

    def make(chat_template: str | None = CHATML, adds_bos: bool = False) -> PreTrainedTokenizerBase:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocab = {character: token for token, character in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
        if adds_bos:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
            )
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="<|im_end|>",
            chat_template=chat_template,
        )

    return make


@pytest.fixture(scope="session")
def chatml(make_tokenizer: MakeTokenizer) -> PreTrainedTokenizerBase:
    """The ChatML tokenizer."""
    return make_tokenizer()


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """`write_jsonl(*lines)`: path of a file of these lines; a line is an object or raw text."""

    def write(*lines: dict[str, Any] | str) -> str:
        path = tmp_path / "prompts.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(text + "\n" for text in texts))
        return str(path)

    return write
