"""Greedy decoding of token prompts with a real vLLM engine, run inside vLLM's own environment.

    <vllm environment>/bin/python tests/vllm/serve.py request.json result.json

The request: `target` (a folder), `drafter` (a folder) and `method` or null for both, the number of
`num_speculative_tokens`, `prompts` (lists of token ids), `max_tokens`, `max_model_len`. The result:
per prompt the generated `token_ids` and the top two log-probabilities at each of them, and the
engine's own counters of speculation. Imports nothing of Paceline, which is not installed there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
# Pinned threads of vLLM starve when anything else runs on the same cores.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

COUNTERS = {
    "vllm:spec_decode_num_drafts": "num_drafts",
    "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "num_accepted_tokens_per_pos",
}


def main(argv: list[str]) -> None:
    request = json.loads(Path(argv[0]).read_text())
    result = serve(request)
    Path(argv[1]).write_text(json.dumps(result))


def serve(request: dict) -> dict:
    """Decode the request's prompts one after another and read the engine's counters."""
    from vllm import LLM, SamplingParams, TokensPrompt

    speculative_config = None
    if request["drafter"] is not None:
        speculative_config = {
            "model": request["drafter"],
            "method": request["method"],
            "num_speculative_tokens": request["num_speculative_tokens"],
        }
    llm = LLM(
        model=request["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=request["max_model_len"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative_config,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=request["max_tokens"], logprobs=2, detokenize=False
    )
    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in request["prompts"]]
    started = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {
        "outputs": [_output(output.outputs[0]) for output in outputs],
        "seconds": seconds,
        "counters": _counters(llm),
    }


def _output(completion) -> dict:
    top_two = [
        sorted(((entry.logprob, token) for token, entry in step.items()), reverse=True)[:2]
        for step in completion.logprobs
    ]
    return {"token_ids": list(completion.token_ids), "top_two": top_two}


def _counters(llm) -> dict:
    counters = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            value = metric.values if hasattr(metric, "values") else metric.value
            counters[COUNTERS[metric.name]] = value
    return counters


if __name__ == "__main__":
    main(sys.argv[1:])
