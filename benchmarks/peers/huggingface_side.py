"""Hugging Face's side of a comparison: `generate` of transformers on torch.

    PYTHONPATH=benchmarks python benchmarks/peers/huggingface_side.py work.json result.json

Sampling from the full softmax at temperature 1, float32, no gradient, all threads, the cache that grows with the text.
`variant` in the work file chooses how `heavy_tailed` is served: `static` batches, or `continuous` batching, which
admits a request when another one has ended.
"""

from typing import Any

import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from protocol import Work, batches_of_slots, check_counts, count_rows, main, make_prompts, measure
from qwen3_torch import make_model

NO_LOGPROBS = "returns tokens only: log-probabilities would cost a second pass or the logits of every step"
PAGE_TOKENS = 64
"""Tokens in a page of the cache of continuous batching."""


def sample(model: Qwen3ForCausalLM, prompts: torch.Tensor, new_tokens: int, **options: Any) -> torch.Tensor:
    """Sample up to `new_tokens` after each prompt; prompts `[B L]` with their completions."""
    with torch.inference_mode():
        return model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            **options,
        )


def rollout(work: Work) -> dict[str, Any]:
    """Sample every prompt once per generation, without stop ids."""
    model = make_model(work).eval()
    prompts = torch.tensor(make_prompts(work)).repeat_interleave(work["generations"], dim=0)

    def run(repeat: int) -> None:
        torch.manual_seed(repeat)
        sampled = sample(model, prompts, work["new_tokens"])[:, work["prompt_tokens"] :]
        check_counts([len(row) for row in sampled], [work["new_tokens"]] * count_rows(work))

    return measure(work, run) | {"notes": [NO_LOGPROBS, "prefills each generation's prompt anew"]}


class EndsAt(StoppingCriteria):
    """A row ends at its own length."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self.lengths = lengths

    def __call__(self, input_ids: torch.Tensor, scores: Any, **unused: Any) -> torch.Tensor:
        return self.lengths <= input_ids.shape[1]


def heavy_tailed(work: Work) -> dict[str, Any]:
    """Serve requests of different lengths, at most `slots` at once."""
    return {"static": _in_batches, "continuous": _continuously}[work["variant"]](work)


def _in_batches(work: Work) -> dict[str, Any]:
    model = make_model(work).eval()
    padding = work["shape"]["vocab_size"] - 1
    prompts, answers = torch.tensor(make_prompts(work)), torch.tensor(work["answer_tokens"])

    def run(repeat: int) -> None:
        torch.manual_seed(repeat)
        for batch in batches_of_slots(work):
            rows = torch.tensor(list(batch))
            criteria = StoppingCriteriaList([EndsAt(work["prompt_tokens"] + answers[rows])])
            # A padding token is asked for because rows end apart; what is sampled there is counted for nobody.
            sampled = sample(model, prompts[rows], int(answers.max()), stopping_criteria=criteria, pad_token_id=padding)
            check_counts([sampled.shape[1] - work["prompt_tokens"]], [int(answers[rows].max())])

    notes = [NO_LOGPROBS, "batches in order; a batch decodes until its last row has ended"]
    return measure(work, run) | {"notes": notes}


def _continuously(work: Work) -> dict[str, Any]:
    model = make_model(work).eval()
    prompts, answers = make_prompts(work), work["answer_tokens"]
    longest = work["prompt_tokens"] + max(answers)
    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0)
    limits = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=work["slots"] * -(-longest // PAGE_TOKENS),  # nobody is ever turned out
        max_requests_per_batch=work["slots"],
        max_batch_tokens=work["slots"] * work["prompt_tokens"],
        allow_block_sharing=False,
    )
    with model.continuous_batching_context_manager(sampling, continuous_batching_config=limits) as manager:

        def run(repeat: int) -> None:
            asked = {
                manager.add_request(prompt, max_new_tokens=tokens): tokens
                for prompt, tokens in zip(prompts, answers, strict=True)
            }
            while asked:
                result = manager.get_result(timeout=60)
                if result is None:
                    raise RuntimeError("the manager has stopped or stalled")
                if result.is_finished():
                    check_counts([len(result.generated_tokens)], [asked.pop(result.request_id)])

        measured = measure(work, run)
    return measured | {"notes": [NO_LOGPROBS, "transformers' continuous batching, its cache in pages"]}


if __name__ == "__main__":
    main("huggingface", ("torch", "transformers", "numpy"), {"rollout": rollout, "heavy_tailed": heavy_tailed})
