"""Text, ids and chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gyre.policy.tokenizer import ChatTokenizer, TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = """{%- for message in messages %}
    {%- if message.role == "forbidden" %}{{ raise_exception("no such role") }}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n" }}
    {%- generation %}{{ message.content }}{% endgeneration %}
    {{- "<|im_end|>\\n" }}
{%- endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""


def make_tokenizer() -> ChatTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    return ChatTokenizer(tokenizer, TEMPLATE, {"eos_token": "<|im_end|>"})


def test_text_survives_encoding_and_special_tokens_are_one_id() -> None:
    tokenizer = make_tokenizer()
    text = "<|im_start|>héllo\n<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_id == tokenizer.id_of("<|im_end|>")
    assert set(tokenizer.stop_ids) == {tokenizer.eos_id} <= tokenizer.special_ids


def test_messages_render_with_tools_and_generation_prompt() -> None:
    rendered = make_tokenizer().render([{"role": "user", "content": "a<b"}], [{"name": "ü<"}])
    assert rendered == '<|im_start|>user\na<b<|im_end|>\n[{"name": "ü<"}]<|im_start|>assistant\n'


def test_rendering_equals_that_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    make_tokenizer().save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " there "}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ours = ChatTokenizer.load(tmp_path)
    assert ours.render(messages) == rendered
    assert ours.encode(rendered) == theirs.encode(rendered, add_special_tokens=False)


def test_a_template_that_refuses_says_why() -> None:
    with pytest.raises(TemplateError, match="no such role"):
        make_tokenizer().render([{"role": "forbidden", "content": ""}])


def test_a_template_cannot_leave_the_sandbox() -> None:
    tokenizer = make_tokenizer()
    hostile = ChatTokenizer(tokenizer._tokenizer, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(TemplateError):
        hostile.render([])


def test_load_takes_the_template_from_the_config_and_stop_ids_from_generation(tmp_path: Path) -> None:
    make_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": "default", "template": "x"}], "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    loaded = ChatTokenizer.load(tmp_path)
    assert (loaded.template, loaded.stop_ids) == ("x", (1, loaded.eos_id))


def test_a_directory_without_a_template_is_refused(tmp_path: Path) -> None:
    make_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="chat_template"):
        ChatTokenizer.load(tmp_path)
