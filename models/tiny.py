"""Tiny random targets of each family, with a byte tokenizer: for tests and the debug recipe.

Weights are random with a fixed seed, a little larger than usual so that greedy text varies. Each
folder holds a config, safetensors, a tokenizer of 256 bytes plus specials and a chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

TINY_FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "mistral")
NUM_LAYERS = 5
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tiny_target(family: str, folder: Path, *, seed: int = 0) -> None:
    """Write a random target of `family` (see TINY_FAMILIES) into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = _byte_tokenizer()
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_tiny_config(family, tokenizer), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.12)
    model.save_pretrained(folder)


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|mask|>"],
        chat_template=CHAT_TEMPLATE,
    )


def _tiny_config(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    from transformers import AutoConfig

    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "gemma3":
        # Alternate layer types, so that the sliding mask is really used at tiny lengths.
        shape["sliding_window"] = 8
        kinds = ["sliding_attention", "full_attention"]
        shape["layer_types"] = [kinds[i % 2] for i in range(NUM_LAYERS)]
        return AutoConfig.for_model("gemma3_text", **shape, query_pre_attn_scalar=8)
    if family == "mistral":
        shape["sliding_window"] = 8
    return AutoConfig.for_model(family, **shape)
