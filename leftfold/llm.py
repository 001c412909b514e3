"""Offline use: a model in this process. `LLM("smollm2").chat([{"role": "user", "content": "Hello"}])`."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from leftfold.answer import Answer, Beside, Completion, TokenLogprob, Usage
from leftfold.asking import (
    Message,
    Prompt,
    conversations_of,
    is_conversation,
    params_of,
    prompt_of,
    prompts_of,
    scores_of,
    stops_of,
)
from leftfold.attaching import Delivery, by_choice
from leftfold.builder import build_engine
from leftfold.engine import Engine
from leftfold.errors import EngineError
from leftfold.events import Abort, Admit, SamplingParams
from leftfold.executor.base import Score
from leftfold.fsm import Output
from leftfold.hub import resolve
from leftfold.options import EngineOptions
from leftfold.params import choice_seed
from leftfold.text import load_tokenizer

Inbox = SimpleQueue[tuple[str, Output | None, Sequence[Score]]]
"""Outputs by request, with what came beside each; None: nothing more will come."""


class LLM:
    """A model with its engine, in this process.

    `model`: `smollm2`, a local folder, a `.gguf` file or a hub id; `options` as in `EngineOptions`. Without a
    `log_dir` the events are not kept. Raises ConfigurationError for an option that cannot be; EngineError, HubError or
    TextError when the model cannot be loaded. Close it, or use it in a `with` statement. Several threads may ask at
    once; their requests share the batch.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        options.setdefault("durability", "off" if options.get("log_dir") is None else "async")
        chosen = _chosen({"model": model, **options})
        self.tokenizer = load_tokenizer(resolve(chosen.model).path)
        self.engine: Engine = build_engine(chosen, self._deliver)
        self._inboxes: dict[str, Inbox] = {}
        self._failure = ""
        self.engine.start()
        self._thread = threading.Thread(target=self._run, name="leftfold-engine", daemon=True)
        self._thread.start()

    # Asking

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Continue each prompt (a text or token ids); one completion per prompt and choice, in order.

        `params`: one for all, or one per prompt. `stop`: strings that end an answer. `logprobs`: how many alternatives
        (0 to 20) to give beside every token with its log-probability; `prompt_logprobs`: the same for the prompt, which
        is then computed in full, whatever the prefix cache holds. Raises TypeError and ValueError that name what is
        wrong.
        """
        asked = prompts_of(prompts)
        each, stops, beside = params_of(params, len(asked)), stops_of(stop), scores_of(logprobs, prompt_logprobs)
        return self._answers([self._ids(prompt) for prompt in asked], each, stops, beside, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Answer one conversation, or each of several; messages as in the HTTP API.

        Raises TemplateError, and TypeError and ValueError as `generate` does.
        """
        asked = conversations_of(messages)
        each, stops, beside = params_of(params, len(asked)), stops_of(stop), scores_of(logprobs, prompt_logprobs)
        ids = [self.tokenizer.encode_chat(conversation) for conversation in asked]
        return self._answers(ids, each, stops, beside, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> Iterator[str | Completion]:
        """One answer as it comes: pieces of text, then the `Completion`. Closing the iterator aborts it.

        Raises as `chat` does, when the first piece is asked for.
        """
        each, stops, beside = params_of(params, 1), stops_of(stop), scores_of(logprobs, prompt_logprobs)
        if is_conversation(prompt):
            ids = self.tokenizer.encode_chat(conversations_of(prompt)[0])
        else:
            ids = self._ids(prompt_of(prompt, "prompt"))
        with self._admitted([ids], each, stops, beside) as (answers, inbox):
            (answer,) = answers.values()
            while answer.result is None:
                if text := self._next(answers, inbox)[1]:
                    yield text
            yield answer.result

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _answers(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        stops: Sequence[str],
        beside: Beside,
        use_tqdm: bool,
    ) -> list[Completion]:
        from tqdm import tqdm

        with self._admitted(prompts, params, stops, beside) as (answers, inbox):
            left = len(answers)
            with tqdm(total=left, desc="Generating", unit="answer", disable=not use_tqdm) as bar:
                while left:
                    answer, _ = self._next(answers, inbox)
                    if answer.result is not None:
                        left -= 1
                        bar.update()
            return [answer.result for answer in answers.values() if answer.result is not None]

    @contextmanager
    def _admitted(
        self, prompts: list[list[int]], params: list[SamplingParams], stops: Sequence[str], beside: Beside
    ) -> Iterator[tuple[dict[str, Answer], Inbox]]:
        """Put requests into the engine; what has not ended when the block is left is aborted."""
        inbox: Inbox = SimpleQueue()
        answers: dict[str, Answer] = {}
        batch, taken = secrets.token_hex(6), True
        try:
            for index, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
                for choice in range(wanted.n):
                    rid = f"{batch}-{index}-{choice}"
                    chosen = self._resolved(wanted, choice)
                    answers[rid] = Answer(rid, prompt, chosen, self.tokenizer, stops, beside)
                    self._inboxes[rid] = inbox
                    taken = self.engine.submit(Admit, rid=rid, prompt=prompt, params=chosen, want=beside.want)
            if not taken or self._failure:
                raise EngineError(self._failure or "the engine has stopped")
            yield answers, inbox
        finally:
            for rid, answer in answers.items():
                self._inboxes.pop(rid, None)
                if answer.result is None:
                    self.engine.submit(Abort, rid=rid, reason="the caller went away")

    def _next(self, answers: dict[str, Answer], inbox: Inbox) -> tuple[Answer, str]:
        """Wait for one output; the answer it belongs to and the text that became final. Raises EngineError."""
        while True:
            rid, output, scores = inbox.get()
            if output is None:
                raise EngineError(self._failure)
            answer = answers[rid]
            if answer.result is not None:
                continue
            text = answer.take(output, scores)
            if answer.stopped and output.finish_reason is None:
                self.engine.submit(Abort, rid=rid, reason="stop_string", keep=len(answer.token_ids))
            if text or answer.result is not None:
                return answer, text

    def _resolved(self, params: SamplingParams, choice: int) -> SamplingParams:
        """One choice's own parameters: the model's end tokens, and a seed if none was given."""
        ends = () if params.ignore_eos else self.tokenizer.eos_ids
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *ends)))
        seed = secrets.randbits(64) if params.seed is None else choice_seed(params.seed, choice)
        return dataclasses.replace(params, stop_token_ids=stops, seed=seed, n=1)

    # The engine's thread

    def _run(self) -> None:
        try:
            self.engine.run()
            self._failure = "the engine was stopped"
        except Exception as error:  # whoever waits must hear of it, whatever it is
            self._failure = str(error)
        for inbox in list(self._inboxes.values()):
            inbox.put(("", None, ()))

    def _deliver(self, effects: Delivery) -> None:
        beside = by_choice(effects.attachments)
        for output in effects.outputs:
            if (inbox := self._inboxes.get(output.rid)) is not None:
                inbox.put((output.rid, output, beside.pop((output.rid, output.epoch, output.choice), ())))

    # The end

    def close(self) -> None:
        """Stop the engine and give back its memory; what still runs ends."""
        self.engine.stop()
        self._thread.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chosen(options: dict[str, Any]) -> EngineOptions:
    """Raises ConfigurationError; TypeError for an option that there is not."""
    known = [field.name for field in dataclasses.fields(EngineOptions)]
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{name} is no option: there are {', '.join(known)}")
        if isinstance(value, os.PathLike):
            options[name] = os.fspath(value)
    return EngineOptions(**options)


__all__ = ["LLM", "Completion", "TokenLogprob", "Usage"]
