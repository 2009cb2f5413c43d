"""An operation that was begun, and its errors as Horovod's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from deepytorch.integrations.common.contract import IntegrationError
from deepytorch.integrations.common.horovod_common import HorovodInternalError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def translated(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Failed collectives as Horovod's exception."""

    @functools.wraps(function)
    def translating(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (IntegrationError, HorovodInternalError):
            raise
        except RuntimeError as error:
            raise HorovodInternalError(str(error)) from error

    return translating


class Handle:
    """An operation under way: for `poll` and `synchronize`, or called, as Horovod's sparse ones."""

    __slots__ = ("_finish", "_result", "_works")

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works = [work for work in works if work is not None]
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def then(self, make: Callable[[Any], Any]) -> Handle:
        """The same operation with a result made of this one's."""
        return Handle([self], lambda: make(self.wait()))

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)

    @translated
    def wait(self) -> Any:
        """Wait for the end; the result, again the same in a second call."""
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._result = self._finish()
            self._finish, self._works = None, []
        return self._result

    __call__ = wait
