"""The prompts that come with Paceline: four domains, nothing shared by its parts."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.models.config import DataConfig
from paceline.models.prompts import load_prompts

DOMAINS = {"math", "code", "chat", "tool_calls"}


@pytest.fixture(scope="module")
def workload(make_tokenizer):
    tokenizer = make_tokenizer()
    return {
        part: load_prompts(
            f"builtin:workload/{part}", tokenizer=tokenizer, data=DataConfig()
        ).prompts
        for part in ("train", "heldout")
    }


def test_both_parts_cover_the_four_domains_evenly(workload):
    assert Counter(p.domain for p in workload["train"]) == dict.fromkeys(DOMAINS, 100)
    assert Counter(p.domain for p in workload["heldout"]) == dict.fromkeys(DOMAINS, 20)


def test_no_prompt_and_no_id_occurs_twice(workload):
    prompts = [*workload["train"], *workload["heldout"]]
    assert len({p.token_ids for p in prompts}) == len(prompts)
    assert len({p.prompt_id for p in prompts}) == len(prompts)


def test_a_limit_keeps_the_domains_in_balance(make_tokenizer):
    loaded = load_prompts(
        "builtin:workload/train", tokenizer=make_tokenizer(), data=DataConfig(limit=40)
    )
    assert Counter(p.domain for p in loaded.prompts) == dict.fromkeys(DOMAINS, 10)
