"""Uneven batches: a rank that has run out of them does its part of what the others still do, with nothing of its own.

Note: protocol. Inside of `engine.join()` the ranks meet in a small exchange before each micro-step, each step of the
optimizer and each mean, and say what comes next. A rank that has run out says so, over and over, and joins the
collectives of what the others say, with zeros that weigh nothing; when all have run out, all leave the block. Outside
of the block there is no such exchange.

Note: order. Ranks with batches launch reductions during their backward, so the exchanges have a communicator of their
own. A rank that has run out launches its own for each micro-step in a thread: they end with the others' micro-step, and
a mean may come before that.
"""

from __future__ import annotations

import enum
import json
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

from zerocore import _core
from zerocore._accumulation import Loop
from zerocore._optimizer import plain_settings
from zerocore.errors import CommError, ConfigError, UnsupportedError

if TYPE_CHECKING:
    from zerocore._engine import Engine

_LOOPS = list(Loop)
_WORD = struct.Struct("<BBBd")
_LABEL = "join: what comes next"


class _Next(enum.IntEnum):
    """What a rank does next; the names are for errors."""

    OUT = 0
    MICRO_STEP = 1
    STEP = 2
    MEAN = 3
    OTHER = 4


_DOES = {
    _Next.OUT: "has run out of batches",
    _Next.MICRO_STEP: "begins a micro-step",
    _Next.STEP: "steps the optimizer",
    _Next.MEAN: "calls all_reduce_mean()",
    _Next.OTHER: "makes another collective call",
}


class _Word(NamedTuple):
    """What one rank says.

    Attributes:
        next: what it does.
        has_micro_batch: in the micro-step that begins.
        loop: its kind of accumulation loop, in `Loop`'s order.
        divisor: of the step's gradients, without the loss scale.
    """

    next: _Next
    has_micro_batch: bool
    loop: int
    divisor: float


class Join:
    """One `engine.join()` block, on one rank.

    Args:
        engine: whose batches are uneven.

    Raises:
        UnsupportedError: stage 3 on several ranks, or another block is open in this process.
    """

    _open: Join | None = None

    def __init__(self, engine: Engine) -> None:
        if Join._open is not None:
            raise UnsupportedError(
                "[engine] join: got a second block inside of one, expected one at a time: a rank that has run out of "
                "batches does its part for one engine. Give all ranks equally many batches, or train the engines one "
                "after the other."
            )
        if engine.zero_optimization_stage() == 3 and engine.world_size > 1:
            raise UnsupportedError(
                "[engine] join: got stage 3, expected stage 0, 1 or 2: there every rank must run the model for the "
                "others to gather its parameters, and a rank that has run out of batches cannot. Use stage 2, or "
                "engine.training_dataloader, which deals every rank equally many."
            )
        self._engine = engine
        self._announced = False  # the current micro-step
        self._micro_step: _MicroStep | None = None  # of a rank that has run out: under way

    def __enter__(self) -> None:
        if self._engine._join_comm is None:
            self._engine._join_comm = self._engine._host_comm.split(0, self._engine.rank)
        self._comm = self._engine._join_comm
        Join._open = self._engine._joining = self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._run_out()
        finally:
            Join._open = self._engine._joining = None

    # A rank that still has batches

    def begin_micro_step(self) -> None:
        """Before the forward of a micro-step, or its backward where the engine sees no forward; once in each."""
        if self._announced:
            return
        self._announced = True
        self._hear_micro_step(self._say(_Next.MICRO_STEP, has_micro_batch=self._engine._accumulation.has_micro_batch()))

    def end_micro_step(self) -> None:
        self._announced = False

    def step(self, divisor: float) -> None:
        """Before a step of the optimizer."""
        words = self._say(_Next.STEP, divisor=divisor)
        if any(word.next == _Next.OUT for word in words):
            self._share_settings(words)

    def mean(self, value: float, counts: bool) -> float:
        """The mean over ranks."""
        self._say(_Next.MEAN)
        return _core.exact_mean(self._comm, value, counts)

    def check_all_here(self, call: str) -> None:
        """Before a collective call that a rank without batches does not follow.

        Raises:
            ConfigError: there is such a rank; on all of them.
        """
        self._refuse_other(self._say(_Next.OTHER), call)

    def check_drop(self) -> None:
        raise ConfigError(
            "[engine] zero_grad: got a call inside of join() with gradients pending, expected none: a rank that has "
            "run out of batches could not follow. Call it after step(), where it has nothing to do."
        )

    # A rank that has run out of them

    def _run_out(self) -> None:
        engine = self._engine
        if engine._params.gradients.in_micro_step:
            engine._end_micro_step()
        elif self._announced:
            raise ConfigError(
                "[engine] join: got the end of the block after a forward without a backward(), expected each forward "
                "in training to be followed by one. Compute what needs no gradient inside torch.no_grad()."
            )
        while True:
            engine.comm.set_activity(f"step {engine.global_steps}, out of batches")
            words = self._say(_Next.OUT)
            leader = next((word for word in words if word.next != _Next.OUT), None)
            if leader is None or leader.next in (_Next.MICRO_STEP, _Next.STEP):
                self._finish_micro_step()
            if leader is None:
                break
            engine._accumulation.loop = _LOOPS[leader.loop]
            if leader.next == _Next.MICRO_STEP:
                self._hear_micro_step(words)
                self._micro_step = _MicroStep(engine)
            elif leader.next == _Next.STEP:
                self._share_settings(words)
                engine._update(leader.divisor)
            elif leader.next == _Next.MEAN:
                _core.exact_mean(self._comm, 0.0, False)
            else:
                self._refuse_other(words, "a call")
        engine.comm.set_activity(f"step {engine.global_steps}")

    def _finish_micro_step(self) -> None:
        if self._micro_step is not None:
            self._micro_step.finish()
            self._micro_step = None

    # The exchange

    def _say(self, what: _Next, *, has_micro_batch: bool = False, divisor: float = 0.0) -> list[_Word]:
        """What all ranks say. Collective.

        Raises:
            CommError: on all of them, when those with batches do not do the same.
        """
        loop = _LOOPS.index(self._engine._accumulation.loop)
        answers = self._comm.gather_bytes(_WORD.pack(what, has_micro_batch, loop, divisor), _LABEL)
        words = [_Word(_Next(n), bool(has), loop, divisor) for n, has, loop, divisor in map(_WORD.unpack, answers)]
        if len({word.next for word in words} - {_Next.OUT}) > 1:
            listing = "; ".join(f"rank {rank} {_DOES[word.next]}" for rank, word in enumerate(words))
            raise CommError(
                f"[engine] ranks do not do the same inside of join(), in step {self._engine.global_steps}: {listing}. "
                "Every rank that has batches must make the same calls in the same order: look for code that depends on "
                "the rank."
            )
        return words

    def _refuse_other(self, words: list[_Word], call: str) -> None:
        out = [str(rank) for rank, word in enumerate(words) if word.next == _Next.OUT]
        if out:
            raise ConfigError(
                f"[engine] {call} inside of join(): got one that rank {', '.join(out)}, out of batches, cannot follow, "
                "expected only training and all_reduce_mean() once a rank has run out. Call it after the block."
            )

    def _hear_micro_step(self, words: list[_Word]) -> None:
        has = [word.has_micro_batch for word in words]
        self._engine._accumulation.set_present(sum(has), before=sum(has[: self._engine.rank]))

    def _share_settings(self, words: list[_Word]) -> None:
        """A rank that has run out takes over what loops set before a step: learning rates, for one. Collective."""
        first = next(rank for rank, word in enumerate(words) if word.next != _Next.OUT)
        comm, groups = self._comm, self._engine.optimizer.param_groups
        own = json.dumps([plain_settings(group) for group in groups]).encode() if self._engine.rank == first else b""
        (size,) = comm.all_reduce([len(own)], _core.ReduceOp.max, "join: size of the optimizer's settings")
        text = comm.gather_bytes(own.ljust(size), "join: the optimizer's settings")[first]
        if words[self._engine.rank].next == _Next.OUT:
            for group, settings in zip(groups, json.loads(text), strict=True):
                group.update({key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()})


class _MicroStep:
    """A micro-step without a micro-batch, under way in a thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._error: BaseException | None = None
        self._on_stream = engine._device.on_current_stream()
        self._thread = threading.Thread(target=self._run, name="zc-join", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self._on_stream:
                self._engine._had_micro_batch = False
                self._engine._params.begin_micro_step(has_micro_batch=False)
                self._engine._end_micro_step()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error
