"""How fast the target decodes and verifies, beside transformers, and what speculation makes of it.

    paceline bench engine json=engine.json
    paceline bench engine drafter=runs/x/drafter json=engine.json      # with speculation

A round is one target pass over a cache of CONTEXT tokens, lm_head and argmax included. Whole
decodings ignore stop tokens, so that all contestants make the same number of tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from paceline.models.checkpoints import load_drafter
from paceline.models.config import TargetConfig
from paceline.models.decoding.engine import Engine
from paceline.models.decoding.requests import Request
from paceline.models.decoding.speculative import generate_plain, generate_speculative
from paceline.models.drafter import Drafter
from paceline.models.embedded import resolve_model
from paceline.models.kv_cache import SlotCache
from paceline.models.prompts import load_prompts
from paceline.models.records import AcceptanceTrace, Prompt, SamplingParams
from paceline.models.target import Target
from paceline.pipelines.benches.alternation import alternate, faster, paired_ratios
from paceline.pipelines.config import RunConfig
from paceline.pipelines.figure_document import Figure, figure, ratio_figure

CONTEXT = 128
BATCH_SIZES = (1, 8, 32)
PAIRED = "quartiles over alternating repeats"
CACHES = ("dynamic", "static")


def figures(config: RunConfig) -> dict[str, Figure]:
    """All figures of the bench; `small=true` measures the same on less."""
    found: dict[str, Figure] = {}
    with torch.no_grad():
        found |= round_figures(config)
        found |= decoding_figures(config)
        if config.drafter_dir is not None:
            found |= speculation_figures(config)
    return found


def load_target(config: TargetConfig, dtype: str) -> Target:
    """The target in another dtype, without stop tokens."""
    target = Target.load(config.model_copy(update={"dtype": dtype}))
    target.spec = replace(target.spec, eos_token_ids=())
    return target


def load_reference(config: TargetConfig, target: Target) -> Any:
    """transformers' own model of the target."""
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model(config.model), dtype=target.dtype, attn_implementation="sdpa"
    )
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.to(target.device).eval()


def target_round(target: Target, count: int) -> Callable[[], Tensor]:
    """Reads `count` tokens after CONTEXT ones and chooses the next of each; can be repeated."""
    cache = SlotCache(1, CONTEXT + count)
    ids = _ids(CONTEXT + count, target)
    positions = torch.arange(CONTEXT + count, device=target.device)[None]
    one = slice(0, 1)
    target.forward(ids[:, :CONTEXT], positions[:, :CONTEXT], cache, one)

    def run() -> Tensor:
        output = target.forward(ids[:, CONTEXT:], positions[:, CONTEXT:], cache, one)
        return target.logits(output.last_hidden_states).argmax(dim=-1)

    return run


def reference_round(model: Any, target: Target) -> Callable[[], Tensor]:
    """The same of transformers, one token: its cache is cropped back after each call."""
    ids = _ids(CONTEXT + 1, target)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids[:, :CONTEXT], past_key_values=cache)

    def run() -> Tensor:
        logits = model(input_ids=ids[:, CONTEXT:], past_key_values=cache).logits
        cache.crop(-1)
        return logits.argmax(dim=-1)

    return run


def round_figures(config: RunConfig) -> dict[str, Figure]:
    """Seconds of single rounds and their ratios."""
    repeats = 3 if config.small else 31
    found: dict[str, Figure] = {}
    for dtype, short in (("float32", "fp32"), ("bfloat16", "bf16")):
        target = load_target(config.target, dtype)
        reference = load_reference(config.target, target)
        weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
        memory = torch.empty(2**22 if config.small else 2**28, dtype=torch.float32)
        memory.zero_()
        rounds: dict[str, Callable[[], object]] = {
            f"tokens{count}": target_round(target, count) for count in (1, 4, 8)
        }
        rounds["transformers"] = reference_round(reference, target)
        rounds["read"] = memory.sum
        seconds = alternate(rounds, repeats=repeats, warmup=2)
        one = seconds["tokens1"]
        for count in (4, 8):
            ratios = paired_ratios(seconds[f"tokens{count}"], one)
            found[f"verify{count}_vs_decode1_{short}"] = ratio_figure(ratios, "lower", PAIRED)
        suffix = "" if dtype == "float32" else f"_{short}"
        ratios = paired_ratios(seconds["transformers"], one)
        found[f"decode1_vs_transformers{suffix}"] = ratio_figure(ratios, "higher", PAIRED)
        per_byte = [s / (memory.numel() * 4) for s in seconds["read"]]
        shares = paired_ratios([s * weights for s in per_byte], one)
        found[f"bandwidth_share_decode1{suffix}"] = ratio_figure(shares, "higher", PAIRED)
        found[f"decode1_ms_{short}"] = figure(statistics.median(one) * 1e3, "ms", "lower", len(one))
    return found


def decoding_figures(config: RunConfig) -> dict[str, Figure]:
    """Plain decoding of batches beside transformers' `generate`, the better of its caches."""
    new_tokens, repeats = (4, 1) if config.small else (64, 3)
    target = load_target(config.target, "float32")
    reference = load_reference(config.target, target)
    prompts = heldout_prompts(config, target)
    found = {}
    for size in BATCH_SIZES:
        batch = (prompts * size)[:size]
        sampling = SamplingParams(max_new_tokens=new_tokens)
        contestants: dict[str, Callable[[], object]] = {
            "ours": partial(_decode, target, batch, sampling)
        }
        for kind in CACHES:
            contestants[kind] = _generate(reference, batch, new_tokens, kind)
        seconds = alternate(contestants, repeats=repeats)
        best = faster(seconds, *CACHES)
        ratios = paired_ratios(seconds[best], seconds["ours"])
        found[f"plain_vs_transformers_b{size}"] = ratio_figure(ratios, "higher", PAIRED)
        rate = size * new_tokens / statistics.median(seconds["ours"])
        found[f"plain_tokens_per_second_b{size}"] = figure(rate, "tokens/s", "higher", repeats)
    return found


def speculation_figures(config: RunConfig) -> dict[str, Figure]:
    """Speculative beside plain decoding at batch 1, and the share of what its rounds allow.

    ideal = acceptance length x plain round / (draft + verify round), all measured here.
    """
    new_tokens, count = (8, 2) if config.small else (128, 16)
    steps = config.evaluate.num_speculative_tokens
    target = load_target(config.target, "float32")
    drafter, _ = load_drafter(config.drafter_folder, target)
    sampling = SamplingParams(max_new_tokens=new_tokens)
    ratios: list[float] = []
    traces: list[AcceptanceTrace] = []
    for prompt in heldout_prompts(config, target)[:count]:

        def speculate(ids: tuple[int, ...] = prompt.token_ids) -> None:
            traces.append(generate_speculative(target, drafter, ids, sampling, steps).trace)

        def decode(ids: tuple[int, ...] = prompt.token_ids) -> None:
            generate_plain(target, ids, sampling)

        seconds = alternate({"plain": decode, "speculative": speculate}, repeats=2, warmup=0)
        ratios += paired_ratios(seconds["plain"], seconds["speculative"])
    rounds = alternate(
        {
            "plain": target_round(target, 1),
            "verify": target_round(target, steps + 1),
            "draft": draft_round(drafter, target, steps),
        },
        repeats=3 if config.small else 31,
    )
    plain, verify, draft = (statistics.median(rounds[name]) for name in rounds)
    length = AcceptanceTrace.concat(traces).acceptance_length
    share = statistics.median(ratios) * (draft + verify) / (length * plain)
    return {
        "speculative_vs_plain_b1": ratio_figure(ratios, "higher", "quartiles over decodings"),
        "ideal_share_b1": figure(share, "ratio", "higher", len(ratios)),
        "acceptance_length": figure(length, "tokens/round", "higher", len(traces)),
        "plain_round_ms": figure(plain * 1e3, "ms", "lower", len(rounds["plain"])),
        "verify_round_ms": figure(verify * 1e3, "ms", "lower", len(rounds["verify"])),
        "draft_round_ms": figure(draft * 1e3, "ms", "lower", len(rounds["draft"])),
    }


def draft_round(drafter: Drafter, target: Target, steps: int) -> Callable[[], object]:
    """Takes the taps of two committed tokens and drafts `steps`; can be repeated."""
    ids = _ids(CONTEXT + 3, target)
    shape = (1, CONTEXT + 2, len(target.tap_layer_ids), target.spec.hidden_size)
    taps = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(target.device)
    cache, one = drafter.start(1, CONTEXT + 2 + steps), slice(0, 1)
    drafter.extend(cache, one, taps[:, :CONTEXT], ids[:, 1 : CONTEXT + 1], [CONTEXT])
    greedy = [SamplingParams()]

    def run() -> object:
        drafter.extend(cache, one, taps[:, CONTEXT:], ids[:, CONTEXT + 1 :], [2])
        proposals = drafter.propose(cache, one, ids[:, -1], steps, greedy, [None])
        cache.lengths[0] = CONTEXT
        return proposals

    return run


def heldout_prompts(config: RunConfig, target: Target) -> list[Prompt]:
    return list(
        load_prompts(
            config.data.heldout, tokenizer=target.tokenizer, data=config.data, heldout=True
        ).prompts
    )


def _decode(target: Target, prompts: list[Prompt], sampling: SamplingParams) -> list[object]:
    if len(prompts) == 1:
        return [generate_plain(target, prompts[0].token_ids, sampling)]
    longest = max(len(prompt.token_ids) for prompt in prompts) + sampling.max_new_tokens
    engine = Engine(target, num_slots=len(prompts), capacity=longest)
    return list(engine.run(Request(prompt=p, sampling=sampling) for p in prompts))


def _generate(
    model: Any, prompts: list[Prompt], new_tokens: int, cache: str
) -> Callable[[], object]:
    longest = max(len(prompt.token_ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64, device=model.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padding comes first
        ids[row, longest - len(prompt.token_ids) :] = torch.tensor(prompt.token_ids)
        mask[row, longest - len(prompt.token_ids) :] = 1
    return lambda: model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        do_sample=False,
        cache_implementation=cache,
    )


def _ids(count: int, target: Target) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    high = min(target.spec.vocab_size, 250)
    return torch.randint(4, high, (1, count), generator=generator).to(target.device)
