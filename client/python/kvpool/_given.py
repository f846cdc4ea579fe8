"""What is given to C: whole numbers that fit, and text without a NUL. ctypes by itself takes a number modulo 2^bits,
and C a text up to its NUL."""
import ctypes
import operator
from ctypes import c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p


class TEXT(c_char_p):
    """Of an argument: a text that is never absent."""


def _range_of(kind, is_signed):
    bits = 8 * ctypes.sizeof(kind)
    return (-2**(bits - 1), 2**(bits - 1) - 1) if is_signed else (0, 2**bits - 1)


_RANGES = {**{kind: _range_of(kind, True) for kind in (c_int, c_int32, c_int64)},
           **{kind: _range_of(kind, False) for kind in (c_uint8, c_uint32, c_uint64, c_size_t)}}


def whole(name, value, kind=None):
    """An int, that C's type has."""
    try:
        number = value if type(value) is int else operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, a whole number is wanted") from None
    if kind is not None:
        low, high = _RANGES[kind]
        if not low <= number <= high:
            raise OverflowError(f"{name} is {number}, not in [{low}, {high}]")
    return number


def text(name, value):
    """UTF-8, as C has it."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, a str is wanted")
    if "\0" in value:
        raise ValueError(f"{name} {value!r} has a NUL in it")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} {value!r} is not to be had in UTF-8") from None


def given(name, value, kind):
    """A value as an argument, or a field, of C's type `kind` has it."""
    if kind in _RANGES:
        return whole(name, value, kind)
    if kind is TEXT:
        return text(name, value)
    if kind is c_char_p:
        return None if value is None else text(name, value)
    if kind is c_void_p and value is not None and not isinstance(value, c_void_p):
        return whole(name, value, c_uint64)
    return value


class Checked(ctypes.Structure):
    """A struct for C to read, whose fields are `given`."""

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls._kinds = dict(cls._fields_)

    def __setattr__(self, name, value):
        kind = self._kinds.get(name)
        if kind is None:
            raise AttributeError(f"a {type(self).__name__} has no {name!r}")
        super().__setattr__(name, given(name, value, kind))
