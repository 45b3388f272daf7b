"""Handing tokens out while they are made: to transformers' streamers, and to a `for` loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    from selfspec.step import Step


class EndingStreamer(BaseStreamer):
    """A user's streamer, of which it is known whether it has been ended.

    Args:
        streamer: The user's.
    """

    def __init__(self, streamer: BaseStreamer) -> None:
        self.streamer = streamer
        self.ended = False

    def put(self, value: Tensor) -> None:
        """Pass tokens on."""
        self.streamer.put(value)

    def end(self) -> None:
        """Pass the end on."""
        self.ended = True
        self.streamer.end()


@contextmanager
def ending_streamer(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """End the streamer of a call also if the call raises: who reads it must not wait for ever.

    Args:
        args: Of the call.
        kwargs: Of the call.

    Yields:
        Both, with another streamer in the place of the user's.
    """
    streamer = kwargs.get("streamer")
    if streamer is None:
        streamer = next((a for a in args if isinstance(a, BaseStreamer)), None)
    if streamer is None:
        yield args, kwargs
        return
    ending = EndingStreamer(streamer)
    try:
        yield (
            tuple(ending if a is streamer else a for a in args),
            {name: ending if a is streamer else a for name, a in kwargs.items()},
        )
    except BaseException:
        if not ending.ended:
            with suppress(Exception):  # what went wrong first is what the caller should see
                ending.end()
        raise


class ColumnStreamer:
    """Feeds a streamer as plain `generate` would: one column [B] of tokens at a time, in order.

    Rows advance by different counts; a column is handed out once every row has it. Rows that have
    ended are padded.

    Args:
        streamer: The user's, or None.
        batch: B.
        pad: Padding token.
    """

    def __init__(self, streamer: BaseStreamer | None, batch: int, pad: int) -> None:
        self.streamer = streamer
        self.pad = pad
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.sent = 0

    def put(self, step: Step, frozen: list[bool], most: int | None) -> None:
        """Take a step's tokens and hand out the columns that are complete, `most` at most."""
        if self.streamer is None:
            return
        for row, new in zip(self.rows, step.tokens, strict=True):
            row.extend(new)
        moving = [len(row) for row, ended in zip(self.rows, frozen, strict=True) if not ended]
        ready = min(moving) if moving else max(map(len, self.rows))
        self._send(ready if most is None else min(ready, most))

    def put_token(self, token: int) -> None:
        """Hand out a token of the only row, within a step."""
        self.rows[0].append(token)
        self._send(len(self.rows[0]))

    def _send(self, until: int) -> None:
        assert self.streamer is not None
        for t in range(self.sent, until):
            column = [row[t] if t < len(row) else self.pad for row in self.rows]
            self.sent = t + 1
            self.streamer.put(torch.tensor(column, device="cpu"))

    def end(self) -> None:
        """Tell the streamer that there is no more."""
        if self.streamer is not None:
            self.streamer.end()


class _ConsumerGoneError(Exception):
    """The consumer of a step stream has gone."""


def stream_steps(run: Callable[[Callable[[Step], None]], Any]) -> Iterator[Step]:
    """Run `run(on_step)` in a thread, in the caller's context, and yield what `on_step` is given.

    The thread waits until a step has been taken before it goes on to the next but one; closing the
    iterator ends it at its next step. An exception in the thread is raised here.
    """
    handed: queue.Queue[Step | BaseException | None] = queue.Queue(maxsize=1)
    closed = threading.Event()
    surroundings = _surroundings()

    def put(item: Step | BaseException | None) -> None:
        while not closed.is_set():
            try:
                return handed.put(item, timeout=0.1)
            except queue.Full:
                continue
        raise _ConsumerGoneError

    def work() -> None:
        try:
            with surroundings():
                run(put)
            put(None)
        except _ConsumerGoneError:
            pass
        except BaseException as exception:
            if not closed.is_set():
                put(exception)

    context = copy_context()
    thread = threading.Thread(target=context.run, args=(work,), name="selfspec-stream", daemon=True)
    thread.start()
    try:
        while (item := handed.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()


def _surroundings() -> Callable[[], ExitStack]:
    """The calling thread's inference mode and autocast, for another thread to enter."""
    inference = torch.is_inference_mode_enabled()
    autocast = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]

    def enter() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(inference))
        for kind, dtype in autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype))
        return stack

    return enter
