"""Text to ids and back, and messages to text: ``tokenizer.json`` plus a Jinja chat template.

A template comes with a checkpoint and is therefore untrusted: it runs in Jinja's immutable sandbox. It is also given no
clock, so that the same messages render to the same text on every turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
GENERATION_FILE = "generation_config.json"

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """The chat template refused the messages or could not be rendered."""


class ChatTokenizer:
    """A tokenizer with its chat template.

    ``special_tokens`` maps names such as ``eos_token`` to their text; templates read them as variables. Generation
    ends at ``stop_ids``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        special_tokens: Mapping[str, str] | None = None,
        stop_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._source = template
        self._special_tokens = dict(special_tokens or {})
        self._template = _environment().from_string(template)
        eos = self._special_tokens.get("eos_token")
        eos_id = tokenizer.token_to_id(eos) if eos is not None else None
        if eos is not None and eos_id is None:
            raise ValueError(f"eos_token: {eos!r} is not in the tokenizer's vocabulary")
        self.eos_id: int | None = eos_id
        self.stop_ids: tuple[int, ...] = tuple(sorted({*stop_ids, *([] if eos_id is None else [eos_id])}))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def template(self) -> str:
        """The Jinja source of the chat template."""
        return self._source

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are marked special and that no text can spell."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def id_of(self, token: str) -> int:
        """The id of one token. Raises KeyError if the vocabulary lacks it."""
        index = self._tokenizer.token_to_id(token)
        if index is None:
            raise KeyError(token)
        return index

    def encode(self, text: str) -> list[int]:
        """Token ids of exactly this text; nothing (no bos) is added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; an incomplete character at the end becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of chat messages. Raises `TemplateError` with the template's own words if it refuses them."""
        try:
            return self._template.render(
                **{**self._special_tokens, **(variables or {})},
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise TemplateError(f"chat template: {error}") from error

    def save(self, directory: Path) -> None:
        """Writes ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and the stop ids."""
        directory.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(directory / TOKENIZER_FILE))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._special_tokens}
        (directory / TOKENIZER_CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (directory / TEMPLATE_FILE).write_text(self._source, encoding="utf-8")
        generation = {"eos_token_id": list(self.stop_ids)}
        (directory / GENERATION_FILE).write_text(json.dumps(generation) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> ChatTokenizer:
        """Reads what `save` or a Hugging Face checkpoint wrote. Raises ValueError if there is no chat template."""
        tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_FILE))
        config = _read_json(directory / TOKENIZER_CONFIG_FILE)
        template_file = directory / TEMPLATE_FILE
        template = template_file.read_text(encoding="utf-8") if template_file.exists() else _template_of(config)
        if template is None:
            raise ValueError(f"chat_template: none in {directory}, neither {TEMPLATE_FILE} nor {TOKENIZER_CONFIG_FILE}")
        stop = _read_json(directory / GENERATION_FILE).get("eos_token_id")
        stop_ids = stop if isinstance(stop, list) else ([] if stop is None else [stop])
        return cls(tokenizer, template, _special_tokens(config), stop_ids)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _template_of(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``*_token`` entries, which are either text or an object with ``content``."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks the assistant's text; here it only renders its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """As transformers defines it: Jinja's own ``tojson`` escapes HTML characters, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
