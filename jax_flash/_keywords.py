"""Keywords of other libraries: the error of a call that has one says what it is here."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def hints(**meant: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a decorator: of each foreign keyword, the keyword that was meant."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in meant.keys() & kwargs.keys():
                raise TypeError(
                    f"{function.__name__} got an unexpected keyword argument {name!r}; did you "
                    f"mean {meant[name]}=?"
                )
            return function(*args, **kwargs)

        return call

    return decorate
