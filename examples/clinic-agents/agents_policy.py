"""The policy of the clinic with sub-agents: the clinic's decoder and words, some more words, and tool calls.

A tool call is in the form of Qwen and Hermes, `<tool_call>{"name": ...}</tool_call>`. Its fixed text is two words of
the vocabulary, so it costs as many tokens as a command, and the directory between them is the only choice in it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "clinic"))

from gyre.policy.tokenizer import ChatTokenizer  # noqa: E402
from policy import POLICY as CLINIC  # noqa: E402
from policy import SPECIAL, WORDS, build_tokenizer  # noqa: E402

CALL = '<tool_call>{"name": "agent", "arguments": {"task": "repair'
CALL_END = 'now"}}</tool_call>'
NEW_WORDS = ("g", "h", "i", "x", "y", "z", "now", "report", CALL, CALL_END)
USED = SPECIAL + WORDS + NEW_WORDS
POLICY = CLINIC
VOCABULARY = USED + tuple(f"<|spare-{number}|>" for number in range(POLICY.vocab_size - len(USED)))

TEMPLATE = """\
{%- for message in messages -%}
{{ "<|" + message.role + "|> " + (message.content or "") + " " }}
{%- for call in message.tool_calls or [] -%}
{{ '<tool_call>{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{{- (call.function.arguments | tojson) + "}</tool_call> " }}
{%- endfor -%}
{{ "<|end|> " }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|assistant|> " }}{%- endif -%}
"""


def build() -> ChatTokenizer:
    """The clinic's tokenizer on this vocabulary and template."""
    return build_tokenizer(VOCABULARY, TEMPLATE)
