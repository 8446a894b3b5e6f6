"""The line of the user's code that stands in the errors of a collective."""

import functools
import sys
import threading

from zerocore import _place, errors
from zerocore.config import _json


def line_of(function, text):
    import inspect

    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_of_an_exception_it_is_the_innermost_one_outside_of_libraries():
    def users():
        functools.reduce(lambda a, b: int("x"), [1, 2])  # raised here

    try:
        users()
    except ValueError as error:
        place = _place.of_exception(error)
    assert place.endswith(f"test_place.py:{line_of(users, 'raised here')} in <lambda>")

    def in_zerocore():
        _json.read("{")  # calls zerocore

    try:
        in_zerocore()
    except errors.ConfigError as error:
        place = _place.of_exception(error)
    assert place.endswith(f"test_place.py:{line_of(in_zerocore, 'calls zerocore')} in in_zerocore")
    assert _place.of_exception(ValueError("never raised")) == ""


def test_of_threads_it_is_the_one_in_zerocore_else_the_main_one():
    entered, leave = threading.Event(), threading.Event()

    class Comm:
        def place_wanted(self):
            entered.set()
            leave.wait(10)
            return False

    def users():
        _place._tell(Comm())  # in zerocore

    thread = threading.Thread(target=users)
    thread.start()
    entered.wait(10)
    main = threading.main_thread().ident
    frames = sys._current_frames()
    assert _place.of_threads(frames, main=main).endswith("in place_wanted")  # innermost of the user's
    del frames[thread.ident]
    assert _place.of_threads(frames, main=main).endswith(
        "in test_of_threads_it_is_the_one_in_zerocore_else_the_main_one"
    )
    assert _place.of_threads({}, main=main) == ""
    leave.set()
    thread.join()


def test_a_long_path_keeps_its_end():
    code = compile("def f(): raise ValueError()", "/" + "long/" * 60 + "train.py", "exec")
    names = {}
    exec(code, names)
    try:
        names["f"]()
    except ValueError as error:
        place = _place.of_exception(error)
    assert place.startswith("...") and place.endswith("/train.py:1 in f") and len(place) == 123
