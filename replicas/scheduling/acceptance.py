"""Which requests an engine can serve at all, by their lengths."""

from __future__ import annotations

from replicas.request import GenerationRequest, RequestRejected


def accepted_length(request: GenerationRequest, max_model_len: int) -> int:
    """Number of prompt and output tokens at which the request ends. Raises RequestRejected if it can never run here."""
    num_prompt, params = len(request.prompt_ids), request.params
    if num_prompt == 0:
        raise RequestRejected("the prompt is empty")
    if num_prompt + (0 if params.max_tokens == 0 else 1) > max_model_len:
        raise RequestRejected(
            f"the prompt has {num_prompt} tokens; with at least one to generate, max_model_len {max_model_len} is exceeded"
        )
    if request.wants_prompt_logprobs and (request.wants_handoff or request.handoff is not None):
        raise RequestRejected("prompt_logprobs are computed by one engine alone: a handoff brings KV without logits")
    max_num_tokens = max_model_len
    if params.max_tokens is not None:
        max_num_tokens = min(max_num_tokens, num_prompt + params.max_tokens)
    if num_prompt + len(request.output_ids) >= max_num_tokens and (request.output_ids or params.max_tokens != 0):
        raise RequestRejected(f"output_ids already holds {len(request.output_ids)} tokens: nothing is left to generate")
    return max_num_tokens
