"""cgpud: the command line around service.run()."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from cgpusched import config
from cgpusched.daemon import logs
from cgpusched.daemon.survival.haste import Haste
from cgpusched.errors import UserError
from cgpusched.fields import pairs

log = logging.getLogger(__name__)

EXIT_BUG = 70
"""EX_SOFTWARE of sysexits.h. A UserError says 1, ConfigError 2, AlreadyRunning 3; docs/commands.md has the table."""


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("cgpufs")
    except metadata.PackageNotFoundError:
        return "unknown"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cgpud",
        description="Shares GPUs: serves the tree, the gate and cgpuctl's socket. Runs in the foreground, as root.",
        epilog="SIGTERM stops it, SIGHUP reads the log level again, SIGUSR1 shows where it stands.",
    )
    parser.add_argument("--version", action="version", version=f"cgpud {_version()}")
    parser.add_argument("--check", action="store_true", help="say whether the configuration is right, and end")
    config.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit status."""
    _open_standard_streams()
    args = build_parser().parse_args(argv)
    haste = Haste()
    if not args.check:
        haste.begin()
    import trio  # most of a start is the time that these two take

    from cgpusched.daemon import service
    from cgpusched.daemon.survival.kept import last_config

    try:
        # Not to end on a wrong file what a predecessor left: systemd lets a mount go when its unit fails.
        loaded = config.load(None, args, before=None if args.check else last_config(os.environ))
    except UserError as error:
        return _fail(error)
    if args.check:
        return 0
    logs.setup(loaded.log_level)
    if loaded.refused:
        log.error("configuration refused, going on by what it said before %s", pairs(reason=loaded.refused))
    try:
        # Strict exception groups: a UserError of a task comes in one.
        trio.run(service.run, loaded, lambda: config.load(None, args), haste.end)
    except UserError as error:
        return _fail(error)
    except BaseExceptionGroup as group:
        user, rest = group.split(UserError)
        if rest is None and user is not None:
            return _fail(_first(user))
        log.critical("cgpud failed; this is a bug", exc_info=group)
        return EXIT_BUG
    except Exception:
        log.critical("cgpud failed; this is a bug", exc_info=True)
        return EXIT_BUG
    return 0


def _open_standard_streams() -> None:
    """Where we were started without them: what somebody prints must not go into a socket that got their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number: this one
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # for as long as the process lives


def _fail(error: UserError) -> int:
    prefix = "<3>" if logs.to_journal(sys.stderr, os.environ) else ""
    print(f"{prefix}cgpud: {error}", file=sys.stderr)
    return error.exit_code


def _first(group: BaseExceptionGroup[UserError]) -> UserError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, UserError)
    return error


if __name__ == "__main__":
    sys.exit(main())
