"""transformers as a contender: `generate` over a batch per turn, or its continuous batching (second argument "cb")."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from side import Answers, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

KV_TOKENS = 131072
PAGE_TOKENS = 32
BATCH_TOKENS = 2048


class Generate:
    """One call of `generate` per turn: prompts padded on the left, a KV cache within the call and none between."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._awaiting_first = True
        self._first_token = 0.0  # CPU time of the process, in the latest call

    def __call__(self, job: dict[str, Any]) -> tuple[Answers, dict[str, Any]]:
        contexts = [list(prompt) for prompt in job["prompts"]]
        answers: Answers = [[] for _ in contexts]
        for turn in range(len(job["tools"][0]) + 1):
            for session, ids in enumerate(self._turn(contexts, job["num_answer"])):
                answers[session].append(ids)
                tools = job["tools"][session]
                contexts[session] += ids + (tools[turn] if turn < len(tools) else [])
        return answers, {"decode_cpu_s": time.process_time() - self._first_token}

    def _mark(self, ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Called after every token; notes the time of the first and stops nobody."""
        if self._awaiting_first:
            self._first_token, self._awaiting_first = time.process_time(), False
        return torch.zeros(len(ids), dtype=torch.bool)

    @torch.inference_mode()
    def _turn(self, contexts: list[list[int]], num_answer: int) -> list[list[int]]:
        longest = max(map(len, contexts))
        ids = torch.tensor([[0] * (longest - len(c)) + c for c in contexts])
        mask = torch.tensor([[0] * (longest - len(c)) + [1] * len(c) for c in contexts])
        self._awaiting_first = True
        out = self._model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, min_new_tokens=num_answer, max_new_tokens=num_answer,
            pad_token_id=0, use_cache=True, stopping_criteria=[self._mark],
        )  # fmt: skip
        return out[:, longest:].tolist()


class Continuous:
    """One manager for all jobs; a session's next turn is queued when its answer is there."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=KV_TOKENS // PAGE_TOKENS, max_batch_tokens=BATCH_TOKENS, seed=0,
            max_requests_per_batch=64,
        )  # fmt: skip
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=64)
        self._manager = model.init_continuous_batching(generation, continuous_batching_config=config)
        self._manager.start()

    def __call__(self, job: dict[str, Any]) -> tuple[Answers, dict[str, Any]]:
        num_answer, tools = job["num_answer"], job["tools"]
        contexts = [list(prompt) for prompt in job["prompts"]]
        answers: Answers = [[] for _ in contexts]
        sessions = {self._submit(context, num_answer): session for session, context in enumerate(contexts)}
        while sessions:
            result = self._manager.get_result(timeout=60)
            if result is None or result.error:
                raise SystemExit(f"continuous batching failed: {result.error if result else 'no result'}")
            session = sessions.pop(result.request_id)
            turn = len(answers[session])
            answers[session].append(list(result.generated_tokens))
            if turn < len(tools[session]):
                contexts[session] += answers[session][-1] + tools[session][turn]
                sessions[self._submit(contexts[session], num_answer)] = session
        return answers, {}

    def _submit(self, context: list[int], num_answer: int) -> str:
        name = self._manager.add_request(list(context), max_new_tokens=num_answer, eos_token_id=-1)
        assert name is not None
        return name


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa").eval()
    serve(Continuous(model) if sys.argv[2:] == ["cb"] else Generate(model))


if __name__ == "__main__":
    main()
