"""Prompts of a run, tokenised: from JSONL, Parquet, a `datasets` id or the workload shipped here.

A line has `messages` (OpenAI chat, with `tools` if any) or `prompt` (text), and may have `domain`,
`id` and `response`:

    {"id": "math-0001", "domain": "math", "messages": [{"role": "user", "content": "2 + 2?"}]}
    {"prompt": "2 + 2?", "response": "4"}

Text is wrapped as one user message when the tokenizer has a chat template. What the target answers
and what it was given are told apart by token position alone, `loss_mask`; text is never searched.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.models.chat import ChatTemplate, Message, parse_messages, parse_tools
from paceline.models.config import DataConfig
from paceline.models.prompt_rows import read_rows
from paceline.models.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of one source, in its order."""

    prompts: list[Prompt]
    skipped_too_long: int
    """Prompts left out because they (or their given response) do not fit max_context_tokens."""
    source: str
    content_hash: str
    """sha256 of ids, domains and token ids: equal exactly when a run sees the same prompts."""


def load_prompts(
    spec: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    heldout: bool = False,
) -> PromptSet:
    """Reads and tokenises the prompts of `spec` (see `read_rows` for its forms).

    With data.responses=generate a last assistant message is left out: the target answers instead.
    With data.responses=given that message, or the field `response`, is the response. A prompt that
    leaves no room for a response in data.max_context_tokens is skipped and counted; the limit
    (data.heldout_limit if `heldout`, else data.limit) counts the prompts that are kept.

    Raises ValueError naming file, line or key and the remedy for data that cannot be used.
    """
    key = "data.heldout" if heldout else "data.prompts"
    limit = data.heldout_limit if heldout else data.limit
    reader = _RowReader(tokenizer, data)
    prompts: list[Prompt] = []
    places: dict[str, str] = {}
    skipped = 0
    for place, row in read_rows(spec, key):
        prompt = reader.prompt(row, place, default_id=f"prompt-{len(places) + 1:06d}")
        if prompt.prompt_id in places:
            raise ValueError(
                f"{place}: id {prompt.prompt_id!r} is also the id of {places[prompt.prompt_id]}; "
                "give each prompt its own, or none at all"
            )
        places[prompt.prompt_id] = place
        length = len(prompt.token_ids) + max(1, len(prompt.response_token_ids or ()))
        if length > data.max_context_tokens:
            skipped += 1
            continue
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise ValueError(
            f"{key}={spec}: none of its {skipped} prompts fits data.max_context_tokens="
            f"{data.max_context_tokens}; raise it or give shorter prompts"
        )
    return PromptSet(
        prompts=prompts, skipped_too_long=skipped, source=spec, content_hash=_hash(prompts)
    )


def loss_mask(num_prompt_tokens: int, num_response_tokens: int) -> Tensor:
    """Loss mask [L] bool of a prompt followed by its response: True on the response.

    Raises ValueError if there is no prompt or no response: an all-ones mask trains on the prompt,
    an all-zeros mask on nothing.
    """
    if num_prompt_tokens < 1 or num_response_tokens < 1:
        raise ValueError(
            f"a sequence of {num_prompt_tokens} prompt and {num_response_tokens} response tokens "
            "has nothing to learn from: both need at least one"
        )
    return torch.arange(num_prompt_tokens + num_response_tokens) >= num_prompt_tokens


def _hash(prompts: list[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        fields = (prompt.prompt_id, prompt.domain, prompt.token_ids, prompt.response_token_ids)
        digest.update(json.dumps(fields).encode())
    return digest.hexdigest()


class _RowReader:
    """Turns rows into prompts for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.template = ChatTemplate(tokenizer) if tokenizer.chat_template else None

    def prompt(self, row: dict[str, Any], place: str, default_id: str) -> Prompt:
        content = self._content(row, place)
        given = self.data.responses == "given"
        response = _text_field(row, "response", place) if given else None
        if isinstance(content, str) and self.template is None:
            prompt_ids, response_ids = self._raw(content, response, place)
        else:
            messages = self._with_response(content, response, place)
            prompt_ids, response_ids = self._chat(messages, row.get("tools"), place)
        if not prompt_ids:
            raise ValueError(f"{place}: the prompt has no tokens: give it text")
        return Prompt(
            prompt_id=str(row.get("id", default_id)),
            domain=_text_field(row, "domain", place) or "default",
            token_ids=prompt_ids,
            response_token_ids=response_ids,
        )

    def _content(self, row: dict[str, Any], place: str) -> str | list[Message]:
        """The text or the messages of a row. A field of the user's choice may hold either."""
        names = [self.data.prompt_field] if self.data.prompt_field else ["messages", "prompt"]
        name = next((name for name in names if row.get(name)), None)
        if name is None:
            raise ValueError(
                f"{place}: no {' or '.join(names)} (its fields: {', '.join(row) or 'none'}); add "
                "it, or name the field that holds the prompt with data.prompt_field="
            )
        value = row[name]
        if name == "messages" or isinstance(value, list):
            return parse_messages(value, place)
        if not isinstance(value, str):
            raise ValueError(f"{place}: {name} must be text or messages, not {value!r:.60}")
        return value

    def _with_response(
        self, content: str | list[Message], response: str | None, place: str
    ) -> list[Message]:
        """Messages that end with the response, where the row has one."""
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if not response:
            return messages
        if messages[-1]["role"] == "assistant":
            raise ValueError(
                f"{place}: two responses, the last message and the field `response`; remove one"
            )
        return [*messages, {"role": "assistant", "content": response}]

    def _raw(
        self, text: str, response: str | None, place: str
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Token ids of a prompt, and of its given response closed by the end token."""
        prompt_ids = tuple(self.tokenizer(text)["input_ids"])
        if self.data.responses == "generate":
            return prompt_ids, None
        if not response:
            raise ValueError(f"{place}: {_NO_RESPONSE}")
        # Tokenised apart from the prompt, so that the border between them is a token border.
        response_ids = self.tokenizer(response, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return prompt_ids, (*response_ids, *([] if end is None else [end]))

    def _chat(
        self, messages: list[Message], raw_tools: Any, place: str
    ) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Token ids of all messages but the response, and of the response if it is given."""
        if self.template is None:
            raise ValueError(
                f"{place}: messages need a chat template, and the target's tokenizer has none; "
                "give `prompt` text instead, or set target.model to an instruct model"
            )
        given = self.data.responses == "given"
        tools = parse_tools(raw_tools, place)
        answered = messages[-1]["role"] == "assistant"
        question = messages[:-1] if answered else messages
        if given and not answered:
            raise ValueError(f"{place}: {_NO_RESPONSE}")
        if not question or question[-1]["role"] not in ("user", "tool"):
            raise ValueError(
                f"{place}: no user or tool message to answer; its roles are: "
                f"{', '.join(message['role'] for message in messages)}"
            )
        prompt_ids = self.template.token_ids(question, tools, place, add_generation_prompt=True)
        if not given:
            return prompt_ids, None
        full_ids = self.template.token_ids(messages, tools, place, add_generation_prompt=False)
        return prompt_ids, self._response_ids(prompt_ids, full_ids, place)

    def _response_ids(
        self, prompt_ids: tuple[int, ...], full_ids: tuple[int, ...], place: str
    ) -> tuple[int, ...]:
        """What follows the prompt, up to the end token that the target itself would stop at."""
        if full_ids[: len(prompt_ids)] != prompt_ids:
            same = next(
                i
                for i, token in enumerate(prompt_ids)
                if i >= len(full_ids) or full_ids[i] != token
            )
            raise ValueError(
                f"{place}: the chat template writes the prompt otherwise once the response follows "
                f"(from token {same}: {self._show(prompt_ids[same:])} becomes "
                f"{self._show(full_ids[same:])}), so the response has no position; use "
                "data.responses=generate, or a template that keeps its generation prompt"
            )
        response_ids = full_ids[len(prompt_ids) :]
        end = self.tokenizer.eos_token_id
        if end in response_ids:
            # Templates write a line break after the end token, which the target never produces.
            last = len(response_ids) - 1 - response_ids[::-1].index(end)
            response_ids = response_ids[: last + 1]
        if not response_ids:
            raise ValueError(
                f"{place}: the chat template writes nothing for the response after "
                f"{self._show(prompt_ids[-8:])}; use data.responses=generate"
            )
        return response_ids

    def _show(self, token_ids: tuple[int, ...]) -> str:
        return repr(self.tokenizer.decode(list(token_ids[:8])))


_NO_RESPONSE = (
    "data.responses=given, but there is no response: end messages with an assistant message, add "
    "the field `response`, or let the target answer with data.responses=generate"
)


def _text_field(row: dict[str, Any], name: str, place: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{place}: {name} must be text, not {value!r:.60}")
    return value
