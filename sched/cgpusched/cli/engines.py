"""cgpuctl's commands for container engines: ``setup`` and ``cdi generate``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cgpusched.cli import link
from cgpusched.errors import UserError

ENGINES = ("docker", "containerd", "podman")


def add(commands: Any) -> None:
    """The commands, as subparsers of ``cgpuctl``'s own."""
    setup = commands.add_parser(
        "setup", help="make a container engine run its containers through cgpu-runtime",
        description="Adds cgpu-runtime to the engine's configuration, keeps what else is there and a copy of what was "
                    "there before, and tells the engine. Running containers go on. A second time changes nothing.")
    setup.add_argument("engine", choices=ENGINES, metavar="docker|containerd|podman")
    setup.add_argument("--undo", action="store_true", help="take out what setup put in, and put back what was there")
    setup.add_argument("--dry-run", action="store_true", help="show the difference, and change nothing")
    setup.add_argument("--config", type=Path, metavar="FILE", help="the engine's configuration (default: where it is)")
    setup.add_argument("--default", action=argparse.BooleanOptionalAction, default=None,
                       help="ours is the runtime of containers that name none (docker, podman: yes; containerd: no)")
    setup.add_argument("--gpus-hook", action="store_true",
                       help="docker: make the nvidia-container-runtime-hook that --gpus asks for, where NVIDIA has "
                            "installed none; it does nothing")
    setup.add_argument("--hook", action="store_true",
                       help="podman: a precreate hook instead of the runtime, which stays what it is")
    _add_runtime(setup)
    setup.add_argument("--pid-file", type=Path, metavar="FILE", help="docker: its pid file (default: /run/docker.pid)")
    setup.set_defaults(handler=_setup, parser=setup)

    cdi = commands.add_parser("cdi", help="write the CDI specification")
    cdi.add_argument("verb", choices=("generate",), metavar="generate")
    cdi.add_argument("--output", type=Path, metavar="FILE",
                     help="where to write it; engines look in /etc/cdi and /run/cdi (default: standard output)")
    _add_runtime(cdi)
    cdi.set_defaults(handler=_cdi, parser=cdi)


def _add_runtime(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runtime", type=Path, metavar="FILE",
                         help="cgpu-runtime, where cgpud's configuration has a bin_dir of its own (default: "
                              "/var/lib/cgpud/bin/cgpu-runtime)")


def _setup(args: argparse.Namespace) -> int:
    from cgpusched.engines import setup  # no other command needs it

    if args.hook and args.engine != "podman":
        raise UserError(f"--hook is podman's: {args.engine} knows no such hooks")
    wish = setup.Wish("podman-hook" if args.hook else args.engine, args.config, args.default,
                      args.runtime or setup.BINARY, pid_file=args.pid_file, undo=args.undo, dry_run=args.dry_run,
                      gpus_hook=args.gpus_hook)
    for line in setup.run(wish):
        print(line)
    return 0


def _cdi(args: argparse.Namespace) -> int:
    from cgpusched import files
    from cgpusched.engines import cdi, setup

    gpus = [(int(gpu["index"]), str(gpu["uuid"])) for gpu in link.ask(args.socket, "status")["gpus"]]
    binary: Path = args.runtime or setup.BINARY
    made = cdi.specification(gpus, str(binary), cdi.device_files([index for index, _ in gpus], Path("/dev")))
    text = json.dumps(made, indent=2) + "\n"
    if args.output is None:
        sys.stdout.write(text)
        return 0
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        files.replace(args.output, text.encode(), 0o644)
        setup.install_runtime(binary)
    except OSError as error:
        raise UserError(f"{error.filename or args.output}: {error.strerror}") from None
    return 0
