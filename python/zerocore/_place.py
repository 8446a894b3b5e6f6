"""Where in the user's code this rank is, for the errors of all ranks: looked up once something has failed."""

from __future__ import annotations

import functools
import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any

_MAX_CHARS = 120


def tell_when_asked(comm: Any) -> threading.Thread:
    """Starts the thread that answers `comm`, the world communicator. It sleeps in the core until a collective fails."""
    comm.promise_place()
    thread = threading.Thread(target=_tell, args=(comm,), name="zc-place", daemon=True)
    thread.start()
    return thread


def of_threads(frames: dict[int, FrameType], *, main: int | None) -> str:
    """The user's line in the thread that is in zerocore, else in the main thread; "" where there is none.

    Args:
        frames: by thread, as sys._current_frames() gives them.
        main: the main thread.
    """
    stacks = sorted(frames.items(), key=lambda item: item[0] != main)
    inside = [frame for _, frame in stacks if _is_in_zerocore(frame)]
    return _users_line((inside or [frame for _, frame in stacks])[0]) if stacks else ""


def of_exception(value: BaseException) -> str:
    """The user's line from which an exception came; "" where there is none."""
    place = ""
    traceback = value.__traceback__
    while traceback is not None:
        if _is_users(traceback.tb_frame.f_code):
            place = _describe(traceback.tb_frame.f_code, traceback.tb_lineno)
        traceback = traceback.tb_next
    return place


def _tell(comm: Any) -> None:
    own = threading.get_ident()
    while comm.place_wanted():
        frames = {key: frame for key, frame in sys._current_frames().items() if key != own}
        comm.tell_place(of_threads(frames, main=threading.main_thread().ident))


def _is_in_zerocore(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_HERE):
            return True
        frame = frame.f_back
    return False


def _users_line(frame: FrameType | None) -> str:
    while frame is not None:
        if _is_users(frame.f_code):
            return _describe(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _is_users(code: CodeType) -> bool:
    path = code.co_filename
    of_library = path.startswith(_library()) and "-packages" not in path  # where other packages may lie, too
    return not path.startswith(_packages()) and not of_library


def _describe(code: CodeType, line: int) -> str:
    name = "" if code.co_name == "<module>" else f" in {code.co_name}"
    path = code.co_filename
    if path.startswith(os.getcwd() + os.sep):
        path = os.path.relpath(path)
    place = f"{path}:{line}{name}"
    return place if len(place) <= _MAX_CHARS else "..." + place[-_MAX_CHARS:]


@functools.cache
def _library() -> str:
    return os.path.dirname(os.__file__) + os.sep


@functools.cache
def _packages() -> tuple[str, ...]:
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    return (_HERE, "<frozen ", *([os.path.dirname(torch) + os.sep] if torch else []))


_HERE = os.path.dirname(__file__) + os.sep
