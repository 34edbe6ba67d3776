"""What a turn does to the world: side effects, recorded around the call.

    intent (durable) ──▶ the call ──▶ done · failed · skipped
                              └─────▶ unknown: the intent is there and no result

Keeps:
- Nothing is called before its intent is durable, and everything that the turn has written before.
- An effect is known by its turn and its key: the key that was given, or else the tool call that it
  belongs to. Its tool and arguments are its content; the same key with others is a conflict.
- What is recorded is not done again: a resumed turn gets the result, or the failure, of the attempt
  before it. An effect whose fate is unknown follows the policy of whoever calls it.
- `effect_id` is the same in every attempt: whoever has idempotency keys can use it as one.
- What is known of an effect reaches storage at the latest with the end of its turn.

What is claimed is at most this: recorded once, done at least as often as it was begun and at most
as often as its policy allows. Never that it happened exactly once.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, final, get_args

import msgspec
import trio
from msgspec.structs import replace

from ..storage.commands import BeginEffect, FinishEffect
from ..storage.edge import check_json, check_name, shown
from ..storage.errors import ConflictError, InvalidContentError, OnepenError
from ..storage.records import Effect
from ..storage.units import Refused
from .owned import own_json
from .raised import being_cancelled, is_theirs, said_by, sole_cause
from .replies import storable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from ..storage.identity import TurnId
    from ..storage.records import JsonObject
    from .scribe import Scribe

logger = logging.getLogger(__name__)

OnUnknownEffect: TypeAlias = Literal["retry", "skip", "fail", "ask"]
AGAIN, SKIP, FAIL = "do it again", "leave it", "stop here"
_SHOWN_MAX = 2_000  # characters of a result that a transcript repeats
_KEY_SHOWN_MAX = 100


class EffectUnknownError(OnepenError):
    """Whether this side effect has happened is not known, and it may not be done again."""

    hint = "look at the other side by effect_id, then decide; or give on_unknown="

    def __init__(self, tool: str, effect_key: str, effect_id: str) -> None:
        super().__init__(f"it is not known whether {tool} ({effect_key}) has happened")
        self.tool = tool
        self.effect_key = effect_key
        self.effect_id = effect_id


class EffectFailedError(OnepenError):
    """An earlier attempt of this turn has recorded that this side effect failed."""

    hint = "call it again in this attempt to try it again"

    def __init__(self, tool: str, effect_key: str, error: str) -> None:
        super().__init__(f"{tool} ({effect_key}) failed: {error}")
        self.tool = tool
        self.effect_key = effect_key
        self.error = error


@final
class Effects:
    """The side effects of one turn, as its running attempt knows them."""

    def __init__(self, scribe: Scribe, turn_id: TurnId, known: Iterable[Effect]) -> None:
        self._scribe = scribe
        self._turn_id = turn_id
        self._known = {effect.effect_key: effect for effect in known}
        self._called = set[str]()  # in this attempt
        self._unstored: dict[str, FinishEffect] = {}  # what is known, and could not be posted yet
        self._not_begun = set[str]()  # intents that are posted, and nothing was called yet
        self._locks: dict[str, trio.Lock] = {}

    async def run(
        self,
        function: Any,
        arguments: tuple[Any, ...],
        key: str,
        on_unknown: Any,
        ask: Callable[[str, tuple[str, ...], str], Awaitable[str]],
    ) -> Any:
        """Call it, unless it is recorded what came of it."""
        if not callable(function):
            problem = f"{type(function).__name__} can't be called"
            raise InvalidContentError("fn", problem, hint="give a function, sync or async")
        if on_unknown not in get_args(OnUnknownEffect):
            hint = f"use one of {', '.join(get_args(OnUnknownEffect))}"
            raise InvalidContentError("on_unknown", f"{shown(on_unknown)} is no policy", hint=hint)
        check_name("key", key)
        tool, given = _name_of(function), _given(function, arguments)
        digest = blake2b(given, digest_size=16).hexdigest()
        async with self._locks.setdefault(key, trio.Lock()):
            effect = self._known.get(key)
            if effect is not None and (effect.tool, effect.digest) != (tool, digest):
                what = f"effect {key} of turn {self._turn_id}"
                raise ConflictError(what, [effect.tool, effect.digest], [tool, digest])
            if effect is not None and effect.state in ("begun", "unknown"):
                effect = await self._decide(effect, on_unknown, ask)
            first = key not in self._called
            self._called.add(key)
            if effect is not None and effect.state == "failed" and first:
                error = str((effect.result or {}).get("error"))
                raise EffectFailedError(tool, key, error)
            if effect is not None and effect.state in ("done", "skipped"):
                return _value_of(effect)
            return await self._do(function, arguments, tool, digest, key, effect)

    async def _decide(
        self,
        effect: Effect,
        on_unknown: OnUnknownEffect,
        ask: Callable[[str, tuple[str, ...], str], Awaitable[str]],
    ) -> Effect | None:
        """What follows from not knowing; the effect as it is then."""
        if on_unknown == "ask":
            question = f"It is not known whether {effect.tool} has happened. What now?"
            name = f"effect {_short(effect.effect_key)} {effect.attempt}"
            answer = await ask(question, (AGAIN, SKIP, FAIL), name)
            choice: dict[str, OnUnknownEffect] = {AGAIN: "retry", SKIP: "skip"}
            on_unknown = choice.get(answer, "fail")
        if on_unknown == "fail":
            raise EffectUnknownError(effect.tool, effect.effect_key, effect.effect_id)
        if on_unknown == "skip":
            return await self._finish(effect, "skipped", None)
        return effect

    async def _do(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        tool: str,
        digest: str,
        key: str,
        effect: Effect | None,
    ) -> Any:
        scribe = self._scribe
        begin = BeginEffect(
            turn_id=self._turn_id,
            effect_key=key,
            effect_id=scribe.fresh_uid() if effect is None else effect.effect_id,
            tool=tool,
            digest=digest,
            attempt=1 if effect is None else effect.attempt + 1,
            at_ms=scribe.now(),
        )
        await scribe.room()
        ticket = scribe.note((begin,))
        begun = self._note(_begun(begin))
        self._not_begun.add(key)
        receipt = await scribe.receipt_of(ticket)
        if isinstance(receipt, Refused):
            self._known.pop(key) if effect is None else self._note(effect)
            raise receipt.error()
        if scribe.broken is not None:  # what the turn has written before this was refused
            raise scribe.broken.error()
        self._not_begun.discard(key)
        awaited = False
        try:
            value: Any = _call(function, arguments, begin.effect_id)
            if awaited := inspect.isawaitable(value):
                value = await value
        except BaseException as error:
            if not is_theirs(error):
                raise  # nobody knows how far it got; the turn's end says so
            too_slow = isinstance(sole_cause(error), TimeoutError | trio.TooSlowError)
            # What was cut off may have made an error of that, which says nothing of the world.
            if too_slow or (awaited and being_cancelled()):
                await self._finish(begun, "unknown", None)  # it may have happened all the same
            else:
                await self._finish(begun, "failed", {"error": storable(said_by(error))})
            raise
        done = await self._finish(begun, "done", _result_of(value))
        return _value_of(done)

    async def _finish(
        self,
        effect: Effect,
        state: Literal["done", "failed", "skipped", "unknown"],
        result: JsonObject | None,
    ) -> Effect:
        """Record what came of it; if the turn is stopped before there is room, its end does."""
        finish = FinishEffect(
            turn_id=self._turn_id,
            effect_key=effect.effect_key,
            attempt=effect.attempt,
            state=state,
            at_ms=self._scribe.now(),
            result=result,
        )
        known = replace(effect, state=state, result=result, finished_ms=finish.at_ms)
        self._note(known)
        self._unstored[effect.effect_key] = finish
        await self._scribe.room()
        if self._unstored.pop(effect.effect_key, None) is not None:
            self._scribe.note((finish,))
        return known

    def _note(self, effect: Effect) -> Effect:
        self._known[effect.effect_key] = effect
        return effect

    def left(self, now_ms: int) -> tuple[FinishEffect, ...]:
        """For the turn's end: what nobody has recorded yet, known or not."""
        begun = [effect for effect in self._known.values() if effect.state == "begun"]
        never = [effect for effect in begun if effect.effect_key in self._not_begun]
        return (
            *self._unstored.values(),
            *(_finish_of(e, "failed", now_ms, {"error": "it was never called"}) for e in never),
            *unknown_effects((e for e in begun if e not in never), now_ms),
        )

    def fates(self) -> dict[str, str]:
        """What is known, by key, in words."""
        return fates_of(self._known.values())


def unknown_effects(effects: Iterable[Effect], now_ms: int) -> tuple[FinishEffect, ...]:
    """The intents without a result, closed as what they are."""
    return tuple(_finish_of(e, "unknown", now_ms) for e in effects if e.state == "begun")


def _finish_of(
    effect: Effect,
    state: Literal["failed", "unknown"],
    now_ms: int,
    result: JsonObject | None = None,
) -> FinishEffect:
    return FinishEffect(
        turn_id=effect.turn_id,
        effect_key=effect.effect_key,
        attempt=effect.attempt,
        state=state,
        at_ms=now_ms,
        result=result,
    )


def fates_of(effects: Iterable[Effect]) -> dict[str, str]:
    """What became of side effects, in words for whoever reads the transcript: a model above all."""
    return {effect.effect_key: _fate(effect) for effect in effects}


def _fate(effect: Effect) -> str:
    result = effect.result or {}
    match effect.state:
        case "done":
            value = msgspec.json.encode(result.get("value")).decode()[:_SHOWN_MAX]
            return f"{effect.tool} was done, and its result is {value}"
        case "failed":
            return f"{effect.tool} failed: {result.get('error')}"
        case "skipped":
            return f"{effect.tool} was left out"
        case "begun" | "unknown":
            return f"it is not known whether {effect.tool} was done"


def _short(key: str) -> str:
    """A part of the name of a question, which may not be much longer than a key."""
    if len(key) <= _KEY_SHOWN_MAX:
        return key
    return blake2b(key.encode(), digest_size=8).hexdigest()


def _begun(begin: BeginEffect) -> Effect:
    return Effect(
        turn_id=begin.turn_id,
        effect_key=begin.effect_key,
        effect_id=begin.effect_id,
        tool=begin.tool,
        digest=begin.digest,
        attempt=begin.attempt,
        begun_ms=begin.at_ms,
    )


# The call ------------------------------------------------------------------------------------


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", None) or type(function).__name__
    return str(name)[:200]


def _given(function: Any, arguments: tuple[Any, ...]) -> bytes:
    """The arguments in canonical form; also those that a partial brings along."""
    given: list[Any] = [list(arguments)]
    while isinstance(function, partial):
        given.append([list(function.args), function.keywords])
        function = function.func
    plain = _plain("args", given)
    return msgspec.json.encode(plain, order="deterministic")


def _plain(field: str, value: Any) -> Any:
    """The same as JSON has it. Raises `InvalidContentError`."""
    try:
        plain = _with_lists(msgspec.to_builtins(value, str_keys=True, order="sorted"))
    except (TypeError, ValueError, RecursionError) as error:
        hint = "use text, numbers, lists, mappings"
        raise InvalidContentError(field, said_by(error), hint=hint) from error
    check_json(field, {"": plain})
    return plain


def _with_lists(value: Any) -> Any:
    """Builtins without tuples, which JSON does not know. As deep as what made them could go."""
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return {name: _with_lists(member) for name, member in members.items()}
    if isinstance(value, list | tuple):
        return [_with_lists(item) for item in cast("list[Any]", value)]
    return value


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], effect_id: str) -> Any:
    """Call it, with the effect's id if it has a place for that."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function without a signature takes what it takes
        return function(*arguments)
    for index, parameter in enumerate(parameters):
        if parameter.name != "effect_id":
            continue
        in_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if in_place and index <= len(arguments):
            return function(*arguments[:index], effect_id, *arguments[index:])
        return function(*arguments, effect_id=effect_id)
    return function(*arguments)


def _result_of(value: Any) -> JsonObject:
    """What is recorded; it was done, whether its result can be stored or not."""
    try:
        return {"value": _plain("result", value)}
    except InvalidContentError as error:
        return {"unstorable": type(value).__name__, "why": storable(said_by(error))}


def _value_of(effect: Effect) -> Any:
    """The result, the same in every attempt."""
    result = effect.result or {}
    if "unstorable" in result:
        raise InvalidContentError(
            "result",
            f"{effect.tool} was done, but its {result['unstorable']} can't be stored",
            hint="return JSON: text, numbers, lists, mappings",
        )
    return own_json(result.get("value"))
