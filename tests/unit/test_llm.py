"""The offline API on a tiny random model: prompts in, text and usage out; stop strings, choices, streams, the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from leftfold.answer import Completion
from leftfold.errors import ConfigurationError, EngineError
from leftfold.events import EventLog, SamplingParams
from leftfold.hub import ModelNotFound
from leftfold.llm import LLM
from leftfold.replay.verify import verify
from tests import tiny_models
from tests.tiny_folder import VOCAB_SIZE, write_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
OPTIONS = {"kv_tokens": 1024, "max_model_len": 256, "threads": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.KINDS, "text", ("Llama", {"vocab_size": VOCAB_SIZE}))
        torch.set_num_threads(1)
        tiny_models.make("text", path)
    return write_tokenizer(path)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **OPTIONS) as made:
        yield made


def idle(llm: LLM) -> bool:
    """After everything submitted so far was taken: nothing runs or waits, no page is held."""
    llm.generate("sync", SamplingParams(max_tokens=1), use_tqdm=False)
    stats = llm.engine.stats()
    held = stats["num_pages"] - stats["pages_free"] - stats["pages_cached"]
    return (stats["live"], stats["running"], stats["waiting"], held) == (0, 0, 0, 0)


def test_generate_continues_each_prompt_as_it_would_alone(llm: LLM) -> None:
    prompts = ["Hello", "Once upon a time", "x" * 40]
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    for prompt, answer in zip(prompts, together, strict=True):
        assert answer.prompt_token_ids == tuple(llm.tokenizer.encode(prompt))
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(answer.token_ids) <= 12
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        assert answer.finish_reason in ("length", "stop") and answer.error is None


def test_a_prompt_may_be_token_ids(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    text, tokens, many = (
        llm.generate(prompt, GREEDY, use_tqdm=False)  # type: ignore[arg-type]
        for prompt in ("Hello", ids, [ids, ids])
    )
    assert text[0].token_ids == tokens[0].token_ids == many[0].token_ids == many[1].token_ids


def test_end_tokens_end_an_answer_unless_they_are_ignored(llm: LLM) -> None:
    free = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]
    ended = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=[free.token_ids[2]])
    answer = llm.generate("abc", ended, use_tqdm=False)[0]
    first = free.token_ids.index(free.token_ids[2])
    assert answer.token_ids == free.token_ids[: first + 1] and answer.finish_reason == "stop"
    assert len(free.token_ids) == 8 and free.finish_reason == "length"


def test_a_stop_string_ends_the_text_before_it_and_the_request_in_the_engine(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    whole = llm.generate("stop here", params, use_tqdm=False)[0]
    stop = whole.text[5:7]
    answer = llm.generate("stop here", params, stop=stop, use_tqdm=False)[0]
    assert answer.text == whole.text[: whole.text.index(stop)] and answer.finish_reason == "stop"
    assert answer.usage.completion_tokens == len(answer.token_ids) < 60
    assert whole.token_ids[: len(answer.token_ids)] == answer.token_ids
    assert idle(llm)


def test_choices_are_drawn_apart_and_a_seed_draws_them_again(llm: LLM) -> None:
    params = SamplingParams(max_tokens=10, n=3, seed=5, ignore_eos=True)
    first, second = (llm.generate("draw", params, use_tqdm=False) for _ in range(2))
    assert [answer.token_ids for answer in first] == [answer.token_ids for answer in second]
    assert len({answer.token_ids for answer in first}) == 3


def test_seeds_are_of_64_bits_for_every_choice(llm: LLM) -> None:
    last = SamplingParams(max_tokens=8, n=2, seed=2**64 - 1, ignore_eos=True)
    wrapped = llm.generate("draw", last, use_tqdm=False)[1]
    (alone,) = llm.generate("draw", SamplingParams(max_tokens=8, seed=0, ignore_eos=True), use_tqdm=False)
    assert wrapped.token_ids == alone.token_ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": 2}, {"n": 0}, {"max_tokens": 1.5},
        {"top_k": "x"}, {"seed": 2**64}, {"repetition_penalty": 0.0}, {"logit_bias": {"a": 1.0}},
        {"logit_bias": {1: float("inf")}},
        {"stop_token_ids": [-1]}, {"stop_token_ids": 5}, {"stop_token_ids": "5"}, {"ignore_eos": 1},
    ],
)  # fmt: skip
def test_parameters_out_of_range_are_refused_by_name(llm: LLM, wrong: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        llm.generate("a", SamplingParams(**wrong), use_tqdm=False)


def test_parameters_may_differ_by_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (2, 5)]
    answers = llm.generate(["a", "b"], params, use_tqdm=False)
    assert [len(answer.token_ids) for answer in answers] == [2, 5]
    with pytest.raises(ValueError, match="1 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], params[:1], use_tqdm=False)


def test_chat_renders_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt_token_ids == tuple(llm.tokenizer.encode_chat(messages))
    assert [same.token_ids for same in llm.chat([messages, messages], GREEDY, use_tqdm=False)] == [answer.token_ids] * 2


def test_a_stream_is_the_whole_answer_in_pieces(llm: LLM) -> None:
    whole = llm.generate("stream me", GREEDY, use_tqdm=False)[0]
    *pieces, answer = llm.stream("stream me", GREEDY)
    assert isinstance(answer, Completion) and answer.token_ids == whole.token_ids
    assert "".join(str(piece) for piece in pieces) == answer.text == whole.text


def test_scores_stand_beside_every_token_and_change_none(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    plain = llm.generate("score me", params, use_tqdm=False)[0]
    assert plain.logprobs is None and plain.prompt_logprobs is None
    for asked in ({"logprobs": 2}, {"prompt_logprobs": 3}, {"logprobs": 0, "prompt_logprobs": 1}):
        answer = llm.generate("score me", params, use_tqdm=False, **asked)[0]
        assert (answer.token_ids, answer.text) == (plain.token_ids, plain.text)
        if "logprobs" in asked:
            assert answer.logprobs is not None
            assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
            assert all(len(entry.top) == asked["logprobs"] for entry in answer.logprobs)
            assert all(entry.top[0] == entry[:2] for entry in answer.logprobs if entry.top)  # greedy: the likeliest
        if "prompt_logprobs" in asked:
            assert answer.prompt_logprobs is not None
            assert [e and e.token_id for e in answer.prompt_logprobs] == [None, *answer.prompt_token_ids[1:]]
            assert all(len(entry.top) == asked["prompt_logprobs"] for entry in answer.prompt_logprobs[1:] if entry)
    assert "logprobs" not in asked or idle(llm)


def test_scores_of_a_prompt_are_those_of_the_same_tokens_drawn(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    first = llm.generate("twice", params, logprobs=5, use_tqdm=False)[0]
    longer = [*first.prompt_token_ids, *first.token_ids]
    again = llm.generate([longer], params, prompt_logprobs=5, use_tqdm=False)[0]
    assert again.prompt_logprobs is not None
    assert again.prompt_logprobs[len(first.prompt_token_ids) :] == first.logprobs


def test_scores_end_with_the_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    whole = llm.generate("stop here", params, use_tqdm=False)[0]
    stopped = llm.generate("stop here", params, stop=whole.text[5:7], logprobs=1, use_tqdm=False)[0]
    *_, streamed = llm.stream("stop here", params, stop=whole.text[5:7], logprobs=1)
    assert stopped.logprobs is not None and len(stopped.logprobs) == len(stopped.token_ids) < 60
    assert streamed == stopped


def test_a_stop_token_ends_the_text_before_it_and_is_among_the_ids(llm: LLM) -> None:
    free = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)[0]
    stop = free.token_ids[3]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=[stop])
    answer = llm.generate("abc", params, use_tqdm=False)[0]
    assert answer.token_ids[-1] == stop and answer.finish_reason == "stop"
    assert answer.text == llm.tokenizer.decode(answer.token_ids[:-1])


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("go on", SamplingParams(max_tokens=200, seed=1, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert idle(llm)
    assert llm.engine.stats()["finished_abort"] >= 1


def test_what_cannot_run_is_an_error_of_its_answer_alone(llm: LLM) -> None:
    bad, good = llm.generate([[], [1, 2, 3]], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    assert bad.finish_reason == "error" and bad.error == "prompt is empty" and bad.text == ""
    assert good.error is None and good.token_ids
    long = llm.generate([[1] * 300], GREEDY, use_tqdm=False)[0]
    assert long.error is not None and "max_model_len 256" in long.error


def test_progress_is_shown_unless_told_otherwise(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate("a", GREEDY)
    assert "Generating" in capsys.readouterr().err
    llm.generate("a", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_a_log_can_be_kept_replayed_and_gone_on_with(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    for incarnation in (1, 2):
        with LLM(str(folder), log_dir=str(path), **OPTIONS) as llm:
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
            assert llm.engine.stats()["incarnation"] == incarnation
    verdict = verify(EventLog.read(path))
    assert verdict.clean and verdict.steps > 0


def test_a_log_in_use_is_refused(folder: Path, tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "log"), pytest.raises(ConfigurationError, match="in use"):
        LLM(str(folder), log_dir=str(tmp_path / "log"), **OPTIONS)


def test_nothing_can_be_asked_of_a_closed_one(folder: Path) -> None:
    llm = LLM(str(folder), **OPTIONS)
    llm.close()
    with pytest.raises(EngineError):
        llm.generate("a", GREEDY, use_tqdm=False)


def test_a_model_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model 'nowhere'"):
        LLM("nowhere")


@pytest.mark.parametrize(("wrong", "told"), [
    ({"model": 5}, "model is 5: give"), ({"model": ""}, "model is ''"), ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"), ({"max_model_len": 0}, "max_model_len is 0"),
    ({"max_model_len": "x"}, "max_model_len is 'x'"), ({"page_size": 0}, "page_size is 0"),
    ({"page_size": -1}, "page_size is -1"), ({"threads": 100_000}, "threads is 100000"),
    ({"log_dir": ""}, "log_dir is ''"),
])  # fmt: skip
def test_an_option_that_cannot_be_is_told_before_anything_is_loaded(folder: Path, wrong: Any, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        LLM(**{"model": str(folder), **OPTIONS, **wrong})


def test_an_option_that_there_is_not_is_named(folder: Path) -> None:
    with pytest.raises(TypeError, match="max_seqs is no option: there are model, log_dir, max_num_seqs"):
        LLM(str(folder), max_seqs=3)


def test_places_may_be_paths(folder: Path, tmp_path: Path) -> None:
    with LLM(folder, log_dir=tmp_path / "log", **OPTIONS) as llm:  # type: ignore[arg-type]
        assert llm.generate(np.array([1, 2, 3]), GREEDY, use_tqdm=False)[0].prompt_token_ids == (1, 2, 3)
    assert (tmp_path / "log").is_dir()


MESSAGE = {"role": "user", "content": "x"}
PROMPTS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "prompts is None: give a text, token ids, or a list of such"), (5, TypeError, "prompts is 5"),
    (b"x", TypeError, "prompts is b'x'"), ({"a": 1}, TypeError, "prompts is {'a': 1}"),
    (["a", None], TypeError, r"prompts\[1\] is None: give a text or token ids"),
    ([MESSAGE], TypeError, r"prompts\[0\] is {'role': 'user', 'content': 'x'}"),
    ([1, "x"], TypeError, "prompts holds 'x': token ids are whole numbers"), ([1, 2.0], TypeError, "prompts holds 2.0"),
    ([-1], ValueError, "prompts holds -1: token ids are from 0 to"), ([2**70], ValueError, "prompts holds 1180591620"),
    (["a", [1, True]], TypeError, r"prompts\[1\] holds True"), ([[["a"]]], TypeError, r"prompts\[0\] holds \['a'\]"),
]
CONVERSATIONS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, "messages is None: give a list of messages"), ("hi", TypeError, "messages is 'hi'"),
    (MESSAGE, TypeError, "messages is {"), (["hi"], TypeError, r"messages\[0\] is 'hi'"),
    ([MESSAGE, "hi"], TypeError, r"messages\[1\] is 'hi': give a message such as"),
    ([[MESSAGE], 5], TypeError, r"messages\[1\] is 5"), ([[MESSAGE], [5]], TypeError, r"messages\[1\]\[0\] is 5"),
    ([[MESSAGE], []], ValueError, r"messages\[1\] is empty"),
    ([{"content": "x"}], TypeError, r"messages\[0\]\['role'\] is None"),
    ([{"role": "user"}], TypeError, r"messages\[0\]\['content'\] is None: give a text or a list of text parts"),
    ([{"role": "user", "content": 5}], TypeError, r"messages\[0\]\['content'\] is 5"),
    ([[MESSAGE, {"role": "user", "content": []}]], TypeError, r"messages\[0\]\[1\]\['content'\] is \[\]"),
    ([{"role": "user", "content": ["x"]}], TypeError, r"messages\[0\]\['content'\]\[0\] is 'x': give {"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], TypeError, r"\['content'\]\[0\] is {'type': 'image_url'}"),
]
BESIDE: list[tuple[Any, type[Exception], str]] = [
    ({"params": {"max_tokens": 2}}, TypeError, r"params is {'max_tokens': 2}: give SamplingParams\(…\)"),
    ({"params": 5}, TypeError, "params is 5"), ({"params": "x"}, TypeError, "params is 'x'"),
    ({"params": [5]}, TypeError, r"params\[0\] is 5"), ({"params": []}, ValueError, "0 sampling parameters"),
    ({"stop": 5}, TypeError, "stop is 5"), ({"stop": ["a", 5]}, TypeError, "stop holds 5"),
    ({"stop": ""}, ValueError, "stop holds ''"), ({"logprobs": 21}, ValueError, "logprobs is 21: give a whole number"),
    ({"logprobs": -1}, ValueError, "logprobs is -1"), ({"logprobs": "x"}, ValueError, "logprobs is 'x'"),
    ({"prompt_logprobs": True}, ValueError, "prompt_logprobs is True"),
    ({"prompt_logprobs": 21}, ValueError, "prompt_logprobs is 21"),
]


@pytest.mark.parametrize(("prompts", "kind", "told"), PROMPTS)
def test_a_prompt_that_is_none_is_told(llm: LLM, prompts: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(("messages", "kind", "told"), CONVERSATIONS)
def test_a_conversation_that_is_none_is_told(llm: LLM, messages: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_parts_of_text_are_one_text_as_over_http(llm: LLM) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    asked = [[{"role": "user", "content": "a\nb"}], [{"role": "user", "content": parts}]]
    whole, joined = llm.chat(asked, GREEDY, use_tqdm=False)
    assert (whole.prompt_token_ids, whole.token_ids) == (joined.prompt_token_ids, joined.token_ids)
    own, none = llm.chat([[MESSAGE, {"role": "assistant", "content": text}] for text in ("", None)], use_tqdm=False)
    assert own.prompt_token_ids == none.prompt_token_ids


@pytest.mark.parametrize(("given", "kind", "told"), BESIDE)
def test_what_goes_with_a_prompt_is_checked(llm: LLM, given: Any, kind: type[Exception], told: str) -> None:
    for ask in (
        lambda: llm.generate("a", use_tqdm=False, **given), lambda: llm.chat([MESSAGE], use_tqdm=False, **given),
        lambda: list(llm.stream("a", **given)),
    ):  # fmt: skip
        with pytest.raises(kind, match=told):
            ask()


@pytest.mark.parametrize("prompt", [None, 5, {"a": 1}, ["a"], [MESSAGE, 5], [1.5]])
def test_a_stream_of_what_is_no_prompt_is_told(llm: LLM, prompt: Any) -> None:
    with pytest.raises(TypeError, match="^(prompt|messages)"):
        list(llm.stream(prompt, GREEDY))


@pytest.mark.parametrize("depth", [1, 2])
def test_planning_ahead_changes_no_token(llm: LLM, folder: Path, tmp_path: Path, depth: int) -> None:
    """Long prompts in chunks, drawn and greedy answers of different lengths, in one batch that is too large."""
    prompts = ["Hello", "Once upon a time", "x" * 90, "y" * 33, "The end", "z"]
    params = [SamplingParams(temperature=i % 2 * 0.9, seed=i, max_tokens=3 + 5 * i) for i in range(len(prompts))]
    expected = [answer.token_ids for answer in llm.generate(prompts, params, use_tqdm=False)]
    options = {**OPTIONS, "max_num_seqs": 4, "max_num_batched_tokens": 32, "pipeline_depth": depth}
    with LLM(str(folder), log_dir=str(tmp_path / "log"), **options) as ahead:
        for _ in range(2):  # the second time from the prefix cache
            assert [answer.token_ids for answer in ahead.generate(prompts, params, use_tqdm=False)] == expected
        assert idle(ahead)
    assert verify(EventLog.read(tmp_path / "log")).clean
