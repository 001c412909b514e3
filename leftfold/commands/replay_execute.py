"""`leftfold replay execute`: a log's requests once more on the real model, compared token by token."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leftfold.commands.common import FINDING, OK, UsageError, positive, print_json, threads
from leftfold.commands.replay_common import add_log, allow_policy, read_log
from leftfold.commands.replay_views import guarded

if TYPE_CHECKING:
    from leftfold.executor.torch_executor import TorchExecutor
    from leftfold.fsm import Config


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The requests that the log answered are run again on the model, with their recorded seeds, and every token is "
        "compared; the first that differs is shown with the model's scores of both. Needs the model that made the log, "
        "its data type and its kernels. Exit code 1 where anything differs."
    )
    add_log(parser)
    parser.add_argument("--model", metavar="MODEL", help="where the model is (default: the name that the log has)")
    parser.add_argument("--other-model", action="store_true", help="allow a model that is not the log's")
    parser.add_argument("--rid", metavar="RID", action="append",
                        help="this request alone (its id, or its answer's); may be repeated")  # fmt: skip
    parser.add_argument("--limit", type=positive, metavar="N", help="the first N requests alone")
    parser.add_argument("--dtype", default="auto", help="as the engine's (default %(default)s)")
    parser.add_argument("--device", default="auto", help="as the engine's (default %(default)s)")
    parser.add_argument("--quantization", default="auto", help="as the engine's (default %(default)s)")
    parser.add_argument("--threads", type=threads, help="of the executor")
    parser.add_argument("--kernels", help="as the engine's --kernels")
    allow_policy(parser)


def run(args: argparse.Namespace) -> int:
    """0 when every token is the same."""
    from leftfold.replay.execute import execute, recorded
    from leftfold.replay.names import named

    def look() -> int:
        log = read_log(args.log)
        rids = None if args.rid is None else [rid for asked in args.rid for rid in named(log, asked).rids or [asked]]
        config, model, requests = recorded(log, rids)
        requests = requests[: args.limit]
        if not requests:
            raise UsageError(f"no request with an answer in {args.log}" + (f" called {args.rid}" if args.rid else ""))
        executor = _executor(args, config, model)

        def logits(context: Sequence[int]) -> Sequence[float]:
            return _logits(executor, config, context)

        differences = execute(requests, config, executor, logits)
        choices = sum(len(request.said) for request in requests)
        tokens = sum(len(said) for request in requests for said in request.said.values())
        touched = {(one.rid, one.epoch) for one in differences}
        identical = sum((request.event.rid, request.event.epoch) not in touched for request in requests)
        found = {"requests": len(requests), "identical": identical, "choices": choices, "tokens": tokens,
                 "model": model, "differences": [one.as_dict() for one in differences]}  # fmt: skip
        print_json(found) if args.json else print(_described(found))
        return FINDING if differences else OK

    return guarded(args, look)


def _executor(args: argparse.Namespace, config: Config, model: str) -> TorchExecutor:
    from leftfold.builder import load_executor
    from leftfold.errors import ConfigurationError
    from leftfold.hub import HubError, resolve
    from leftfold.identity import identity, same_model
    from leftfold.options import EngineOptions

    name = args.model or model.partition("#")[0]
    try:
        found = resolve(name)
        if not args.other_model and not same_model(model, identity(found)):
            raise UsageError(f"the log's model is {model!r}, {name} is {identity(found)!r} (--other-model allows that)")
        return load_executor(EngineOptions(
            model=name, kv_tokens=config.capacity, page_size=config.page_size, max_model_len=config.max_model_len,
            max_num_seqs=config.max_running, max_num_batched_tokens=config.max_batch_tokens, dtype=args.dtype,
            device=args.device, quantization=args.quantization, threads=args.threads, kernels=args.kernels,
        ))  # fmt: skip
    except (HubError, ConfigurationError, OSError) as error:
        raise UsageError(f"the model {name!r}: {error}") from error


def _logits(executor: TorchExecutor, config: Config, context: Sequence[int]) -> Sequence[float]:
    """The model's scores after `context`, before temperature, penalties and filters; None of them is drawn from."""
    from leftfold.events import Admit, SamplingParams
    from leftfold.replay.execute import run

    seen: list[Any] = []
    model = executor.model
    whole = model.logits

    def logits(hidden: Any) -> Any:
        scores = whole(hidden)
        seen.append(scores[-1].float().cpu())
        return scores

    model.logits = logits  # type: ignore[method-assign]
    try:
        event = Admit(t=0, rid="context", prompt=list(context), params=SamplingParams(max_tokens=1, temperature=0.0))
        run([event], config, executor)
    finally:
        del model.logits
    scores: Sequence[float] = seen[-1].tolist()
    return scores


def _described(found: dict[str, Any]) -> str:
    lines = [f"{found['identical']} of {found['requests']} requests identical, {found['tokens']} tokens compared"]
    for one in found["differences"]:
        which = "".join(f" {name} {one[name]}" for name in ("epoch", "choice") if one[name])
        scores = one["logits"]
        lines.append(
            f"{one['rid']}{which}: output token {one['output']} (position {one['position']}) was {one['recorded']} "
            f"(logit {scores['recorded']}), is {one['got']} (logit {scores['got']})"
        )
    return "\n".join(lines)


COMMANDS: dict[str, tuple[str, Any, Any]] = {
    "execute": ("the requests once more on the real model, token by token", _arguments, run),
}
