"""The ``taskqd`` command: sends each subcommand to its module before anything heavy is imported.

``health`` is run by probes every few seconds, ``run`` stays resident for as long as the group lives, and ``status``
is asked by a person who waits, so they are dispatched here; every other command goes through :mod:`taskqd.cli.app`.
"""

import os
import sys


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. ``argv`` is the command line without the program's name."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["run"]:
        from taskqd.supervisor.early import keep_signals

        keep_signals()
    _open_standard_streams()
    if "TASKQD_CONTROL_FD" in os.environ:
        from taskqd.health.child import arm

        arm()
    for number, argument in enumerate(arguments, 1):
        if not _is_text(argument):
            print(f"error: argument {number}, {argument!a}, is not text in UTF-8", file=sys.stderr)
            return 2
    try:
        return _dispatch(arguments)
    except KeyboardInterrupt:
        return 1
    except Exception as error:
        return report(error)


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["health"]:
        from taskqd.health.probe import main as health

        return health(argv[1:])
    _check_directory()
    if argv[:1] == ["run"]:
        from taskqd.cli.run import main as run

        return run(argv[1:])
    if argv[:1] == ["status"]:
        from taskqd.cli.status import main as status

        return status(argv[1:])
    from taskqd.cli.app import run_app

    return run_app(argv)


def _is_text(argument: str) -> bool:
    """Whether an argument came as UTF-8: nothing that we store, send or write takes another encoding."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open_standard_streams() -> None:
    """Open those that the caller has closed: else the next socket would get their number, and our output."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - for good


def _check_directory() -> None:
    """Raise ``ConfigError`` in a working directory that is gone: nothing can be found from there."""
    try:
        os.getcwd()
    except OSError as error:
        from taskqd.domain.errors import ConfigError

        why = error.strerror or error
        raise ConfigError(f"the working directory cannot be used ({why}): start in one that exists") from None


def report(error: Exception) -> int:
    """Say what went wrong, once: an expected error in one message, anything else with its traceback."""
    from taskqd.domain.errors import RegistryError, TaskQError
    from taskqd.domain.exit_codes import ExitCode

    if isinstance(error, BrokenPipeError):
        # The reader of our output went away. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.ERROR
    if not isinstance(error, TaskQError):
        _print_traceback(error)
        return ExitCode.INTERNAL
    if isinstance(error, RegistryError) and error.__cause__ is not None:
        _print_traceback(error.__cause__)  # the fault is in the user's own module: show where
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _print_traceback(error: BaseException) -> None:
    import traceback

    traceback.print_exception(error)
