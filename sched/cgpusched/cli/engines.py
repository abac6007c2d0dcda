"""cgpuctl's commands for container engines and systemd: ``setup`` and ``cdi generate``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cgpusched.cli import link
from cgpusched.errors import UserError

ENGINES = ("docker", "containerd", "podman")
SYSTEMD = "systemd"


def add(commands: Any) -> None:
    """The commands, as subparsers of ``cgpuctl``'s own."""
    setup = commands.add_parser(
        "setup", help="make a container engine run its containers through cgpu-runtime, or systemd run cgpud",
        description="Adds cgpu-runtime to the engine's configuration, keeps what else is there and a copy of what was "
                    "there before, and tells the engine. Running containers go on. A second time changes nothing. "
                    "systemd: writes cgpud's unit, enables and starts it.")
    setup.add_argument("engine", choices=(*ENGINES, SYSTEMD), metavar="docker|containerd|podman|systemd")
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
    from cgpusched.engines import setup, systemd  # no other command needs them

    if args.hook and args.engine != "podman":
        raise UserError(f"--hook is podman's: {args.engine} knows no such hooks")
    if args.engine == SYSTEMD:
        if args.config or args.default is not None or args.gpus_hook or args.runtime or args.pid_file:
            raise UserError("systemd: only --undo and --dry-run; the other options are for engines")
        lines = systemd.run(undo=args.undo, dry_run=args.dry_run)
    else:
        lines = setup.run(setup.Wish("podman-hook" if args.hook else args.engine, args.config, args.default,
                                     args.runtime or setup.BINARY, pid_file=args.pid_file, undo=args.undo,
                                     dry_run=args.dry_run, gpus_hook=args.gpus_hook))
    for line in lines:
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
