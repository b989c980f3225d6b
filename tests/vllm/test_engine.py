"""vLLM serves exported drafters: its output stays the target's, and it accepts as much as we say.

    make test-vllm
    make test-vllm PACELINE_DFLASH=runs/quickstart/drafter      # a trained drafter instead

The engine runs in its own environment (PACELINE_VLLM_PYTHON) on CPU in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.models.checkpoints import load_drafter
from paceline.models.decoding.speculative import generate_speculative
from paceline.models.records import AcceptanceTrace, Prompt, SamplingParams
from paceline.models.target import Target
from paceline.pipelines import export

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

Engine = Callable[[Path | None, str | None], dict]
TIE = 1e-3
"""Log-probabilities of the target's two best tokens that rounding alone may put in either order."""


def differences(served: dict, plain: dict) -> list[str]:
    """One line per prompt whose output differs from the plain engine's without being a tie."""
    found = []
    for i, (ours, theirs) in enumerate(zip(served["outputs"], plain["outputs"], strict=True)):
        pairs = zip(ours["token_ids"], theirs["token_ids"], strict=False)
        first = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            if len(ours["token_ids"]) != len(theirs["token_ids"]):
                found.append(f"prompt {i}: one output is a prefix of the other")
            continue
        (best, best_id), (second, second_id) = theirs["top_two"][first]
        if best - second > TIE or ours["token_ids"][first] not in (best_id, second_id):
            found.append(f"prompt {i} token {first}: gap {best - second:.5f}")
    return found


def acceptance_length(counters: dict) -> float:
    return 1.0 + counters["num_accepted_tokens"] / counters["num_drafts"]


@pytest.mark.parametrize("layout", ["vllm", pytest.param("speculators", marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_f54_the_engine_serves_the_drafter_that_was_trained(
    method: str,
    layout: str,
    engine: Engine,
    target: Target,
    prompts: list[Prompt],
    sampling: SamplingParams,
    num_speculative_tokens: int,
    drafter_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = drafter_folder(method)
    export.main([f"drafter={folder}", f"format={layout}", f"out={tmp_path / 'out'}"])
    served, plain = engine(tmp_path / "out", method), engine(None, None)
    assert differences(served, plain) == []

    drafter, _ = load_drafter(folder, target)
    traces = [
        generate_speculative(
            target, drafter, prompt.token_ids, sampling, num_speculative_tokens
        ).trace
        for prompt in prompts
    ]
    ours = AcceptanceTrace.concat(traces)
    theirs = served["counters"]
    print(f"{method} {layout}: vLLM {acceptance_length(theirs):.3f} {theirs}")
    print(
        f"{method} {layout}: ours {ours.acceptance_length:.3f} {ours.num_accepted_tokens_per_pos}"
    )
    # Below this a drafter whose layers or taps are swapped would pass unnoticed.
    assert ours.acceptance_length > 1.5
    assert acceptance_length(theirs) == pytest.approx(ours.acceptance_length, rel=0.03)
