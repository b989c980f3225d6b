"""The numbers of a target that a drafter is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """The numbers of a target that a drafter is built from."""

    model: str
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    mask_token_id: int


def read_spec(model: Any, tokenizer: Any, name: str) -> TargetSpec:
    """The spec of a loaded transformers model and its tokenizer."""
    config = model.get_decoder().config
    values = config.to_dict()
    rope = values.get("rope_parameters") or {}
    # Gemma keeps one set per layer type; its full-attention layers carry the long-range theta.
    rope = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    eos = model.generation_config.eos_token_id
    eos_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    return TargetSpec(
        model=name,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        num_attention_heads=heads,
        num_key_value_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or config.hidden_size // heads,
        intermediate_size=config.intermediate_size,
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_position_embeddings=config.max_position_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=tuple(sorted(eos_ids)),
        mask_token_id=_mask_token_id(tokenizer, model.get_input_embeddings().weight.shape[0]),
    )


def _mask_token_id(tokenizer: Any, vocab_size: int) -> int:
    """An id that text never holds: a mask or reserved token, else unk, pad or the last id."""
    vocab = tokenizer.get_vocab()
    for token in ("<|mask|>", "<mask>", "[MASK]", "<|fim_pad|>", "<reponame>", "<unused0>"):
        if token in vocab:
            return vocab[token]
    for token_id in (tokenizer.pad_token_id, tokenizer.unk_token_id):
        if token_id is not None and token_id != tokenizer.eos_token_id:
            return token_id
    return vocab_size - 1
