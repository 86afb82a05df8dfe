"""Between an environment's messages and its user's objects: turns into the view, checked values out of it."""

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import msgpack

from pipeline.chat.format import assistant_message
from pipeline.config_checks import MAX_COUNT
from pipeline.dataset import why_not_plain
from pipeline.env import ToolCall, TrajectoryView, Turn
from pipeline.wording import shown

MAX_SNAPSHOT_BYTES = 1 << 20
MAX_MESSAGE_CHARS = 1 << 24  # of one reply: some hundred times a long context
LARGEST_NUMBER = 1e100  # of a reward or metric: means and deviations square and sum what they are given


def catch_up(view: TrajectoryView, entries: Iterable[dict[str, Any]]) -> None:
    """Put turns, and messages that the trajectory got without the environment, into the view."""
    for entry in entries:
        if "messages" in entry:
            view.messages.extend(entry["messages"])
        else:
            turn = _turn_of(entry)
            view.turns.append(turn)
            view.messages.append(assistant_message(turn.text, [asdict(call) for call in turn.tool_calls]))


def tell_again(view: TrajectoryView, turns: Iterable[dict[str, Any]]) -> None:
    """Put turns of an environment that was lost, with what it said to each, into the view of the one that goes on.

    Each is {"turn": the call's argument, "messages": the reply's, "rewrites": whether these replaced all so far}.
    """
    for one in turns:
        catch_up(view, [*one["turn"].get("unseen", ()), one["turn"]])
        if one["rewrites"]:
            view.messages = list(one["messages"])
        else:
            view.messages.extend(one["messages"])


def refuse_too_large(messages: Iterable[dict[str, Any]], source: str) -> None:
    """Raise ValueError for more text than any model reads: it would fill the memory of whoever it is sent to. What a
    message holds beside its text counts too.
    """
    num_chars = sum(len(message["content"]) + _num_bytes_beside(message) for message in messages)
    if num_chars > MAX_MESSAGE_CHARS:
        raise ValueError(
            f"{source} gave messages of {num_chars:,} characters; they may have {MAX_MESSAGE_CHARS:,} at most: shorten "
            "them (what tools return is cut by itself)"
        )


def _num_bytes_beside(message: dict[str, Any]) -> int:
    """Of all but role and content, as a message carries it."""
    beside = {key: value for key, value in message.items() if key not in ("role", "content")}
    return len(msgpack.packb(beside)) if beside else 0


def plain_snapshot(state: Any) -> Any:
    """What `snapshot` gave, if a message can carry it. Raises TypeError or ValueError in one sentence."""
    why = why_not_plain(state)
    if why is not None:
        raise TypeError(f"snapshot gave {shown(state)}, which can't be sent ({why}); give plain values")
    num_bytes = len(msgpack.packb(state))
    if num_bytes > MAX_SNAPSHOT_BYTES:
        raise ValueError(
            f"snapshot gave {num_bytes:,} bytes; it travels with every turn, so it may have {MAX_SNAPSHOT_BYTES:,} at "
            "most: keep what is large in files, and their names in the snapshot"
        )
    return state


def mask_end_of(view: TrajectoryView) -> dict[str, int]:
    """What the user set, if it is valid: an entry of the reply."""
    end = view.loss_mask_end
    if end is None:
        return {}
    if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end <= MAX_COUNT:
        raise TypeError(
            f"traj.loss_mask_end is {shown(end)}; it counts generated tokens, so it is an integer from 0 to "
            f"{MAX_COUNT:,}"
        )
    return {"loss_mask_end": end}


def _turn_of(argument: dict[str, Any]) -> Turn:
    calls = tuple(
        ToolCall(call["name"], call["arguments"], call.get("error"), call.get("id", ""))
        for call in argument["tool_calls"]
    )
    return Turn(argument["text"], calls, argument["num_tokens"], argument["stopped"])


def finite(value: Any, what: str) -> float:
    """A finite float from a number of any kind (int, bool, numpy, a one-element tensor); text is no number, and one
    beyond LARGEST_NUMBER is a mistake.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"the {what} is {shown(value)}, which is no finite number")
    if abs(number) > LARGEST_NUMBER:
        raise ValueError(f"the {what} is {number:g}; it must lie within ±{LARGEST_NUMBER:g}: scale it down")
    return number
