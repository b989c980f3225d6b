"""A real vLLM engine in its own environment, and drafters small enough to train for one test."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from paceline.models.checkpoints import new_record, save_drafter
from paceline.models.config import (
    BackboneConfig,
    DataConfig,
    DrafterConfig,
    LossConfig,
    ObjectiveConfig,
    TargetConfig,
    WeightConfig,
)
from paceline.models.decoding.engine import Engine
from paceline.models.decoding.requests import CapturedSequence, Request
from paceline.models.drafter import Drafter, build_drafter
from paceline.models.embedded import resolve_model
from paceline.models.objectives.objective import compute_objective
from paceline.models.prompts import load_prompts
from paceline.models.records import Prompt, SamplingParams, TrainBatch
from paceline.models.target import Target
from paceline.models.vocab import most_frequent_vocab
from paceline.models.warm_start import start_from_target

TARGET = TargetConfig(device="cpu")
SERVE = Path(__file__).with_name("serve.py")
SAMPLING = SamplingParams(max_new_tokens=64)
MAX_MODEL_LEN = 512
DRAFT_VOCAB_SIZE = 2048


@dataclass(frozen=True)
class Recipe:
    """Few steps, to where some drafts are accepted and some are not."""

    config: DrafterConfig
    taps: tuple[int, ...]
    steps: int
    lr: float


RECIPES = {
    "eagle3": Recipe(
        DrafterConfig(
            method="eagle3",
            backbone=BackboneConfig(
                kind="autoregressive", ttt_steps=4, init_from_target_layers=(29,)
            ),
            draft_vocab_size=DRAFT_VOCAB_SIZE,
        ),
        taps=(1, 14, 26),
        steps=18,
        lr=1e-3,
    ),
    "dflash": Recipe(
        DrafterConfig(
            method="dflash",
            backbone=BackboneConfig(
                kind="block",
                num_layers=2,
                block_size=8,
                anchors_per_sequence=8,
                init_from_target_layers=(28, 29),
            ),
            draft_vocab_size=DRAFT_VOCAB_SIZE,
        ),
        taps=(1, 27),
        steps=72,
        lr=4e-3,
    ),
}
WARMUP_STEPS = 10
Serve = Callable[[Path | None, str | None], dict]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("PACELINE_VLLM_PYTHON")
    if python is None:
        pytest.skip("PACELINE_VLLM_PYTHON is not set; `make test-vllm` builds the environment")
    return python


@pytest.fixture(scope="session")
def sampling() -> SamplingParams:
    return SAMPLING


@pytest.fixture(scope="session")
def num_speculative_tokens() -> int:
    return 4


@pytest.fixture(scope="session")
def target() -> Target:
    torch.set_num_threads(os.cpu_count() or 1)  # a real model, unlike those of the other tests
    return Target.load(TARGET)


@pytest.fixture(scope="session")
def prompts(target: Target) -> list[Prompt]:
    """Two held-out prompts of each domain."""
    loaded = load_prompts(
        "builtin:workload/heldout", tokenizer=target.tokenizer, data=DataConfig(), heldout=True
    ).prompts
    domains = sorted({prompt.domain for prompt in loaded})
    return [p for d in domains for p in [p for p in loaded if p.domain == d][:2]]


@pytest.fixture(scope="session")
def engine(
    vllm_python: str,
    prompts: list[Prompt],
    sampling: SamplingParams,
    num_speculative_tokens: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Serve:
    """Runs the prompts through vLLM, greedily, with an exported drafter or (None, None) plainly."""
    results: dict[Path | None, dict] = {}

    def run(drafter: Path | None, method: str | None) -> dict:
        if drafter not in results:
            folder = tmp_path_factory.mktemp("engine")
            request = {
                "target": resolve_model(TARGET.model),
                "drafter": None if drafter is None else str(drafter),
                "method": method,
                "num_speculative_tokens": num_speculative_tokens,
                "prompts": [list(prompt.token_ids) for prompt in prompts],
                "max_tokens": sampling.max_new_tokens,
                "max_model_len": MAX_MODEL_LEN,
            }
            (folder / "request.json").write_text(json.dumps(request))
            done = subprocess.run(
                [vllm_python, str(SERVE), "request.json", "result.json"],
                cwd=folder,
                # Threads of two engines that wait for each other on the same cores never finish.
                env={**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            results[drafter] = json.loads((folder / "result.json").read_text())
        return results[drafter]

    return run


@pytest.fixture(scope="session")
def drafter_folder(
    target: Target, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Folder of a drafter of a method: PACELINE_EAGLE3 or PACELINE_DFLASH, else one trained here.

    It learns the target's answers to the very prompts that are served, so that minutes are enough.
    """
    made: dict[str, Path] = {}

    def folder(method: str) -> Path:
        given = os.environ.get(f"PACELINE_{method.upper()}")
        if given is not None:
            return Path(given)
        if method not in made:
            drafter = train_drafter(target, RECIPES[method], prompts)
            made[method] = tmp_path_factory.mktemp(method)
            record = new_record(drafter.config, target)
            save_drafter(made[method], drafter, record)
        return made[method]

    return folder


def train_drafter(target: Target, recipe: Recipe, prompts: list[Prompt]) -> Drafter:
    """A drafter trained on the target's answers to `prompts`, all of them in each step."""
    target.tap(recipe.taps)
    batch = _batch(_answers(target, prompts))
    counts = torch.bincount(batch.input_ids, minlength=target.spec.vocab_size)
    vocab = most_frequent_vocab(counts, DRAFT_VOCAB_SIZE)
    drafter = build_drafter(
        recipe.config,
        target.spec,
        tap_layer_ids=recipe.taps,
        embedding_weight=target.embedding_weight,
        lm_head_weight=target.lm_head_weight,
        vocab=vocab,
    )
    start_from_target(drafter, target)
    teacher_head_VD = target.lm_head_weight[vocab.target_ids]
    objective = ObjectiveConfig(loss=LossConfig(ce=1.0), weight=WeightConfig(kind="exp", value=4.0))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=recipe.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARMUP_STEPS, 1.0, WARMUP_STEPS)
    generator = torch.Generator().manual_seed(0)
    for _ in range(recipe.steps):
        rows = drafter.training_forward(batch, generator)
        result = compute_objective(drafter, rows, batch, teacher_head_VD, (objective,))
        (result.loss_sum / result.weight_sum).backward()
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
    return drafter


def _answers(target: Target, prompts: list[Prompt]) -> list[CapturedSequence]:
    engine = Engine(
        target, num_slots=len(prompts), capacity=MAX_MODEL_LEN, capture_dtype=torch.float32
    )
    return list(engine.run(Request(prompt=prompt, sampling=SAMPLING) for prompt in prompts))


def _batch(sequences: list[CapturedSequence]) -> TrainBatch:
    lengths = torch.tensor([len(sequence.token_ids) for sequence in sequences])
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    masks = [torch.arange(len(s.token_ids)) >= len(s.prompt.token_ids) for s in sequences]
    return TrainBatch(
        input_ids=torch.cat([sequence.token_ids for sequence in sequences]),
        position_ids=torch.cat([torch.arange(int(length)) for length in lengths]),
        document_ids=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        cu_seqlens=cu_seqlens,
        loss_mask=torch.cat(masks),
        aux_hidden_states=torch.cat([s.aux_hidden_states for s in sequences]),
        last_hidden_states=torch.cat([s.last_hidden_states for s in sequences]),
    )
