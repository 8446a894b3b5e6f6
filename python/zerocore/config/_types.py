"""Value types of configuration keys: what each accepts, and the words an error or the documentation uses for it.

Both the native dataclasses and the DeepSpeed table use these, so a value is checked and described in one way.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

from pydantic import BeforeValidator, Field


@dataclass(frozen=True)
class Expect:
    """Marks a type with the words that follow "expected" in an error message."""

    text: str


def _whole(value: Any) -> Any:
    """5e8 is how people write a count; it arrives as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _never(value: Any) -> Any:
    """An infinite number of steps between two reports means none, and is written so by Accelerate."""
    return None if value == math.inf else value


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# How DeepSpeed's configurations spell the dtypes that have a name here.
_DTYPE_SPELLINGS = {
    "fp32": ("fp32", "float32", "float", "torch.float32"),
    "bf16": ("bf16", "bfloat16", "bfp16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "half", "torch.float16"),
}


def _dtype_name(value: Any) -> Any:
    plain = value.lower() if isinstance(value, str) else None
    return next((name for name, spellings in _DTYPE_SPELLINGS.items() if plain in spellings), value)


_WHOLE = BeforeValidator(_whole)
_AS_TUPLE = BeforeValidator(_as_tuple)

Bool = Annotated[bool, Expect("true or false")]
Text = Annotated[str, Expect("a string")]
PositiveInt = Annotated[int, Field(ge=1, lt=2**63), _WHOLE, Expect("an integer >= 1")]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63), _WHOLE, Expect("an integer >= 0")]
SeedInt = Annotated[int, Field(ge=0, lt=2**63), _WHOLE, Expect("an integer from 0 to 2^63 - 1")]
IterationInt = Annotated[int, Field(ge=-1, lt=2**63), _WHOLE, Expect("an integer >= -1")]
ScalePower = Annotated[int, Field(ge=0, le=127), _WHOLE, Expect("an integer from 0 to 127")]
Float = Annotated[float, Field(allow_inf_nan=False), Expect("a finite number")]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), Expect("a number > 0")]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), Expect("a number >= 0")]
Ratio = Annotated[float, Field(ge=0, le=1), Expect("a number from 0 to 1")]
_Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[_Beta, _Beta], _AS_TUPLE, Expect("two numbers, each >= 0 and < 1")]
_Rates = Annotated[tuple[NonNegativeFloat, ...], _AS_TUPLE, Expect("one such number a parameter group")]
LrOrList = NonNegativeFloat | _Rates
LossScale = Annotated[float, Field(ge=0, allow_inf_nan=False), Expect("a number >= 0; 0 scales dynamically")]
LogSteps = Annotated[PositiveInt | None, BeforeValidator(_never), Expect("an integer >= 1")]
Stage = Annotated[int, Field(ge=0, le=3), _WHOLE, Expect("0, 1, 2 or 3")]
WarmupType = Literal["log", "linear"]
DType = Literal["fp32", "bf16", "fp16"]
SpelledDType = Annotated[DType | None, BeforeValidator(_dtype_name), Expect('"fp32", "bf16" or "fp16"')]
OffloadDevice = Annotated[
    Literal["none", "cpu"], Expect('"none" or "cpu" (offload to NVMe is not available in this version)')
]
Names = Annotated[tuple[str, ...], _AS_TUPLE, Expect("a list of strings")]


def one_of(values: Iterable[str]) -> str:
    """`"a", "b" or "c"`."""
    quoted = [f'"{value}"' for value in values]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))


def expected(annotation: Any) -> str:
    """The words for a type: its Expect mark, the values of a Literal, or the parts of a union."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        marks = [mark.text for mark in annotation.__metadata__ if isinstance(mark, Expect)]
        return marks[0] if marks else expected(annotation.__origin__)
    if origin is Literal:
        return one_of(typing.get_args(annotation))
    if origin is Union or origin is types.UnionType:
        return " or ".join(expected(part) for part in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    return f"a {annotation.__name__}"
