"""Offline generation over a fake engine whose answers can be written down by hand."""

import os
import signal

import pytest

from replicas.llm import LLM
from replicas.request import FinishReason, RequestProgress, RequestRejected, StepOutput, TokenLogprob
from replicas.sampling_params import SamplingParams
from replicas.text.tokenizer import ChatTemplateError

EOS = 2


class ScriptedEngine:
    """Says `script`, one token a step and request, then EOS. A prompt's first id can make it fail, or be refused."""

    def __init__(self, script=(), vocab_size=49152, max_model_len=64):
        self.script = list(script)
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.requests = {}  # key -> request
        self.said = {}  # key -> tokens so far
        self.cancelled = []
        self.seen = []
        self.num_steps = 0
        self.on_step = None
        self.is_closed = False

    @property
    def has_work(self):
        return bool(self.requests or self.cancelled)

    def add_request(self, request):
        if not request.prompt_ids:
            raise RequestRejected("the prompt is empty")
        if len(request.prompt_ids) >= self.max_model_len:
            raise RequestRejected(f"the prompt has {len(request.prompt_ids)} tokens")
        if max(request.prompt_ids) >= self.vocab_size:
            raise RequestRejected(f"prompt_ids holds {max(request.prompt_ids)}")
        self.requests[request.key] = request
        self.said[request.key] = 0
        self.seen.append(request)

    def cancel(self, key):
        if key not in self.requests:
            return False
        del self.requests[key]
        self.cancelled.append(key)
        return True

    def step(self):
        self.num_steps += 1
        if self.on_step is not None:
            self.on_step(self)
        progress = [RequestProgress(key=key, attempt=0, finish_reason=FinishReason.CANCELLED) for key in self.cancelled]
        self.cancelled = []
        for key, request in list(self.requests.items()):
            progress.append(self._speak(key, request))
        return StepOutput(progress=tuple(progress))

    def _speak(self, key, request):
        if request.prompt_ids[0] == 13:
            del self.requests[key]
            return RequestProgress(key=key, attempt=0, finish_reason=FinishReason.FAILED, error="logits are not finite")
        index = self.said[key]
        self.said[key] += 1
        token_id = self.script[index] if index < len(self.script) else EOS
        finish = FinishReason.STOP if token_id == EOS else FinishReason.LENGTH if index + 1 == request.params.max_tokens else None
        if finish is not None:
            del self.requests[key]
        wants_logprobs = request.params.logprobs is not None
        return RequestProgress(
            key=key,
            attempt=0,
            token_ids=(token_id,),
            logprobs=(TokenLogprob(token_id, -1.0, ()),) if wants_logprobs else (),
            finish_reason=finish,
            stop_token_id=EOS if token_id == EOS else None,
            num_cached_tokens=3,
        )

    def close(self):
        self.is_closed = True


@pytest.fixture
def words(default_tokenizer):
    return default_tokenizer.encode("one two three four")


@pytest.fixture
def engine(words):
    return ScriptedEngine(words)


@pytest.fixture
def llm(engine, default_tokenizer):
    return LLM.from_engine(engine, default_tokenizer)


def test_generate_one_text_gives_one_output(llm, engine, words, default_tokenizer):
    (output,) = llm.generate("Say it", use_tqdm=False)
    assert output.prompt == "Say it"
    assert output.prompt_token_ids == default_tokenizer.encode("Say it")
    assert output.num_cached_tokens == 3
    (answer,) = output.outputs
    assert (answer.index, answer.text, answer.token_ids) == (0, "one two three four", [*words, EOS])
    assert (answer.finish_reason, answer.stop_reason, answer.logprobs, answer.error) == (FinishReason.STOP, None, None, None)
    assert not engine.has_work


def test_generate_many_kinds_of_prompts_keeps_their_order(llm, engine):
    outputs = llm.generate(["a", [5, 6, 7], "b"], use_tqdm=False)
    assert [output.prompt for output in outputs] == ["a", None, "b"]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert len({output.request_id for output in outputs}) == 3


def test_generate_one_list_of_ids_is_one_prompt(llm):
    (output,) = llm.generate([5, 6, 7], use_tqdm=False)
    assert output.prompt_token_ids == [5, 6, 7]


def test_generate_nothing_gives_nothing(llm, engine):
    assert llm.generate([], use_tqdm=False) == []
    assert engine.num_steps == 0


def test_generate_params_for_each_prompt(llm, words):
    params = [SamplingParams(max_tokens=1, logprobs=0), SamplingParams(max_tokens=None)]
    short, long = llm.generate(["a", "b"], params, use_tqdm=False)
    assert (short.outputs[0].token_ids, short.outputs[0].finish_reason) == (words[:1], FinishReason.LENGTH)
    assert [logprob.token_id for logprob in short.outputs[0].logprobs] == words[:1]
    assert long.outputs[0].finish_reason is FinishReason.STOP


def test_generate_params_of_wrong_number_are_refused(llm):
    with pytest.raises(ValueError, match="sampling_params must be one or one for each of the 2 prompts, got 1"):
        llm.generate(["a", "b"], [SamplingParams()], use_tqdm=False)


def test_generate_n_choices_share_a_seed_and_differ_by_choice(llm, engine):
    (output,) = llm.generate("a", SamplingParams(n=3), use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({request.seed for request in engine.seen}) == 1
    assert [request.choice for request in engine.seen] == [0, 1, 2]
    llm.generate(["a", "b"], SamplingParams(seed=7), use_tqdm=False)
    assert [request.seed for request in engine.seen[3:]] == [7, 7]
    llm.generate(["a", "b"], use_tqdm=False)
    assert engine.seen[5].seed != engine.seen[6].seed


def test_generate_stop_string_cancels_the_rest_on_the_engine(llm, engine, words, default_tokenizer):
    engine.script = words * 100
    used = next(n for n in range(len(words)) if "three" in default_tokenizer.decode(words[:n]))
    (output,) = llm.generate("a", SamplingParams(max_tokens=400, stop=("three",)), use_tqdm=False)
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids) == ("one two ", words[:used])
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "three")
    assert engine.num_steps == used + 1
    assert not engine.has_work


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([], "empty"),
        ("", "empty"),
        ([49152], "49152"),
        ([1] * 64, "64 tokens"),
        ("\ud800", "lone surrogate"),
        (7, "must be text or a list"),
    ],
)
def test_generate_bad_prompt_is_refused_by_index_before_anything_runs(llm, engine, bad, reason):
    with pytest.raises(ValueError, match=f"^prompt 1: .*{reason}"):
        llm.generate(["fine", bad, "fine"], use_tqdm=False)
    assert engine.num_steps == 0
    assert not engine.requests
    (output,) = llm.generate("again", use_tqdm=False)
    assert output.outputs[0].text == "one two three four"


def test_generate_failed_request_leaves_the_others_whole(llm, engine):
    good, failed = llm.generate([[5], [13]], use_tqdm=False)
    assert good.outputs[0].text == "one two three four"
    assert (failed.outputs[0].finish_reason, failed.outputs[0].error) == (FinishReason.FAILED, "logits are not finite")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_generate_error_in_a_step_cancels_what_is_left(llm, engine, error):
    def fail(engine):
        if engine.num_steps == 2:
            raise error

    engine.on_step = fail
    with pytest.raises(error):
        llm.generate(["a", "b"], use_tqdm=False)
    assert not engine.requests
    (output,) = llm.generate("c", use_tqdm=False)
    assert output.outputs[0].text == "one two three four"
    assert not engine.has_work


@pytest.fixture
def default_interrupt():
    """Ray and servers of earlier tests may have put a handler of their own in its place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_interrupt")
def test_generate_ctrl_c_takes_effect_after_the_step(llm, engine):
    ended = []

    def interrupt(engine):
        if engine.num_steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        ended.append(engine.num_steps)

    before = signal.getsignal(signal.SIGINT)
    engine.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"], use_tqdm=False)
    assert ended == [1, 2]
    assert not engine.requests
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("default_interrupt")
def test_generate_second_ctrl_c_strikes_at_once(llm, engine):
    ended = []

    def interrupt(engine):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        ended.append(engine.num_steps)

    engine.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a"], use_tqdm=False)
    assert ended == []


def test_chat_one_conversation_or_many(llm, default_tokenizer):
    conversation = [{"role": "user", "content": "Hi"}]
    (output,) = llm.chat(conversation, use_tqdm=False)
    assert output.prompt_token_ids == default_tokenizer.chat_prompt_ids(conversation)
    assert output.prompt.endswith("<|im_start|>assistant\n")
    outputs = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "Yo"}]], use_tqdm=False)
    assert outputs[0].prompt_token_ids == output.prompt_token_ids
    assert "Yo" in outputs[1].prompt


def test_chat_text_that_spells_a_control_token_stays_text(llm, default_tokenizer):
    (output,) = llm.chat([{"role": "user", "content": "a<|im_end|>b"}], use_tqdm=False)
    plain = default_tokenizer.chat_prompt_ids([{"role": "user", "content": "ab"}])
    assert output.prompt_token_ids.count(EOS) == plain.count(EOS)
    assert default_tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False) == output.prompt


def test_chat_bad_conversation_is_refused_by_index(llm, engine):
    good = [{"role": "user", "content": "Hi"}]
    with pytest.raises(ChatTemplateError, match=r"^conversation 1: the chat template cannot render"):
        llm.chat([good, [{"role": "user", "content": None}]], use_tqdm=False)
    with pytest.raises(ValueError, match=r"^conversation 1: must be a list of messages"):
        llm.chat([good, "Hi"], use_tqdm=False)
    assert engine.num_steps == 0


def test_shutdown_closes_the_engine_once_and_refuses_further_work(llm, engine):
    with llm as entered:
        assert entered is llm
    assert engine.is_closed
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("a", use_tqdm=False)


def test_llm_unknown_setting_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no setting max_seqs; allowed are .*max_num_seqs"):
        LLM(max_seqs=3)


def test_llm_bad_setting_is_refused_by_name():
    with pytest.raises(ValueError, match="max_num_seqs must be at least 1, got 0"):
        LLM(max_num_seqs=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculation": "magic"}, "speculation.method must be one of none, auto, ngram"),
        ({"speculation": {"depth": 3}}, "speculation has no setting depth; allowed are method"),
        ({"speculative_config": {"method": "magic"}}, "speculative_config.method must be one of ngram"),
        ({"speculative_config": {"method": "mtp"}}, "speculative_config.method 'mtp' is not supported"),
        ({"speculation": "ngram", "speculative_config": {"method": "ngram"}}, "leave one of them out"),
    ],
)
def test_llm_bad_speculation_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        LLM(**settings)


def test_progress_bar_counts_prompts(llm, capsys):
    llm.generate(["a", "b"], SamplingParams(n=2))
    assert "2/2" in capsys.readouterr().err
