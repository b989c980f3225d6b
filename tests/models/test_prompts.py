"""Prompts from every kind of source, and one clear error for each kind of bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from paceline.models.config import DataConfig
from paceline.models.prompts import load_prompts

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
HELLO_TEXT = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def texts(prompt_set, tokenizer):
    return [tokenizer.decode(prompt.token_ids) for prompt in prompt_set.prompts]


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


# ---- Sources


def test_messages_are_written_by_the_chat_template_with_its_generation_prompt(chatml, write_jsonl):
    loaded = load_prompts(write_jsonl(HELLO), tokenizer=chatml, data=DataConfig())
    assert texts(loaded, chatml) == [HELLO_TEXT]
    assert loaded.prompts[0].response_token_ids is None
    assert loaded.prompts[0].domain == "default"


def test_prompt_text_becomes_one_user_message(chatml, write_jsonl):
    path = write_jsonl({"prompt": "Hello"})
    assert texts(load_prompts(path, tokenizer=chatml, data=DataConfig()), chatml) == [HELLO_TEXT]


def test_prompt_text_stays_as_it_is_for_a_tokenizer_without_template(make_tokenizer, write_jsonl):
    base = make_tokenizer(None, adds_bos=True)
    loaded = load_prompts(write_jsonl({"prompt": "Hello"}), tokenizer=base, data=DataConfig())
    assert texts(loaded, base) == ["<s>Hello"]


def test_prompt_field_names_the_field_that_holds_text_or_messages(chatml, write_jsonl):
    path = write_jsonl({"question": "Hello"}, {"question": HELLO["messages"], "prompt": "no"})
    loaded = load_prompts(path, tokenizer=chatml, data=DataConfig(prompt_field="question"))
    assert texts(loaded, chatml) == [HELLO_TEXT, HELLO_TEXT]


def test_text_parts_are_joined(chatml, write_jsonl):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    loaded = load_prompts(write_jsonl(user(parts)), tokenizer=chatml, data=DataConfig())
    assert texts(loaded, chatml) == [HELLO_TEXT]


def test_a_last_answer_is_left_to_the_target_when_responses_are_generated(chatml, write_jsonl):
    answered = [*HELLO["messages"], {"role": "assistant", "content": "Hi"}]
    path = write_jsonl({"messages": answered, "response": "Hi"})
    loaded = load_prompts(path, tokenizer=chatml, data=DataConfig(responses="generate"))
    assert texts(loaded, chatml) == [HELLO_TEXT]
    assert loaded.prompts[0].response_token_ids is None


def test_ids_and_domains_come_from_the_line_or_are_made(chatml, write_jsonl):
    path = write_jsonl({"id": 7, "domain": "math", **HELLO}, "", HELLO)
    loaded = load_prompts(path, tokenizer=chatml, data=DataConfig())
    assert [(p.prompt_id, p.domain) for p in loaded.prompts] == [
        ("7", "math"),
        ("prompt-000002", "default"),
    ]


def test_parquet_reads_structs_and_json_text(chatml, tmp_path):
    structs = pyarrow.table(
        {"messages": [HELLO["messages"], [{"role": "user", "content": "A", "name": "x"}]]}
    )
    pyarrow.parquet.write_table(structs, tmp_path / "structs.parquet")
    as_text = pyarrow.table({"messages": [json.dumps(HELLO["messages"])]})
    pyarrow.parquet.write_table(as_text, tmp_path / "text.parquet")

    loaded = load_prompts(str(tmp_path / "structs.parquet"), tokenizer=chatml, data=DataConfig())
    assert texts(loaded, chatml) == [HELLO_TEXT, HELLO_TEXT.replace("Hello", "A")]
    loaded = load_prompts(str(tmp_path / "text.parquet"), tokenizer=chatml, data=DataConfig())
    assert texts(loaded, chatml) == [HELLO_TEXT]


def test_a_folder_is_read_by_datasets_with_its_splits(chatml, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "Hello"}\n')
    (folder / "test.jsonl").write_text('{"prompt": "Bye"}\n')

    train = load_prompts(str(folder), tokenizer=chatml, data=DataConfig())
    test = load_prompts(f"{folder}:test", tokenizer=chatml, data=DataConfig())
    assert texts(train, chatml) == [HELLO_TEXT]
    assert texts(test, chatml) == [HELLO_TEXT.replace("Hello", "Bye")]


def test_the_hash_changes_with_what_a_run_sees_and_with_nothing_else(chatml, write_jsonl):
    def content_hash(data, *lines):
        return load_prompts(write_jsonl(*lines), tokenizer=chatml, data=data).content_hash

    one = content_hash(DataConfig(), HELLO)
    assert content_hash(DataConfig(limit=1), HELLO, user("More")) == one
    assert content_hash(DataConfig(), HELLO, user("More")) != one
    assert content_hash(DataConfig(), {**HELLO, "domain": "math"}) != one


# ---- Lengths and limits


def test_long_prompts_are_skipped_and_counted_and_never_cut(chatml, write_jsonl):
    fits = load_prompts(write_jsonl(HELLO), tokenizer=chatml, data=DataConfig()).prompts[0]
    path = write_jsonl(user("Hello!"), HELLO, user("x" * 60))
    data = DataConfig(max_context_tokens=len(fits.token_ids) + 1)

    loaded = load_prompts(path, tokenizer=chatml, data=data)
    assert [prompt.token_ids for prompt in loaded.prompts] == [fits.token_ids]
    assert loaded.skipped_too_long == 2


def test_a_prompt_that_leaves_no_room_for_one_token_is_too_long(chatml, write_jsonl):
    path = write_jsonl(HELLO)
    room = len(load_prompts(path, tokenizer=chatml, data=DataConfig()).prompts[0].token_ids)
    with pytest.raises(ValueError, match=r"none of its 1 prompts fits data\.max_context_tokens="):
        load_prompts(path, tokenizer=chatml, data=DataConfig(max_context_tokens=room))


def test_limits_count_the_prompts_that_are_kept(chatml, write_jsonl):
    path = write_jsonl(user("x" * 500), user("A"), user("B"), user("C"))
    data = DataConfig(max_context_tokens=100, limit=2, heldout_limit=1)
    kept = load_prompts(path, tokenizer=chatml, data=data)
    heldout = load_prompts(path, tokenizer=chatml, data=data, heldout=True)
    assert [len(kept.prompts), kept.skipped_too_long] == [2, 1]
    assert [len(heldout.prompts), heldout.skipped_too_long] == [1, 1]


# ---- Bad input: every error names the place and the remedy


def refuse(path, tokenizer, data=None, heldout=False):
    with pytest.raises(ValueError) as error:
        load_prompts(path, tokenizer=tokenizer, data=data or DataConfig(), heldout=heldout)
    return str(error.value)


def test_a_missing_file_is_named_with_its_key(chatml, tmp_path):
    missing = str(tmp_path / "none.jsonl")
    assert f"data.prompts={missing}: no such file" in refuse(missing, chatml)
    message = refuse(missing, chatml, heldout=True)
    assert "data.heldout=" in message and "check the path" in message
    assert "no such file" in refuse(str(tmp_path / "none.parquet"), chatml)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file_is_refused(chatml, tmp_path, content):
    (tmp_path / "empty.jsonl").write_text(content)
    message = refuse(str(tmp_path / "empty.jsonl"), chatml)
    assert "empty.jsonl is empty" in message and "one JSON object a line" in message


def test_an_empty_parquet_file_is_refused(chatml, tmp_path):
    table = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "empty.parquet")
    assert "is empty" in refuse(str(tmp_path / "empty.parquet"), chatml)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Hello there", "not JSON"),
        ('{"prompt": "cut', "not JSON"),
        ('["Hello"]', "a JSON list, not an object"),
        ('"Hello"', "a JSON str, not an object"),
    ],
)
def test_a_line_that_is_no_json_object_is_named(chatml, write_jsonl, line, problem):
    message = refuse(write_jsonl(HELLO, "", line), chatml)
    assert f"prompts.jsonl:3: {problem}" in message and "each line is one object" in message


def test_files_of_another_kind_are_refused(chatml, tmp_path):
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "bad.parquet").write_text("not parquet")
    (tmp_path / "list.csv").write_text("prompt\nHello\n")
    assert "bytes.jsonl is not UTF-8 text" in refuse(str(tmp_path / "bytes.jsonl"), chatml)
    assert "bad.parquet is not a Parquet file" in refuse(str(tmp_path / "bad.parquet"), chatml)
    assert "give a .jsonl file" in refuse(str(tmp_path / "list.csv"), chatml)


def test_an_unknown_builtin_lists_the_known_ones(chatml):
    assert "builtin:workload/heldout, builtin:workload/train" in refuse("builtin:wrkload", chatml)


def test_a_dataset_that_cannot_be_reached_is_named(chatml):
    message = refuse("nobody/no-such-dataset:test", chatml)
    assert "data.prompts=nobody/no-such-dataset:test" in message and "ID:SPLIT" in message


@pytest.mark.parametrize("line", [{"text": "Hello"}, {}, {"messages": []}, {"prompt": ""}])
def test_a_line_without_messages_is_named(chatml, write_jsonl, line):
    message = refuse(write_jsonl(HELLO, line), chatml)
    assert "prompts.jsonl:2: no messages or prompt" in message and "data.prompt_field=" in message


def test_a_missing_prompt_field_is_named(chatml, write_jsonl):
    message = refuse(write_jsonl({"prompt": "x"}), chatml, DataConfig(prompt_field="question"))
    assert "prompts.jsonl:1: no question (its fields: prompt)" in message


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ({"role": "user"}, "messages must be a list"),
        ("not json", "messages is text that is not JSON"),
        (["Hello"], r"messages\[0\] is not an object"),
        ([{"content": "x"}], r"messages\[0\]: unknown role None"),
        ([{"role": "human", "content": "x"}], r"unknown role 'human'; known: system, developer"),
        ([{"role": "user"}], "the user message has no content"),
        ([{"role": "user", "content": 3}], "content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only text parts can be read"),
        ([{"role": "system", "content": "x"}], "no user or tool message to answer"),
        ([{"role": "assistant", "content": "x"}], "no user or tool message to answer"),
    ],
)
def test_messages_of_a_wrong_form_are_named(chatml, write_jsonl, messages, problem):
    message = refuse(write_jsonl(HELLO, {"messages": messages}), chatml)
    assert re.search(rf"prompts\.jsonl:2: .*{problem}|prompts\.jsonl:2: {problem}", message)


def test_a_role_that_the_template_refuses_is_named(make_tokenizer, write_jsonl):
    strict = make_tokenizer(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    line = {"messages": [*HELLO["messages"], {"role": "tool", "content": "3"}]}
    message = refuse(write_jsonl(HELLO, line), strict)
    assert "prompts.jsonl:2:" in message and "no tools here" in message and "user, tool" in message


def test_a_role_that_the_template_drops_is_named(make_tokenizer, write_jsonl):
    forgetful = make_tokenizer(
        "{% for m in messages %}{% if m.role != 'developer' %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    line = {"messages": [{"role": "developer", "content": "Be brief"}, *HELLO["messages"]]}
    message = refuse(write_jsonl(HELLO, line), forgetful)
    assert "prompts.jsonl:2: messages[0]" in message and "'developer'" in message


def test_messages_without_a_chat_template_are_refused(make_tokenizer, write_jsonl):
    message = refuse(write_jsonl(HELLO), make_tokenizer(None))
    assert "prompts.jsonl:1: messages need a chat template" in message
    assert "give `prompt` text instead" in message


def test_an_id_used_twice_names_both_lines(chatml, write_jsonl):
    path = write_jsonl({"id": "a", **HELLO}, {"id": "b", **HELLO}, {"id": "a", "prompt": "x"})
    message = refuse(path, chatml)
    assert "prompts.jsonl:3: id 'a'" in message and "prompts.jsonl:1" in message


def test_fields_that_must_be_text_are_named(chatml, write_jsonl):
    assert "prompts.jsonl:1: domain must be text" in refuse(
        write_jsonl({**HELLO, "domain": 3}), chatml
    )
    assert "prompts.jsonl:1: prompt must be text" in refuse(write_jsonl({"prompt": 3}), chatml)


def test_errors_in_parquet_name_the_row(chatml, tmp_path):
    table = pyarrow.table({"prompt": ["Hello", None]})
    pyarrow.parquet.write_table(table, Path(tmp_path) / "rows.parquet")
    assert "rows.parquet row 2: no messages or prompt" in refuse(
        str(tmp_path / "rows.parquet"), chatml
    )
