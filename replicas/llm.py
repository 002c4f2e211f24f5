"""Offline inference: prompts in, answers out, in one process and without a server."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from replicas.engine_config import DType, EngineConfig
from replicas.llm_output import CompletionOutput, RequestOutput
from replicas.process.deferred_interrupt import DeferredInterrupt
from replicas.request import FinishReason, GenerationRequest, RequestKey, RequestProgress, RequestRejected, TokenLogprob
from replicas.response_format import parse_response_format
from replicas.sampling_params import SamplingParams
from replicas.speculation_config import SpeculationConfig, from_vllm, speculation_of
from replicas.step_engine import StepEngine
from replicas.text.text_stream import TextStream
from replicas.text.tokenizer import ChatTemplateError, Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """Owns an engine and its tokenizer, and drives the engine on the caller's thread. One thread at a time may call it.

    After any error, an interrupt included, nothing of that call is left in the engine and the next call works.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: DType = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        enable_prefix_caching: bool = True,
        mode: Literal["unified", "disaggregated"] = "unified",
        decode_settings: Mapping[str, Any] | None = None,
        speculation: SpeculationConfig | Mapping[str, Any] | str | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Loads `model`, a Hugging Face id or folder; None is the default model. `settings` are further fields of
        `EngineConfig`. In mode disaggregated one engine computes the prompts and a second one continues from their KV, as
        two pools of a cluster would; `decode_settings` are the fields in which the second differs. `speculation` is a method such as
        "suffix", or settings of `SpeculationConfig`; `speculative_config` is vLLM's spelling of it. Raises ValueError naming the
        setting that is wrong."""
        if mode not in ("unified", "disaggregated"):
            raise ValueError(f"mode must be unified or disaggregated, got {mode!r}")
        if decode_settings and mode == "unified":
            raise ValueError("decode_settings are for mode 'disaggregated'; a unified engine has one set of settings")
        if speculation is not None and speculative_config is not None:
            raise ValueError("speculative_config means the same as speculation; leave one of them out")
        if speculation is not None:
            settings["speculation"] = speculation_of(speculation)
        if speculative_config is not None:
            settings["speculation"] = from_vllm(speculative_config)
        known = {one.name for one in fields(EngineConfig)}
        if unknown := sorted((settings.keys() | (decode_settings or {}).keys()) - known):
            raise ValueError(f"LLM has no setting {', '.join(unknown)}; allowed are {', '.join(sorted(known))}")
        config = EngineConfig(
            model=model,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
            **settings,
        )
        engine = _load(config, replace(config, **decode_settings or {}) if mode == "disaggregated" else None)
        self._attach(engine, Tokenizer.load(engine.tokenizer_source, config.trust_remote_code))

    @classmethod
    def from_engine(cls, engine: StepEngine, tokenizer: Tokenizer) -> Self:
        """An LLM over an existing engine, which it then owns."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer)
        return llm

    def _attach(self, engine: StepEngine, tokenizer: Tokenizer) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self._num_requests = 0
        self._is_shut_down = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to one prompt or many (text or token ids), in their order.

        `sampling_params` is one for all or one for each. If a prompt can never be served, raises ValueError with its index
        before anything runs. A request that fails while running does not stop the others: see `CompletionOutput.error`.
        """
        batch = _as_prompts(prompts)
        ids = [self._encode(prompt, index) for index, prompt in enumerate(batch)]
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return self._run(texts, ids, _as_params(sampling_params, len(ids)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation or many, under the model's chat template. Otherwise like `generate`.

        `response_format` is OpenAI's (type text, json_object or json_schema) for all conversations, in place of a `grammar` in the
        sampling parameters."""
        params = _with_format(sampling_params, response_format)
        conversations = _as_conversations(messages)
        texts: list[str | None] = []
        ids: list[list[int]] = []
        for index, conversation in enumerate(conversations):
            options: dict[str, Any] = {
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "template_kwargs": chat_template_kwargs,
            }
            try:
                texts.append(self.tokenizer.chat_prompt(conversation, **options))
                ids.append(self.tokenizer.chat_prompt_ids(conversation, **options))
            except ChatTemplateError as error:
                raise ChatTemplateError(f"conversation {index}: {error}") from error
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        return self._run(texts, ids, _as_params(params, len(ids)), use_tqdm)

    def shutdown(self) -> None:
        """Frees the engine. Calling it again does nothing; generating afterwards raises RuntimeError."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.shutdown()

    def _encode(self, prompt: Prompt, index: int) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            return self.tokenizer.encode(prompt)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error

    def _run(
        self, texts: Sequence[str | None], ids: Sequence[list[int]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        if self._is_shut_down:
            raise RuntimeError("this LLM was shut down; make a new one")
        tasks = [self._task(text, prompt_ids, one) for text, prompt_ids, one in zip(texts, ids, params, strict=True)]
        open_choices: dict[RequestKey, _Choice] = {}  # request key -> choice without a final progress
        try:
            for index, task in enumerate(tasks):
                for choice in task.choices:
                    try:
                        self._engine.add_request(choice.request)
                    except RequestRejected as error:
                        raise ValueError(f"prompt {index}: {error}") from error
                    open_choices[choice.request.key] = choice
            self._step_until_done(open_choices, len(tasks), use_tqdm)
        finally:
            # Choices are left only after an error or interrupt. The engine's next step reports their end, and it is ignored.
            for key in open_choices:
                self._engine.cancel(key)
        return [task.output() for task in tasks]

    def _task(self, text: str | None, prompt_ids: list[int], params: SamplingParams) -> _Task:
        request_id = f"llm-{self._num_requests}"
        self._num_requests += 1
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        choices = [
            _Choice(
                request=GenerationRequest(
                    request_id=request_id, prompt_ids=tuple(prompt_ids), params=params.for_choice(index), seed=seed, choice=index
                ),
                stream=TextStream(self.tokenizer, params),
            )
            for index in range(params.n)
        ]
        return _Task(request_id=request_id, text=text, prompt_ids=prompt_ids, choices=choices)

    def _step_until_done(self, open_choices: dict[RequestKey, _Choice], num_prompts: int, use_tqdm: bool) -> None:
        """Steps the engine until it has reported the end of every choice, and takes each out of `open_choices`."""
        from tqdm import tqdm

        choices_left: dict[str, int] = {}  # request id -> choices not ended
        for request_id, _ in open_choices:
            choices_left[request_id] = choices_left.get(request_id, 0) + 1
        num_tokens = 0
        with DeferredInterrupt() as interrupt, tqdm(total=num_prompts, desc="prompts", unit="prompt", disable=not use_tqdm) as bar:
            while open_choices:
                interrupt.check()
                for progress in self._engine.step().progress:
                    choice = open_choices.get(progress.key)
                    if choice is None:
                        continue  # left over from a call that was interrupted
                    num_tokens += len(progress.token_ids)
                    choice.take(progress)
                    if progress.finish_reason is None:
                        if choice.stream.is_finished:
                            self._engine.cancel(progress.key)  # a stop string; the next step reports the end
                        continue
                    del open_choices[progress.key]
                    choices_left[progress.key.request_id] -= 1
                    if choices_left[progress.key.request_id] == 0:
                        bar.set_postfix_str(f"{num_tokens} tokens", refresh=False)
                        bar.update()


def _load(config: EngineConfig, decode_config: EngineConfig | None) -> _LoadedEngine:
    """`decode_config` adds a separate decode engine. Only the imports here need torch."""
    if decode_config is not None:
        from replicas.engine.disaggregated import DisaggregatedEngine

        return DisaggregatedEngine.load(config, decode_config=decode_config)
    from replicas.engine.loader import load_engine

    return load_engine(config)


class _LoadedEngine(StepEngine, Protocol):
    @property
    def tokenizer_source(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class _Choice:
    """One generation while it runs."""

    request: GenerationRequest
    stream: TextStream
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason = FinishReason.FAILED
    stop_reason: str | int | None = None
    error: str | None = None

    def take(self, progress: RequestProgress) -> None:
        self.num_cached_tokens = max(self.num_cached_tokens, progress.num_cached_tokens)
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs = progress.prompt_logprobs
        delta = self.stream.push(progress)
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            if delta.finish_reason is FinishReason.FAILED:
                self.error = progress.error
                logger.error("request %s choice %d failed: %s", progress.key.request_id, progress.key.choice, progress.error)

    def output(self) -> CompletionOutput:
        return CompletionOutput(
            index=self.request.choice,
            text="".join(self.texts),
            token_ids=self.token_ids,
            logprobs=self.logprobs if self.request.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """One prompt and its choices."""

    request_id: str
    text: str | None
    prompt_ids: list[int]
    choices: list[_Choice]

    def output(self) -> RequestOutput:
        scored = self.choices[0].prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.text,
            prompt_token_ids=self.prompt_ids,
            prompt_logprobs=None if scored is None else [None, *scored],
            num_cached_tokens=self.choices[0].num_cached_tokens,
            outputs=[choice.output() for choice in self.choices],
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts from one prompt or many. Raises ValueError for a prompt that is neither text nor token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if prompts and (one := _as_ids(prompts)) is not None:
        return [one]
    batch: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        ids = None if isinstance(prompt, str) else _as_ids(prompt)
        if ids is not None:
            batch.append(ids)
        elif isinstance(prompt, str):
            batch.append(prompt)
        else:
            raise ValueError(f"prompt {index}: must be text or a list of token ids, got {type(prompt).__name__}")
    return batch


def _as_ids(items: object) -> list[int] | None:
    """Token ids (numpy's integers too) as a list; None for anything else."""
    if not isinstance(items, Sequence) or not all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
        return None
    return [int(item) for item in items]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"sampling_params must be one or one for each of the {num_prompts} prompts, got {len(params)}")
    return list(params)


def _with_format(
    params: SamplingParams | Sequence[SamplingParams] | None, response_format: Mapping[str, Any] | None
) -> SamplingParams | Sequence[SamplingParams] | None:
    """Raises ValueError for a bad format, or beside a grammar."""
    asked = None if response_format is None else parse_response_format(response_format)
    if asked is None:
        return params
    each = [SamplingParams() if params is None else params] if isinstance(params, SamplingParams | None) else list(params)
    if any(one.grammar is not None for one in each):
        raise ValueError("response_format and a grammar in sampling_params exclude each other")
    formatted = [replace(one, grammar=asked.spec) for one in each]
    return formatted[0] if isinstance(params, SamplingParams | None) else formatted


def _as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    if messages and (one := _as_messages(messages)) is not None:
        return [one]
    conversations: list[list[Message]] = []
    for index, conversation in enumerate(messages):
        found = _as_messages(conversation)
        if found is None:
            raise ValueError(f"conversation {index}: must be a list of messages (role and content)")
        conversations.append(found)
    return conversations


def _as_messages(items: object) -> list[Message] | None:
    if not isinstance(items, Sequence) or not all(isinstance(item, Mapping) for item in items):
        return None
    return list(items)
