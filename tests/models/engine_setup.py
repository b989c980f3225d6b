"""Tiny random targets, drafters that accept little, and engines of them."""

from __future__ import annotations

import torch

from paceline.models.config import BackboneConfig, DrafterConfig, TargetConfig
from paceline.models.decoding.engine import Engine
from paceline.models.decoding.requests import CapturedSequence, Request
from paceline.models.drafter import Drafter, build_drafter
from paceline.models.records import Prompt, SamplingParams
from paceline.models.target import Target

TAPS = (0, 1, 3)
STEPS = 3
CAPACITY = 64
BACKBONES = {
    "fill_in": BackboneConfig(kind="block", num_layers=2, block_size=6),
    "shift": BackboneConfig(kind="block", num_layers=1, block_size=4, label_layout="shift"),
    "eagle3": BackboneConfig(kind="autoregressive"),
    "eagle31": BackboneConfig(kind="autoregressive", norm_output=True),
}
GREEDY = SamplingParams(max_new_tokens=20)
SAMPLED = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=5, max_new_tokens=20)


def load(family: str = "llama") -> Target:
    target = Target.load(TargetConfig(model=f"builtin:tiny-{family}", device="cpu"))
    target.tap(TAPS)
    return target


def drafter_for(target: Target, name: str = "eagle3", seed: int = 0) -> Drafter:
    drafter = build_drafter(
        DrafterConfig(backbone=BACKBONES[name]),
        target.spec,
        tap_layer_ids=TAPS,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
        seed=seed,
    )
    return drafter.eval()


def prompt(i: int, length: int | None = None) -> Prompt:
    generator = torch.Generator().manual_seed(i)
    count = length or 4 + 3 * (i % 4)
    ids = torch.randint(4, 250, (count,), generator=generator).tolist()
    return Prompt(prompt_id=str(i), domain="d", token_ids=tuple(ids))


def engine_of(target: Target, slots: int, drafter: Drafter | None = None, **options) -> Engine:
    return Engine(
        target,
        num_slots=slots,
        capacity=CAPACITY,
        capture_dtype=torch.float32,
        drafter=drafter,
        num_speculative_tokens=STEPS if drafter else 0,
        **options,
    )


def serve(engine: Engine, requests: list[Request]) -> dict[str, CapturedSequence]:
    ended = {sequence.prompt.prompt_id: sequence for sequence in engine.run(requests)}
    assert len(ended) == len(requests)
    return ended


def response(sequence: CapturedSequence) -> tuple[int, ...]:
    return tuple(sequence.token_ids[len(sequence.prompt.token_ids) :].tolist())
