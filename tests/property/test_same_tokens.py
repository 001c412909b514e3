"""What a request says depends on nothing but itself: not on limits, policy, neighbours, aborts, pauses or losses."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from leftfold.executor.oracle import expected_tokens
from leftfold.fsm import FinishReason
from leftfold.fsm.policy import BUILT_IN
from leftfold.replay.fuzzing import World

VOCAB = 50
LONGEST = 48
TEXTS = ([3, 1, 4, 1, 5, 9, 2, 6] * 6, [1] * LONGEST)
REQUESTS = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.builds(lambda text, size: text[:size], st.sampled_from(TEXTS), st.integers(1, 20)),
            "max_tokens": st.integers(1, 14),
        },
        optional={
            "n": st.integers(2, 3),
            "priority": st.integers(0, 2),
            "tenant": st.sampled_from("xy"),
            "deadline": st.just(1 << 40),
            "cache": st.sampled_from(("read", "off")),
            "min_tokens": st.integers(0, 3),
            "stop_at": st.integers(0, 6),
        },
    ),
    min_size=1,
    max_size=5,
)
LIMITS = st.fixed_dictionaries(
    {
        "pages": st.integers(0, 40),  # beyond those that the longest request needs
        "page_size": st.integers(1, 8),
        "max_running": st.integers(1, 5),
        "max_batch_tokens": st.integers(1, 30),
        "max_chunk_tokens": st.none() | st.integers(1, 9),
        "policy": st.sampled_from(BUILT_IN),
        "prefix_cache": st.booleans(),
        "growth_horizon": st.sampled_from((0, 0, 5)),
    }
)
MEANWHILE = st.lists(
    st.sampled_from(
        [
            ("steps", {"count": 2}), ("tick", {}), ("done", {}), ("admit next", {}), ("admit next", {}),
            ("neighbour", {}), ("abort", {"rid": "neighbour"}), ("fail", {}), ("lose", {}), ("start", {}),
            ("control", {"kind": "Pause", "mode": "keep"}), ("control", {"kind": "Pause", "mode": "wait"}),
            ("control", {"kind": "Resume"}), ("control", {"kind": "FlushCache"}), ("control", {"kind": "Sleep"}),
            ("control", {"kind": "Wake"}), ("control", {"kind": "Reconfigure", "set": {"max_running": 2}}),
        ]
    ),
    max_size=30,
)  # fmt: skip


def heard(requests: list[dict[str, Any]], depth: int, limits: dict[str, Any], meanwhile: list[Any]) -> dict[Any, Any]:
    """Run the requests beside what happens meanwhile; what each choice heard, and why it ended."""
    most = max(len(request["prompt"]) + request["max_tokens"] for request in requests)
    size = limits["page_size"]
    config = {**limits, "num_pages": -(-most // size) + limits["pages"], "max_model_len": LONGEST}
    del config["pages"]
    world = World(vocab=VOCAB, rigour=8, pipeline_depth=depth, **config)
    said: dict[Any, list[int]] = {}
    take = world.take

    def listening(event: Any, plan: Any = None) -> Any:
        effects = take(event, plan)
        for output in effects.outputs:
            said.setdefault((output.rid, output.choice), []).extend(output.tokens)
        return effects

    world.take = listening  # type: ignore[method-assign]
    coming = [_admission(number, request) for number, request in enumerate(requests)]
    for name, arguments in meanwhile:
        if name == "admit next":
            world.admit(**coming.pop(0)) if coming else None
        elif name == "neighbour":
            world.admit("neighbour", TEXTS[0][:6], 9, priority=1)
        elif name != "fail" or all(client.failures < 2 for client in world.clients.values()):
            world.perform((name, arguments))
    for admission in coming:
        world.admit(**admission)
    world.finish(replay=False)
    ends = {(rid, choice): output.finish_reason for (rid, _, choice), output in world.ended.items()}
    return {who: (said.get(who, []), ends[who]) for who in ends if who[0] != "neighbour"}


def _admission(number: int, request: dict[str, Any]) -> dict[str, Any]:
    admission = {"rid": f"r{number}", **request}
    stop_at = admission.pop("stop_at", None)
    if stop_at is not None:
        admission["stop"] = expected_tokens(request["prompt"], stop_at + 1, VOCAB)[-1:]
    return admission


def alone(request: dict[str, Any]) -> tuple[list[int], FinishReason]:
    """By the model's own account."""
    tokens = expected_tokens(request["prompt"], request["max_tokens"], VOCAB)
    if "stop_at" in request:
        stop = expected_tokens(request["prompt"], request["stop_at"] + 1, VOCAB)[-1]
        for count, token in enumerate(tokens, 1):
            if token == stop and count >= request.get("min_tokens", 0):
                return tokens[:count], FinishReason.STOP
    return tokens, FinishReason.LENGTH


@settings(max_examples=250)
@given(requests=REQUESTS, limits=LIMITS, others=LIMITS, meanwhile=MEANWHILE)
def test_every_request_hears_the_same_at_every_depth(
    requests: list[dict[str, Any]], limits: dict[str, Any], others: dict[str, Any], meanwhile: list[Any]
) -> None:
    expected = {
        (f"r{number}", choice): alone(request)
        for number, request in enumerate(requests)
        for choice in range(request.get("n", 1))
    }
    for depth in (0, 1, 2):
        assert heard(requests, depth, limits, meanwhile) == expected
    assert heard(requests, 1, others, []) == expected
