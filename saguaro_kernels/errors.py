"""The errors of both packages: each names the argument, what it got and what it wants."""

from __future__ import annotations


class SaguaroError(Exception):
    """Base of every error raised on purpose by saguaro_kernels and saguaro_runtime."""


class ShapeError(SaguaroError, ValueError):
    """A tensor has the wrong number of dimensions, the wrong sizes or the wrong layout."""


class DTypeError(SaguaroError, TypeError):
    """A tensor has a dtype the op does not take."""


class DeviceError(SaguaroError, ValueError):
    """Tensors lie on different devices, or on one the chosen implementation cannot run on."""


class ConfigError(SaguaroError, ValueError):
    """An option has a value outside its range, or options contradict each other."""


class UnsupportedError(SaguaroError, NotImplementedError):
    """The request is meaningful but not supported; the message says what is."""
