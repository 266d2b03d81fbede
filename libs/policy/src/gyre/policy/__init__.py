"""The policy as engine and trainer both see it: decoder, checkpoints, tokenizer, chat template."""
