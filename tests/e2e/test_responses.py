"""`/v1/responses` as OpenAI's client uses it: whole, streamed, in the background, read again, cancelled, deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.servers import PATIENCE, ServerProcess, free_port
from tests.e2e.test_server_life import alive, engine_of, eventually
from tests.tiny_folder import write_tokenizer

ASKED: Any = {"model": "toy", "input": "hello", "max_output_tokens": 80, "extra_body": {"seed": 5}}


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_tokenizer(tmp_path_factory.mktemp("responses") / "toy", {})
    with ServerProcess.toy(folder, {"TOY_STEP_SECONDS": "0.005"}, max_model_len=4096) as running:
        yield running.wait_until_ready()


def settled(client: openai.OpenAI, name: str) -> Any:
    found: list[Any] = []

    def ended() -> bool:
        found.append(client.responses.retrieve(name))
        return found[-1].status not in ("queued", "in_progress")

    eventually(ended)
    return found[-1]


def test_whole_streamed_and_read_again_are_the_same(server: ServerProcess) -> None:
    client = client_of(server)
    whole = client.responses.create(**ASKED)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert len(whole.output_text) == 80 and whole.usage.output_tokens == 80
    events = list(client.responses.create(**ASKED, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    ended = events[-1].response
    assert ended.output_text == whole.output_text and ended.usage.total_tokens == whole.usage.total_tokens
    for after in (0, 3, 40, events[-2].sequence_number):
        again = list(client.responses.retrieve(ended.id, stream=True, starting_after=after))
        rest = [event for event in events if event.sequence_number > after]
        assert _joined(again) == _joined(rest)
        assert again[-1] == rest[-1]
    assert client.responses.retrieve(ended.id) == ended


def _joined(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_in_the_background_it_goes_on_whoever_listens(server: ServerProcess) -> None:
    client = client_of(server)
    text = client.responses.create(**ASKED).output_text
    made = client.responses.create(**ASKED, background=True)
    assert made.status in ("queued", "in_progress") and made.background
    assert settled(client, made.id).output_text == text
    heard = []
    with client.responses.create(**ASKED, background=True, stream=True) as stream:
        for event in stream:
            heard.append(event)
            if len(heard) == 20:
                break
    name, last = heard[0].response.id, heard[-1].sequence_number
    rest = list(client.responses.retrieve(name, stream=True, starting_after=last))
    assert _joined(heard) + _joined(rest) == text


def test_cancelled_and_deleted(server: ServerProcess) -> None:
    client = client_of(server)
    long = {**ASKED, "max_output_tokens": 3000}
    made = client.responses.create(**long, background=True)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    other = client.responses.create(**long, background=True)
    client.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)
    kept = client.responses.create(**ASKED)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(kept.id)
    gone = client.responses.create(**ASKED, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(gone.id)
    server.wait_until_idle()


@pytest.mark.parametrize("wrong", [
    {"tools": [{"type": "web_search"}]}, {"previous_response_id": "resp_1"}, {"background": True, "store": False},
    {"input": [{"type": "item_reference", "id": "x"}]}, {"input": []}, {"text": {"format": {"type": "json_object"}}},
    {"max_output_tokens": 0},
])  # fmt: skip
def test_what_is_not_supported_is_named(server: ServerProcess, wrong: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(server).responses.create(**{**ASKED, **wrong})
    assert caught.value.param is not None and next(iter(wrong)) in str(caught.value.body)


def test_conversations_and_instructions(server: ServerProcess) -> None:
    turns: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"role": "user", "content": "three"},
    ]
    client = client_of(server)
    made = client.responses.create(**{**ASKED, "input": turns}, instructions="be brief", metadata={"a": "b"})
    assert made.instructions == "be brief" and made.metadata == {"a": "b"}
    chat: Any = [{"role": "system", "content": "be brief"}, *({**t, "content": w} for t, w in zip(
        [{"role": "user"}, {"role": "assistant"}, {"role": "user"}], ["one", "two", "three"], strict=True))]
    same = client.chat.completions.create(model="toy", messages=chat, max_tokens=80, seed=5)
    assert same.choices[0].message.content == made.output_text


def test_what_was_acknowledged_outlives_the_server(tmp_path: Path) -> None:
    folder, port = write_tokenizer(tmp_path / "toy", {}), free_port()
    options: Any = {"port": port, "log_dir": str(folder / "log"), "durability": "strict"}
    with ServerProcess.toy(folder, {"TOY_STEP_SECONDS": "0.01"}, **options) as server:
        client = client_of(server.wait_until_ready())
        text = client.responses.create(**ASKED).output_text
        made = client.responses.create(**ASKED, background=True)
        engine = engine_of(server)
        server.process.kill()
        server.process.wait()
        eventually(lambda: not alive(engine))
    with ServerProcess.toy(folder, {"TOY_STEP_SECONDS": "0.01"}, **options) as server:
        client = client_of(server.wait_until_ready())
        assert settled(client, made.id).output_text == text
        rest = list(client.responses.retrieve(made.id, stream=True, starting_after=3 + 30))
        assert _joined(rest) == text[30:]
