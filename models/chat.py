"""OpenAI chat messages and tools as data files hold them, and their token ids by a chat template.

Nothing a line says is dropped in silence: a role, a tool list or a tool call that does not change
what the template writes is an error.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jinja2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


def parse_messages(value: Any, place: str) -> list[Message]:
    """Messages with string contents and known roles; lists of text parts are joined.

    `value` is a list of messages or the JSON text of one. Raises ValueError naming `place`.
    """
    messages = _from_json_text(value, f"{place}: messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{place}: messages must be a list with at least one message, such as "
            f'[{{"role": "user", "content": "..."}}], not {messages!r:.60}'
        )
    return [_parse_message(m, f"{place}: messages[{i}]") for i, m in enumerate(messages)]


def parse_tools(value: Any, place: str) -> list[dict[str, Any]] | None:
    """Tool schemas as a list, given as a list or as the JSON text of one; None when there are none.

    Raises ValueError naming `place`.
    """
    tools = _from_json_text(value, f"{place}: tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"{place}: tools must be a list of JSON schemas, such as "
            f'[{{"type": "function", "function": {{"name": "..."}}}}], not {tools!r:.60}'
        )
    return tools


def _from_json_text(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{name} is text that is not JSON ({error.msg}): {value!r:.60}; give a JSON list"
        ) from error


def _parse_message(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{name} is not an object with role and content: {message!r:.60}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{name}: unknown role {role!r}; known: {', '.join(ROLES)}")
    content = _text(message.get("content"), name)
    parsed = {**message, "content": content}
    if message.get("tool_calls"):
        parsed["tool_calls"] = _parse_tool_calls(message["tool_calls"], name)
    elif not content:
        raise ValueError(f"{name}: the {role} message has no content: give it text")
    return parsed


def _text(content: Any, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{name}: content must be text or a list of parts, not {content!r:.60}")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{name}: only text parts can be read, such as "
                f'{{"type": "text", "text": "..."}}, not {part!r:.60}; remove the others'
            )
    return "".join(part["text"] for part in content)


def _parse_tool_calls(calls: Any, name: str) -> list[dict[str, Any]]:
    """OpenAI writes the arguments of a call as JSON text, templates read them as an object."""
    parsed = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError(f"{name}: tool call without function.name: {call!r:.60}")
        arguments = _from_json_text(function.get("arguments", {}), f"{name}: function.arguments")
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


class ChatTemplate:
    """The tokenizer's chat template, with a check that it writes what it is given."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._checked_roles: set[str] = set()

    def token_ids(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        place: str,
        *,
        add_generation_prompt: bool,
    ) -> tuple[int, ...]:
        """Token ids of the conversation, special tokens exactly as the template writes them.

        Raises ValueError naming `place` if the template refuses the messages or ignores a part.
        """
        text = self._text(messages, tools, place, add_generation_prompt)
        self._check_nothing_dropped(text, messages, tools, place, add_generation_prompt)
        # The template writes BOS itself where the model wants one; the tokenizer would add another.
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        place: str,
        add_generation_prompt: bool,
    ) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"{place}: the tokenizer's chat template refuses these messages ({error}); their "
                f"roles are: {roles}. Use the roles and the order that the target's template knows"
            ) from error

    def _check_nothing_dropped(
        self,
        text: str,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        place: str,
        add_generation_prompt: bool,
    ) -> None:
        if tools and text == self._text(messages, None, place, add_generation_prompt):
            raise ValueError(
                f"{place}: the tokenizer's chat template ignores tools; write their schemas into "
                "the system message, or use a target whose template takes tools"
            )
        for index, message in enumerate(messages):
            role = message["role"]
            if message.get("tool_calls"):
                changed = {key: value for key, value in message.items() if key != "tool_calls"}
                # A call without text leaves an empty message, which some templates refuse.
                changed["content"] += " "
                what = "the tool_calls of a message; write the calls into its content"
            elif role not in self._checked_roles:
                self._checked_roles.add(role)
                changed = {**message, "content": message["content"] + " again"}
                what = f"messages of role {role!r}; use the roles it knows"
            else:
                continue
            others = [*messages[:index], changed, *messages[index + 1 :]]
            if text.split() == self._text(others, tools, place, add_generation_prompt).split():
                raise ValueError(
                    f"{place}: messages[{index}]: the tokenizer's chat template ignores {what}"
                )
