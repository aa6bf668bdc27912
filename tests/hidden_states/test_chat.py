from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from patchkit.hidden_states.chat import ChatTokenizer, ConversationError
from patchkit.hidden_states.errors import ModelError

PLAIN = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As reasoning models do: the thinking of earlier turns is not written again.
DROPS_THINKING = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</t>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [
    {"role": "user", "content": "hi assistant"},
    {"role": "assistant", "content": "hello, wörld 😀"},
    {"role": "user", "content": "hello, wörld 😀"},
    {"role": "assistant", "content": "  bye\n"},
]


def make(folder, template: str | None) -> str:
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(bytes_)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens(
        {"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]}
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return str(folder)


def masked(chat: ChatTokenizer, ids, mask) -> str:
    return chat.tokenizer.decode([token for token, counts in zip(ids, mask, strict=True) if counts])


def test_exactly_the_answers_count(tmp_path):
    chat = ChatTokenizer(make(tmp_path, PLAIN))
    ids, mask = chat.encode(TALK)
    assert masked(chat, ids, mask) == "hello, wörld 😀<|end|>  bye\n<|end|>"
    assert chat.tokenizer.decode(ids).startswith("<|user|>hi assistant<|end|><|assistant|>")


def test_a_tokenizer_without_offsets_gives_the_same(tmp_path, monkeypatch):
    chat = ChatTokenizer(make(tmp_path, PLAIN))
    expected = chat.encode(TALK)
    monkeypatch.setattr(type(chat.tokenizer), "is_fast", False)
    assert chat.encode(TALK) == expected


def test_the_older_spelling_is_the_same_conversation(tmp_path):
    chat = ChatTokenizer(make(tmp_path, PLAIN))
    older = [
        {"from": {"user": "human", "assistant": "gpt"}[one["role"]], "value": one["content"]} for one in TALK
    ]
    assert chat.encode(older) == chat.encode(TALK)


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    chat = ChatTokenizer(make(tmp_path, DROPS_THINKING))
    talk = [TALK[0], {"role": "assistant", "content": "<t>so</t>yes"}, TALK[2], TALK[3]]
    with pytest.raises(ConversationError, match="message 2 differently"):
        chat.encode(talk)
    assert masked(chat, *chat.encode(talk[:2])) == "<t>so</t>yes<|end|>"


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        ([], "no list of messages"),
        ("hello", "no list of messages"),
        ([3], "message 1 is no object"),
        ([{"role": "user"}], "message 1 has no role or no text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "no role or no text"),
        ([{"role": "user", "content": "hi"}], "no message of the assistant"),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " "}],
            "no message of the assistant",
        ),
    ],
)
def test_a_conversation_that_teaches_nothing_is_refused(tmp_path, talk, reason):
    with pytest.raises(ConversationError, match=reason):
        ChatTokenizer(make(tmp_path, PLAIN)).encode(talk)


def test_a_model_without_a_template_is_refused(tmp_path):
    with pytest.raises(ModelError, match="no chat template"):
        ChatTokenizer(make(tmp_path, None))


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path):
    with pytest.raises(ModelError) as caught:
        ChatTokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
