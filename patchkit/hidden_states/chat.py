"""Conversations become token ids and an assistant-only mask, proven by decoding it again."""

from __future__ import annotations

from typing import Any

from patchkit.hidden_states.errors import ModelError, need

Span = tuple[int, int, str]  # of an answer: start and end in the text, and what it says

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant"}


class ConversationError(ValueError):
    """Why a conversation cannot be masked."""


class ChatTokenizer:
    """The model's own tokenizer and chat template."""

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        transformers = need("transformers")
        try:
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(
                model, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # noqa: BLE001 (whatever the tokenizer raises)
            reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise ModelError(model, f"its tokenizer cannot be loaded ({reason[0]})") from None
        if not self.tokenizer.chat_template:
            raise ModelError(model, "its tokenizer has no chat template")

    def encode(self, conversation: Any) -> tuple[list[int], list[int]]:
        """Token ids and mask of a list of messages. Raises ConversationError."""
        messages = normalised(conversation)
        text = self._render(messages)
        spans = self._assistant_spans(messages, text)
        places = self._by_offsets if self.tokenizer.is_fast else self._by_prefixes
        ids, answers = places(text, spans)
        mask = [0] * len(ids)
        for (_, _, content), indices in zip(spans, answers, strict=True):
            decoded = self.tokenizer.decode([ids[index] for index in indices], skip_special_tokens=False)
            if content.strip() not in decoded:
                raise ConversationError(
                    f"the masked tokens decode to {decoded[:60]!r}, "
                    f"not to the answer {content.strip()[:60]!r}"
                )
            for index in indices:
                mask[index] = 1
        return ids, mask

    def _by_offsets(self, text: str, spans: list[Span]) -> tuple[list[int], list[list[int]]]:
        """Token ids, and for each span the tokens that start in it."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        answers: list[list[int]] = [[] for _ in spans]
        current = 0
        for index, (left, right) in enumerate(encoded["offset_mapping"]):
            while current < len(spans) and left >= spans[current][1]:
                current += 1
            if current < len(spans) and left < right and left >= spans[current][0]:
                answers[current].append(index)
        return list(encoded["input_ids"]), answers

    def _by_prefixes(self, text: str, spans: list[Span]) -> tuple[list[int], list[list[int]]]:
        """The same for a tokenizer without offsets, where the text's beginnings are the ids' beginnings."""
        ids = self._ids(text)
        answers = []
        for start, end, _ in spans:
            before, through = self._ids(text[:start]), self._ids(text[:end])
            if ids[: len(before)] != before or ids[: len(through)] != through:
                raise ConversationError("a token crosses the border of an answer")
            answers.append(list(range(len(before), len(through))))
        return ids, answers

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # noqa: BLE001 (a template raises what it likes)
            reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
            raise ConversationError(f"the chat template refuses it ({reason[0]})") from None
        return str(text)

    def _assistant_spans(self, messages: list[dict[str, Any]], text: str) -> list[Span]:
        """(start, end, content) of each answer in ``text``: from after its prompt to the end of its turn."""
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], prompt=True)
            through = self._render(messages[: index + 1])
            content = message["content"]
            if not content.strip():
                continue
            # A template may write a turn otherwise once others follow (earlier thinking is dropped).
            start = len(before) if text.startswith(before) else -1
            end = len(through) if text.startswith(through) else -1
            if start < 0 or end < 0 or content.strip() not in text[start:end]:
                raise ConversationError(
                    f"the chat template writes message {index + 1} differently in the whole conversation"
                )
            spans.append((start, end, content))
        if not spans:
            raise ConversationError("no message of the assistant has content")
        return spans


def normalised(conversation: Any) -> list[dict[str, Any]]:
    """``role``/``content`` messages, from these or from ``from``/``value``. Raises ConversationError."""
    if not isinstance(conversation, list) or not conversation:
        raise ConversationError("the conversation is no list of messages")
    messages = []
    for index, message in enumerate(conversation):
        if not isinstance(message, dict):
            raise ConversationError(f"message {index + 1} is no object")
        role = message.get("role", message.get("from"))
        content = message.get("content", message.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise ConversationError(f"message {index + 1} has no role or no text")
        messages.append({**message, "role": _ROLES.get(role, role), "content": content})
    return [
        {key: value for key, value in message.items() if key not in ("from", "value")} for message in messages
    ]
