"""Lossless conversion of the data types in `types.py` to JSON and back.

The type hints say what a field holds, so a new field of a dataclass needs no code here. Arrays keep their dtype and
shape exactly (their bytes are stored little-endian in base64), floats keep all their digits, and NaN and infinities use
Python's extension of JSON.
"""

from __future__ import annotations

import base64
import dataclasses
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return `value` in a form that `json.dumps` accepts. Raises TypeError if it has none."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.ndarray):
        return _encode_array(value)
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_key(key): encode(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [encode(item) for item in value]
    raise TypeError(f"cannot record a {type(value).__name__}: {value!r}")


def decode(data: Any, kind: type[T]) -> T:
    """Return the value of type `kind` from which `encode` made `data`."""
    return _decode(data, kind)  # type: ignore[no-any-return]


def _decode(data: Any, kind: Any) -> Any:
    if data is None or kind is Any:
        return data
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Union or origin is types.UnionType:
        (kind,) = (argument for argument in arguments if argument is not type(None))
        return _decode(data, kind)
    if origin is np.ndarray:
        return _decode_array(data)
    if origin is tuple:
        kinds = [arguments[0]] * len(data) if arguments[1:] == (Ellipsis,) else arguments
        return tuple(_decode(item, of) for item, of in zip(data, kinds, strict=True))
    if origin is not None and origin is not Literal and issubclass(origin, Mapping):
        return {key: _decode(item, arguments[1]) for key, item in data.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _decode(item, hints[name]) for name, item in data.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(data)
    return data


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"cannot record a mapping with the key {key!r}: JSON keys are strings")
    return str(key)


def _encode_array(array: NDArray[Any]) -> dict[str, Any]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if little.dtype.hasobject:
        raise TypeError("cannot record an array of objects")
    body = {"dtype": little.dtype.str, "data": base64.b64encode(little.tobytes()).decode("ascii")}
    return body if array.ndim == 1 else {**body, "shape": list(array.shape)}


def _decode_array(data: Mapping[str, Any]) -> NDArray[Any]:
    dtype = np.dtype(data["dtype"])
    flat = np.frombuffer(base64.b64decode(data["data"]), dtype=dtype).astype(dtype.newbyteorder("="))
    return flat.reshape(data.get("shape", (-1,)))
