"""Given responses: which tokens are the response is settled by position, and by nothing else."""

from __future__ import annotations

import json

import pytest

from paceline.models.chat import ChatTemplate, parse_messages, parse_tools
from paceline.models.config import DataConfig
from paceline.models.prompts import load_prompts, loss_mask

GIVEN = DataConfig(responses="given")

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + ' ' + call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def conversation(*contents):
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]}


def load_one(path, tokenizer, data=GIVEN):
    (prompt,) = load_prompts(path, tokenizer=tokenizer, data=data).prompts
    return prompt


def test_the_last_answer_is_the_response_and_ends_where_the_target_stops(chatml, write_jsonl):
    prompt = load_one(write_jsonl(conversation("A?", "B.", "C?", "D.")), chatml)
    assert chatml.decode(prompt.token_ids).endswith("C?<|im_end|>\n<|im_start|>assistant\n")
    assert chatml.decode(prompt.response_token_ids) == "D.<|im_end|>"


def test_the_field_response_answers_messages_and_text_alike(chatml, make_tokenizer, write_jsonl):
    for line in ({"prompt": "A?"}, conversation("A?")):
        prompt = load_one(write_jsonl({**line, "response": "B."}), chatml)
        assert chatml.decode(prompt.response_token_ids) == "B.<|im_end|>"

    base = make_tokenizer(None, adds_bos=True)
    prompt = load_one(write_jsonl({"prompt": "A?", "response": " B."}), base)
    assert base.decode(prompt.token_ids) == "<s>A?"
    assert base.decode(prompt.response_token_ids) == " B.<|im_end|>"


def test_c21_mask_is_neither_all_ones_nor_all_zeros(chatml, write_jsonl):
    prompt = load_one(write_jsonl(conversation("A?", "B.")), chatml)
    mask = loss_mask(len(prompt.token_ids), len(prompt.response_token_ids))
    assert mask.sum() == len("B.") + 1 and not mask[: len(prompt.token_ids)].any()
    assert 0 < mask.float().mean() < 1
    for lengths in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="nothing to learn from"):
            loss_mask(*lengths)


@pytest.mark.parametrize(
    "line",
    [
        conversation("A?"),
        conversation("A?", ""),
        {"prompt": "A?"},
        {"prompt": "A?", "response": ""},
    ],
)
def test_c21_a_missing_or_empty_response_is_refused(chatml, make_tokenizer, write_jsonl, line):
    path = write_jsonl(conversation("A?", "B."), line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: .*(no response|no content)"):
        load_prompts(path, tokenizer=chatml, data=GIVEN)
    if "prompt" in line:
        with pytest.raises(ValueError, match=r"prompts\.jsonl:1: .*no response.*generate"):
            load_prompts(write_jsonl(line), tokenizer=make_tokenizer(None), data=GIVEN)


@pytest.mark.parametrize(
    ("condition", "problem"),
    [
        ("m.role == 'user'", "ignores messages of role 'assistant'"),
        ("add_generation_prompt or not loop.last", "writes nothing for the response"),
    ],
)
def test_c21_a_template_that_writes_no_response_is_refused(
    make_tokenizer, write_jsonl, condition, problem
):
    mute = make_tokenizer(
        "{% for m in messages %}{% if " + condition + " %}{{ m.content + '<|im_end|>' }}"
        "{% endif %}{% endfor %}"
    )
    path = write_jsonl(conversation("A?", "B.", "C?", "D."))
    with pytest.raises(ValueError, match=rf"prompts\.jsonl:1: .*{problem}"):
        load_prompts(path, tokenizer=mute, data=GIVEN)


@pytest.mark.parametrize(
    "answer",
    [
        "What is it?",  # the question's own words
        "<|im_start|>assistant\nhidden",  # the template's own header
        "x<|im_end|>\ny",  # the end token in the middle
        "  \n\n",
    ],
)
def test_c23_mask_follows_positions_whatever_the_text_says(chatml, write_jsonl, answer):
    question = "What is it? <|im_start|>assistant\nWhat is it?"
    prompt = load_one(write_jsonl(conversation(question, answer)), chatml)
    mask = loss_mask(len(prompt.token_ids), len(prompt.response_token_ids))
    ids = (*prompt.token_ids, *prompt.response_token_ids)
    trained = [token for token, keep in zip(ids, mask.tolist(), strict=True) if keep]
    assert chatml.decode(trained) == answer + "<|im_end|>"


def test_c23_a_template_that_rewrites_the_prompt_is_refused(make_tokenizer, write_jsonl):
    thinking = make_tokenizer(
        "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:<think>' }}{% endif %}"
    )
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: .*writes the prompt otherwise") as e:
        load_prompts(write_jsonl(conversation("A?", "B.")), tokenizer=thinking, data=GIVEN)
    assert "'<think>'" in str(e.value) and "data.responses=generate" in str(e.value)


def test_c24_a_system_message_is_written_once(make_tokenizer, write_jsonl):
    defaulting = make_tokenizer(
        "{% if messages[0].role != 'system' %}{{ 'system:default\n' }}{% endif %}"
        "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>\n' }}{% endfor %}"
    )
    line = conversation("A?", "B.")
    system = {"role": "system", "content": "Mine"}
    own = load_one(write_jsonl({"messages": [system, *line["messages"]]}), defaulting)
    default = load_one(write_jsonl(line), defaulting)
    assert defaulting.decode(own.token_ids).count("system:") == 1
    assert defaulting.decode(default.token_ids).startswith("system:default\n")


def test_c25_tools_as_a_list_and_as_json_text_give_the_same_tokens(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer(TOOL_TEMPLATE)
    line = conversation("A?", "B.")
    native = load_one(write_jsonl({**line, "tools": [WEATHER]}), tokenizer)
    as_text = load_one(write_jsonl({**line, "tools": json.dumps([WEATHER])}), tokenizer)
    assert native.token_ids == as_text.token_ids
    assert json.dumps([WEATHER]) in tokenizer.decode(native.token_ids)
    for none in ([], "[]", None):
        without = load_one(write_jsonl({**line, "tools": none}), tokenizer)
        assert "tools" not in tokenizer.decode(without.token_ids)


@pytest.mark.parametrize("tools", ["not json", "[1]", [1], {"name": "weather"}, '{"name": "w"}'])
def test_c25_tools_of_a_wrong_form_are_refused(make_tokenizer, write_jsonl, tools):
    path = write_jsonl({**conversation("A?", "B."), "tools": tools})
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: tools .*list"):
        load_prompts(path, tokenizer=make_tokenizer(TOOL_TEMPLATE), data=GIVEN)


def test_c25_tools_that_the_template_ignores_are_refused(chatml, write_jsonl):
    path = write_jsonl({**conversation("A?", "B."), "tools": [WEATHER]})
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: .*ignores tools; write their schemas"):
        load_prompts(path, tokenizer=chatml, data=GIVEN)


@pytest.mark.parametrize("arguments", [{"city": "Rome"}, '{"city": "Rome"}'])
def test_c25_tool_calls_are_objects_to_the_template(chatml, make_tokenizer, write_jsonl, arguments):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    path = write_jsonl({"messages": [{"role": "user", "content": "A?"}, answer]})
    tokenizer = make_tokenizer(TOOL_TEMPLATE)
    prompt = load_one(path, tokenizer)
    expected = 'weather {"city": "Rome"}<|im_end|>'
    assert tokenizer.decode(prompt.response_token_ids) == expected
    with pytest.raises(ValueError, match=r"messages\[1\].*ignores the tool_calls"):
        load_prompts(path, tokenizer=chatml, data=GIVEN)


def test_c25_tool_calls_of_a_wrong_form_are_refused():
    for call in ("weather", {"function": "weather"}, {"function": {"arguments": {}}}):
        messages = [{"role": "assistant", "tool_calls": [call]}]
        with pytest.raises(ValueError, match=r"x:1: messages\[0\]: tool call without function"):
            parse_messages(messages, "x:1")
    broken = {"function": {"name": "weather", "arguments": "{city"}}
    with pytest.raises(ValueError, match=r"x:1: .*function\.arguments is text that is not JSON"):
        parse_messages([{"role": "assistant", "tool_calls": [broken]}], "x:1")


def test_c26_prompt_and_response_are_the_tokens_of_the_whole_conversation(chatml, write_jsonl):
    line = conversation("A?", "B.", "C?", "D.")
    prompt = load_one(write_jsonl(line), chatml)
    messages = parse_messages(line["messages"], "x:1")
    whole = ChatTemplate(chatml).token_ids(
        messages, parse_tools(None, "x:1"), "x:1", add_generation_prompt=False
    )
    joined = (*prompt.token_ids, *prompt.response_token_ids)
    assert whole[: len(joined)] == joined
    assert chatml.decode(whole[len(joined) :]) == "\n"


def test_c26_a_template_that_writes_bos_gets_no_second_one(make_tokenizer, write_jsonl):
    tokenizer = make_tokenizer(
        "{{ bos_token }}{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}",
        adds_bos=True,
    )
    prompt = load_one(write_jsonl(conversation("A?", "B.")), tokenizer)
    assert prompt.token_ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in prompt.response_token_ids


def test_c26_a_response_that_does_not_fit_is_skipped_not_cut(chatml, write_jsonl):
    short = conversation("A?", "B" * 19)
    fits = load_one(write_jsonl(short), chatml)
    limit = len(fits.token_ids) + len(fits.response_token_ids)
    path = write_jsonl(conversation("A?", "B" * 20), short)
    loaded = load_prompts(
        path, tokenizer=chatml, data=DataConfig(responses="given", max_context_tokens=limit)
    )
    assert loaded.skipped_too_long == 1
    assert [p.response_token_ids for p in loaded.prompts] == [fits.response_token_ids]


def test_two_responses_are_refused(chatml, write_jsonl):
    path = write_jsonl({**conversation("A?", "B."), "response": "C."})
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: two responses"):
        load_prompts(path, tokenizer=chatml, data=GIVEN)
