"""The model of what leaves and what is waited for, from deliveries to timers; and of blobs."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ....storage import commands as c
from ....storage.records import Blob, Delivery, Effect, Question, Timer
from .state import State, canonical, refuse

# Deliveries --------------------------------------------------------------------------------------


def post_delivery(state: State, command: c.PostDelivery) -> bool:
    given = Delivery(
        id=command.delivery_id,
        key=command.key,
        source=command.source,
        target=command.target,
        body=command.body,
        turn_id=command.turn_id,
        session_id=command.session_id,
        message_uid=command.message_uid,
        posted_ms=command.at_ms,
    )
    stored = state.deliveries.get(given.id)
    if stored is not None:
        if _posted(stored) == _posted(given):
            return False
        refuse("conflict", f"delivery {given.id}")
    session = None if command.session_id is None else state.sessions.get(command.session_id)
    gone = command.turn_id is not None and state.text_gone(command.turn_id)
    if gone or (session is not None and session.deleted):
        return False  # it went with its session
    state.known_turn(command.turn_id)
    if command.session_id is not None:
        state.known_session(command.session_id)
    state.deliveries[given.id] = given
    return True


def _posted(d: Delivery) -> bytes:
    return canonical([d.key, d.source, d.target, d.body, d.message_uid, d.posted_ms])


def mark_delivery(state: State, command: c.MarkDelivery) -> bool:
    content = (command.error, command.platform_id, command.next_ms, command.at_ms)
    step = ("delivery", command.delivery_id, command.attempt, command.state, content)
    delivery = state.deliveries.get(command.delivery_id)
    if delivery is None:
        refuse("missing", f"delivery {command.delivery_id}")
    if state.took(*step):
        return False
    if command.state == "sending":
        fits = command.attempt == delivery.attempt + 1 and delivery.state in (
            "pending",
            "failed",
            "unknown",
        )
    else:
        fits = command.attempt == delivery.attempt and (
            delivery.state == "sending"
            or (delivery.state == "unknown" and command.state in ("pending", "sent", "failed"))
            or (delivery.state == "failed" and command.state == "pending")
            or (
                delivery.state == "pending"
                and delivery.attempt > 0
                and command.state in ("sent", "failed")
            )
        )
    if not fits:
        refuse("stale", f"delivery {delivery.id}")
    state.deliveries[delivery.id] = replace(
        delivery,
        state=command.state,
        attempt=command.attempt,
        error=command.error,
        platform_id=command.platform_id,
        next_ms=command.next_ms,
        marked_ms=command.at_ms,
    )
    state.take(*step)
    return True


# Effects -----------------------------------------------------------------------------------------


def begin_effect(state: State, command: c.BeginEffect) -> bool:
    name = (command.turn_id, command.effect_key)
    given = (command.effect_id, command.tool, command.digest)
    effect = state.effects.get(name)
    if effect is None:
        if state.text_gone(command.turn_id):
            return False
        state.known_turn(command.turn_id)
        if command.attempt != 1:
            refuse("stale", f"effect {name}")
        state.effects[name] = Effect(
            turn_id=command.turn_id,
            effect_key=command.effect_key,
            effect_id=command.effect_id,
            tool=command.tool,
            digest=command.digest,
            begun_ms=command.at_ms,
        )
        return True
    if (effect.effect_id, effect.tool, effect.digest) != given:
        refuse("conflict", f"effect {name}")
    if effect.attempt >= command.attempt:
        return False
    if command.attempt != effect.attempt + 1 or effect.state == "done":
        refuse("stale", f"effect {name}")
    state.effects[name] = replace(
        effect,
        state="begun",
        attempt=command.attempt,
        result=None,
        begun_ms=command.at_ms,
        finished_ms=None,
    )
    return True


def finish_effect(state: State, command: c.FinishEffect) -> bool:
    name = (command.turn_id, command.effect_key)
    step = ("effect", *name, command.attempt, command.state, command.result, command.at_ms)
    effect = state.effects.get(name)
    if effect is None:
        if state.text_gone(command.turn_id):
            return False
        refuse("missing", f"effect {name}")
    if state.took(*step):
        return False
    # An effect whose fate was unknown may still become known.
    is_open = effect.state == "begun" or (effect.state == "unknown" and command.state != "unknown")
    if effect.attempt != command.attempt or not is_open:
        refuse("stale", f"effect {name}")
    finished = {"state": command.state, "result": command.result, "finished_ms": command.at_ms}
    state.effects[name] = replace(effect, **finished)
    state.take(*step)
    return True


# Questions and timers ----------------------------------------------------------------------------


def ask_question(state: State, command: c.AskQuestion) -> bool:
    name = (command.key, command.question_key)
    given = Question(
        key=command.key,
        question_key=command.question_key,
        turn_id=command.turn_id,
        question=command.question,
        choices=command.choices,
        asked_ms=command.at_ms,
        expires_ms=command.expires_ms,
    )
    stored = state.questions.get(name)
    if stored is not None:
        asked = replace(stored, state="open", answer=None, answered_by=None, answered_ms=None)
        if asked == given:
            return False
        refuse("conflict", f"question {name}")
    if state.text_gone(command.turn_id):
        return False
    state.known_turn(command.turn_id)
    state.questions[name] = given
    return True


def answer_question(state: State, command: c.AnswerQuestion) -> bool:
    name = (command.key, command.question_key)
    question = state.questions.get(name)
    if question is None:
        refuse("missing", f"question {name}")
    answered = replace(
        question,
        state=command.state,
        answer=command.answer,
        answered_by=command.by,
        answered_ms=command.at_ms,
    )
    if question == answered:
        return False
    if question.state != "open":
        refuse("conflict", f"question {name}")
    state.questions[name] = answered
    return True


def set_timer(state: State, command: c.SetTimer) -> bool:
    given = Timer(
        id=command.timer_id,
        key=command.key,
        source=command.source,
        due_ms=command.due_ms,
        inbound=command.inbound,
        set_ms=command.at_ms,
        busy=command.busy,
    )
    stored = state.timers.get(given.id)
    if stored is not None:
        if canonical(replace(stored, state="set", resolved_ms=None)) == canonical(given):
            return False
        refuse("conflict", f"timer {given.id}")
    state.timers[given.id] = given
    return True


def resolve_timer(state: State, command: c.ResolveTimer) -> bool:
    timer = state.timers.get(command.timer_id)
    if timer is None:
        refuse("missing", f"timer {command.timer_id}")
    if (timer.state, timer.resolved_ms) == (command.resolution, command.at_ms):
        return False
    if timer.state != "set":
        refuse("conflict", f"timer {timer.id}")
    state.timers[timer.id] = replace(timer, state=command.resolution, resolved_ms=command.at_ms)
    return True


# Blobs -------------------------------------------------------------------------------------------


def put_chunk(state: State, command: c.PutChunk) -> bool:
    name = (command.blob_id, command.index)
    stored = state.chunks.get(name)
    if stored == command.data:
        return False
    blob = Blob(id=command.blob_id, size_bytes=0, chunk_count=0, media_type="")
    blob = state.blobs.setdefault(command.blob_id, blob)
    if blob.sealed or stored is not None:
        refuse("conflict", f"piece {name}")
    state.chunks[name] = command.data
    return True


def seal_blob(state: State, command: c.SealBlob) -> bool:
    blob = state.blobs.get(command.blob_id)
    if blob is None:
        refuse("missing", f"blob {command.blob_id}")
    if blob.sealed:
        if (blob.size_bytes, blob.chunk_count) == (command.size_bytes, command.chunk_count):
            return False
        refuse("conflict", f"blob {blob.id}")
    pieces = {index: data for (blob_id, index), data in state.chunks.items() if blob_id == blob.id}
    size_bytes = sum(map(len, pieces.values()))
    if set(pieces) != set(range(command.chunk_count)) or size_bytes != command.size_bytes:
        refuse("missing", f"a piece of blob {blob.id}")
    state.blobs[blob.id] = Blob(
        id=blob.id,
        size_bytes=size_bytes,
        chunk_count=command.chunk_count,
        media_type=command.media_type,
        sealed=True,
        sealed_ms=command.at_ms,
    )
    return True


def drop_blob(state: State, command: c.DropBlob) -> bool:
    blob = state.blobs.get(command.blob_id)
    if blob is None:
        return False
    going = {name for name in state.chunks if name[0] == blob.id and name[1] >= command.keeping}
    if command.keeping and not blob.sealed and not going:
        return False
    if state.blob_in_use(command.blob_id):
        refuse("conflict", "something refers to it")
    if command.keeping:
        state.blobs[blob.id] = Blob(id=blob.id, size_bytes=0, chunk_count=0, media_type="")
    else:
        del state.blobs[command.blob_id]
    state.chunks = {name: data for name, data in state.chunks.items() if name not in going}
    return True


COMMANDS: dict[type[c.Command], Any] = {
    c.PostDelivery: post_delivery,
    c.MarkDelivery: mark_delivery,
    c.BeginEffect: begin_effect,
    c.FinishEffect: finish_effect,
    c.AskQuestion: ask_question,
    c.AnswerQuestion: answer_question,
    c.SetTimer: set_timer,
    c.ResolveTimer: resolve_timer,
    c.PutChunk: put_chunk,
    c.SealBlob: seal_blob,
    c.DropBlob: drop_blob,
}
