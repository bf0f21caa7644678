"""``ErrorReporter``: what is told of every job that fails for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from taskqd.client.rows import JobRow


@runtime_checkable
class ErrorReporter(Protocol):
    """Told of each job of any actor that has failed for good in the worker that it is registered with::

        providers.register_class(ErrorReporter, Scope.PROCESS, SentryReporter)

    Its scope is PROCESS or LOOP. Without one nothing is told.
    """

    async def report(self, job: JobRow, exception: BaseException) -> None:
        """Take the row as it is stored and what its last attempt raised.

        ``RecordedError`` stands for an end without an exception, such as a deadline. It may take 3 seconds; what it
        raises is logged, counted, and changes nothing. An end that is untold when the worker stops stays so.
        """
        ...
