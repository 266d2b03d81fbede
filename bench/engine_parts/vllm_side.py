"""vLLM's CPU build as a contender, run by the Python of its own environment, its engine in this process."""

from __future__ import annotations

import itertools
import os
import sys
import time
from typing import Any

os.environ.update({
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR",
})  # fmt: skip

import torch  # noqa: E402
from side import Answers, serve  # noqa: E402
from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402

BLOCK_TOKENS = 32


class Vllm:
    """`LLMEngine` with prefix caching; a session's next turn is queued when its answer is there."""

    def __init__(self, directory: str) -> None:
        arguments = EngineArgs(
            model=directory, skip_tokenizer_init=True, dtype="float32", max_model_len=4096, max_num_seqs=64,
            max_num_batched_tokens=2048, block_size=BLOCK_TOKENS, enable_prefix_caching=True, disable_log_stats=True,
            enforce_eager=os.environ.get("VLLM_EAGER", "0") == "1",
        )  # fmt: skip
        self._engine = LLMEngine.from_engine_args(arguments)
        self._names = itertools.count()

    def __call__(self, job: dict[str, Any]) -> tuple[Answers, dict[str, Any]]:
        tools = job["tools"]
        contexts = [list(prompt) for prompt in job["prompts"]]
        answers: Answers = [[] for _ in contexts]
        sessions = {self._submit(context, job["num_answer"]): session for session, context in enumerate(contexts)}
        first_step = 0.0
        while sessions:
            outputs = self._engine.step()
            first_step = first_step or time.process_time()
            for output in outputs:
                if not output.finished:
                    continue
                session = sessions.pop(output.request_id)
                turn = len(answers[session])
                answers[session].append(list(output.outputs[0].token_ids))
                if turn < len(tools[session]):
                    contexts[session] += answers[session][-1] + tools[session][turn]
                    sessions[self._submit(contexts[session], job["num_answer"])] = session
        return answers, {"decode_cpu_s": time.process_time() - first_step}

    def _submit(self, context: list[int], num_answer: int) -> str:
        name = f"r{next(self._names)}"
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_answer, min_tokens=num_answer, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip
        self._engine.add_request(name, {"prompt_token_ids": list(context)}, sampling)
        return name


def main() -> None:
    torch.set_num_threads(1)
    serve(Vllm(sys.argv[1]))


if __name__ == "__main__":
    main()
