"""A policy that nobody asks anything: a vocabulary so large that a random token seldom is the one that ends a reply."""

from pathlib import Path

from gyre.policy.checkpoint import save_checkpoint
from gyre.policy.config import PolicyConfig
from gyre.policy.decoder import Decoder
from gyre.policy.tokenizer import ChatTokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

UNKNOWN, END = "<|unk|>", "<|end|>"
SPECIAL = ("<|pad|>", UNKNOWN, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
VOCABULARY = (*SPECIAL, "begin", "on", *(f"w{number}" for number in range(8192 - len(SPECIAL) - 2)))
TEMPLATE = """\
{%- for message in messages -%}
{{ "<|" + message.role + "|> " + (message.content or "") + " <|end|> " }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ "<|assistant|> " }}{%- endif -%}
"""


def write_policy(directory: Path, hidden_size: int = 16, num_layers: int = 1, num_heads: int = 2) -> Path:
    """A Hugging Face directory with random weights."""
    shape = PolicyConfig("qwen3", len(VOCABULARY), hidden_size, 2 * hidden_size, num_layers, num_heads, num_heads,
                         hidden_size // num_heads, tie_word_embeddings=True, qk_norm=True, max_position=4096)
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    save_checkpoint(directory, shape, Decoder.create(shape, seed=0).state_dict())
    ChatTokenizer(tokenizer, TEMPLATE, {"eos_token": END, "pad_token": "<|pad|>", "unk_token": UNKNOWN}).save(directory)
    return directory
