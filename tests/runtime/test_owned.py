"""What was given is ours: nobody changes afterwards what is stored, and who is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from onepen import Delivery, DeliverySettings, Inbound, Settings, SourcePolicy

from ..contract.agents import query
from .scripted import Held, inline, until

if TYPE_CHECKING:
    from pathlib import Path

    from onepen import Turn

KEY = "test:1"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "chat.db"


async def test_a_mapping_that_is_used_again_takes_no_reply_along(path: Path) -> None:
    target: dict[str, Any] = {"chat": "ann"}
    meta: dict[str, Any] = {"language": "en"}
    parts: list[dict[str, Any]] = [{"type": "text", "text": "hello"}]
    agent = Held("waits")
    async with inline(path, agent.run) as runtime:
        first = await runtime.submit(KEY, Inbound("holds", reply_to=target))
        waiting = Inbound(parts=parts, reply_to=target, meta=meta)
        second = await runtime.submit(KEY, waiting)
        target["chat"], meta["language"], parts[0]["text"] = "bob", object(), "\ud800"
        agent.go_on["holds"].set()
        agent.go_on["hello"].set()
        assert (await first.reply()).outcome.kind == "answered"
        assert (await second.reply()).outcome.kind == "answered"
        sent = await runtime.deliveries.list()
    assert [delivery.target for delivery in sent] == [{"chat": "ann"}, {"chat": "ann"}]


async def test_what_an_agent_does_to_its_message_behind_our_back_is_not_stored(
    path: Path,
) -> None:
    async def agent(turn: Turn) -> str:
        turn.inbound[0].reply_to["chat"] = "bob"  # type: ignore[index]
        parts: list[dict[str, Any]] = [{"type": "text", "text": "as it was"}]
        meta: dict[str, Any] = {"model": "a"}
        await turn.append({"role": "assistant", "content": parts, "meta": meta})
        parts[0]["cache_control"], meta["model"] = float("nan"), object()
        return "done"

    async with inline(path, agent) as runtime:
        reply = await runtime.ask(KEY, Inbound("x", reply_to={"chat": "ann"}))
        (sent,) = await runtime.deliveries.list()
    assert (reply.text, sent.target) == ("done", {"chat": "ann"})
    assert reply.messages[1].parts == ({"type": "text", "text": "as it was"},)
    assert query(path, "SELECT count(*) FROM messages") == [(3,)]


async def test_the_result_of_a_side_effect_is_the_same_whatever_is_done_with_it(
    path: Path,
) -> None:
    async def agent(turn: Turn) -> str:
        first = await turn.effect(lambda: {"items": [1]}, key="a")
        first["items"].append(2)
        return str(await turn.effect(lambda: {"items": [1]}, key="a"))

    async with inline(path, agent) as runtime:
        assert (await runtime.ask(KEY, "x")).text == "{'items': [1]}"
    (stored,) = query(path, "SELECT CAST(result AS TEXT) FROM effects")
    assert stored == ('{"value":{"items":[1]}}',)


async def test_whoever_sends_may_take_a_delivery_apart(path: Path) -> None:
    seen: list[tuple[Any, Any]] = []

    async def deliver(delivery: Delivery) -> None:
        seen.append((delivery.target.pop("chat", None), delivery.body.pop("text", None)))
        if len(seen) == 1:
            raise ConnectionError("try again")

    async def agent(turn: Turn) -> str:
        await turn.say("one moment")
        return "done"

    sources = {"test": SourcePolicy(deliver=deliver)}
    settings = Settings(deliveries=DeliverySettings(backoff_s=0.001))
    async with inline(path, agent, sources=sources, settings=settings) as runtime:
        await runtime.ask(KEY, Inbound("x", reply_to={"chat": "ann"}))
        await until(lambda: len(seen) == 3)
    assert seen == [("ann", "one moment"), ("ann", "one moment"), ("ann", "done")]
