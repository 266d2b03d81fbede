"""The clinic's policy as a checkpoint: a word-level tokenizer, a chat template and the shape of a 0.1M decoder.

The template renders a message as role token, words, end token. So a conversation that goes on renders to an exact
extension of its earlier rendering plus the tokens that were sampled, the stop token included.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.policy.config import PolicyConfig
from gyre.policy.tokenizer import ChatTokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

UNKNOWN, END = "<|unk|>", "<|end|>"
SPECIAL = ("<|pad|>", UNKNOWN, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
WORDS = tuple("abcdef 1234 F . ?".replace(" ", "")) + ("compact", "repair", "the", "modules", "that", "fail")
VOCABULARY = SPECIAL + WORDS + tuple(f"<|spare-{number}|>" for number in range(40 - len(SPECIAL) - len(WORDS)))

TEMPLATE = """\
{%- for message in messages -%}
{{ "<|" + message.role + "|> " + (message.content or "") + " <|end|> " }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|assistant|> " }}{%- endif -%}
"""

POLICY = PolicyConfig(
    model_type="qwen3",
    vocab_size=len(VOCABULARY),
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
    qk_norm=True,
    max_position=512,
)


def build_tokenizer(vocabulary: Sequence[str] = VOCABULARY, template: str = TEMPLATE) -> ChatTokenizer:
    """One id a word; words outside the vocabulary become `UNKNOWN`. Generation stops at `END`.

    A word of the vocabulary that holds spaces is found in a text before anything is split.
    """
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in vocabulary if " " in word])
    return ChatTokenizer(tokenizer, template, {"eos_token": END, "pad_token": "<|pad|>", "unk_token": UNKNOWN})
