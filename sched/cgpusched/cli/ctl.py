"""cgpuctl: runs programs in instances of their own, and makes, lists and removes instances."""

from __future__ import annotations

import argparse
import errno
import json
import os
import pwd
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cgpusched.cli import engines, link
from cgpusched.errors import UserError
from cgpusched.model import MAX_INST_LIMIT
from cgpusched.units import format_size, parse_integer, parse_size

T = TypeVar("T")

EXIT_OWN = 125
"""``cgpuctl run`` could not start CMD for a reason of its own (as env, timeout and docker run have it)."""
EXIT_NOT_EXECUTABLE = 126
EXIT_NOT_FOUND = 127


class _RunParser(argparse.ArgumentParser):
    """``run`` keeps the exit codes below 125 for CMD, usage errors included."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_OWN, f"{self.prog}: error: {message}\n")


def _argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """``parse`` as argparse wants it: a UserError becomes a usage error."""

    def convert(text: str) -> T:
        try:
            return parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


@_argument
def _gpus(text: str) -> list[int]:
    return [parse_integer(part, 0, 255) for part in text.split(",")]


@_argument
def _sizes(text: str) -> list[int]:
    return [parse_size(part) for part in text.split(",")]


@_argument
def _weight(text: str) -> int:
    return parse_integer(text, 0, MAX_INST_LIMIT)


@_argument
def _uid(text: str) -> int:
    try:
        return parse_integer(text, 0, (1 << 32) - 2) if text.isdigit() else pwd.getpwnam(text).pw_uid
    except KeyError:
        raise UserError(f"no such user: {text}") from None


def _add_share(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", type=_gpus, metavar="N[,N]", help="the GPUs it sees, in that order (default: 0)")
    parser.add_argument("--mem", type=_sizes, metavar="SIZE[,SIZE]",
                        help="its memory on each GPU, like 3GiB; the last repeats (default: default_memsize)")
    parser.add_argument("--weight", type=_weight, metavar="W", help="its weight (default: 1, or 0 where none is free)")
    parser.add_argument("--highprio", action="store_true", help="high priority: preempts the others while it has work")
    parser.add_argument("--user", type=_uid, metavar="USER", help="root only: the user whose programs may join it")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cgpuctl", description="Share a GPU: run programs in instances with a quota.")
    link.add_common_arguments(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run", help="run CMD in an instance of its own, or in the one --id names",
        usage="cgpuctl run [--gpu N[,N]] [--mem SIZE[,SIZE]] [--weight W] [--highprio] [--user USER] [--id ID] "
              "[--cover auto|always|never] [--] CMD [ARG ...]",
        description="Runs CMD in an instance that goes away with its last process. Exit status: CMD's own; 125 when "
                    "cgpuctl failed, 126 when CMD cannot be executed, 127 when it is not found.")
    run.__class__ = _RunParser
    _add_share(run)
    run.add_argument("--id", metavar="ID", help="the instance to join; made if there is none of that name")
    run.add_argument("--cover", choices=("auto", "always", "never"), default="auto",
                     help="whether CMD finds our libraries in the place of the driver's own files, too, in a mount "
                          "namespace of its own (default: where this user may)")
    run.add_argument("cmd", nargs=argparse.REMAINDER, metavar="CMD", help="what to run, with its arguments")
    run.set_defaults(handler=_run, parser=run)

    create = commands.add_parser("create", help="make an instance that stays until it is destroyed")
    create.add_argument("id", metavar="ID")
    _add_share(create)
    create.set_defaults(handler=_create, parser=create)

    destroy = commands.add_parser("destroy", help="remove an instance")
    destroy.add_argument("id", metavar="ID", help="its full ID, or the 12 characters that the tree shows")
    destroy.set_defaults(handler=_destroy, parser=destroy)

    listing = commands.add_parser("list", help="show the instances")
    listing.add_argument("--json", action="store_true", help="as JSON")
    listing.set_defaults(handler=_list, parser=listing)

    engines.add(commands)
    return parser


def environment(reply: dict[str, Any], old: dict[str, str]) -> dict[str, str]:
    """The environment of a program in the instance that ``reply`` (to ``run``) describes."""
    new = dict(old)
    # An empty part of LD_LIBRARY_PATH means the working folder: no colon without something behind it.
    new["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(reply["lib_dir"]), old.get("LD_LIBRARY_PATH")]))
    new.update({str(key): str(value) for key, value in dict(reply["env"]).items()})
    return new


def _cover(lib: Path, inst: Path, wish: str, library_path: str) -> None:
    """Mounts the proxies over the driver's own files, for this process. UserError: it must be, and cannot."""
    from cgpusched.driver import cover  # no other command needs it

    folders = tuple(Path(folder) for folder in library_path.split(":") if folder.startswith("/"))
    try:
        driver = cover.installed(lib)
        if driver is not None:
            cover.enter(cover.plan(lib, driver, more=folders), lib, inst)
    except OSError as error:
        reason = f"run: the driver's own files stay uncovered: {error.filename}: {error.strerror}"
        if wish == "always":
            raise UserError(reason) from None
        expected = isinstance(error, PermissionError | FileNotFoundError)  # not root; proxies of an older version
        if not expected or os.environ.get("CGPU_LOG_LEVEL") in ("info", "debug"):
            print(f"cgpuctl: {reason}", file=sys.stderr)


def _run(args: argparse.Namespace) -> int:
    cmd = args.cmd[1:] if args.cmd[:1] == ["--"] else args.cmd
    if not cmd:
        raise UserError("run: no CMD given (see cgpuctl run --help)")
    reply = link.ask(args.socket, "run", id=args.id, gpus=args.gpu, memsize=args.mem, weight=args.weight,
                     highprio=args.highprio or None, user=args.user)
    library = os.path.join(reply["lib_dir"], "libcuda.so.1")
    if not os.access(library, os.R_OK):  # the loader would pass it over, and take the node's own
        raise UserError(f"run: {library} cannot be read: CMD would run without its limits")
    env = environment(reply, dict(os.environ))
    if args.cover != "never":
        inst = Path(env["CGPU_SOCKET"]).parent
        _cover(Path(reply["lib_dir"]), inst, args.cover, os.environ.get("LD_LIBRARY_PATH", ""))
    # From here on this process is CMD's: the kernel carries exit status and signals, and its end ends the instance.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and exec hands that on
        signal.signal(number, signal.SIG_DFL)
    try:
        if not cmd[0]:  # Python's exec has an error of its own for that
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        os.execvpe(cmd[0], cmd, env)
    except OSError as error:
        print(f"cgpuctl: {cmd[0]}: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_NOT_EXECUTABLE


def _create(args: argparse.Namespace) -> int:
    reply = link.ask(args.socket, "create", id=args.id, gpus=args.gpu, memsize=args.mem, weight=args.weight,
                     highprio=args.highprio or None, user=args.user)
    print(reply["id"])
    return 0


def _destroy(args: argparse.Namespace) -> int:
    link.ask(args.socket, "destroy", id=args.id)
    return 0


def _list(args: argparse.Namespace) -> int:
    instances = link.ask(args.socket, "list")["instances"]
    if args.json:
        print(json.dumps(instances, indent=2))
        return 0
    rows = [("ID", "GPU", "MEMSIZE", "WEIGHT", "HIGHPRIO", "PROCESSES", "OWNER", "LIFE")]
    for instance in instances:
        ends = (str(instance["processes"]), str(instance["owner"]), "run" if instance["ephemeral"] else "kept")
        for share in instance["gpus"]:
            has = (format_size(share["memsize"]), str(share["weight"]), str(int(share["highprio"])))
            rows.append((instance["id"], str(share["gpu"]), *has, *ends))
        for gpu in instance.get("native", ()):  # a daemon from before mixed mode is silent about them
            rows.append((instance["id"], str(gpu), "native", "-", "-", *ends))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit status (docs/commands.md has the table)."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return link.exit_status("cgpuctl", lambda: int(args.handler(args)), EXIT_OWN if args.command == "run" else None)


if __name__ == "__main__":
    sys.exit(main())
