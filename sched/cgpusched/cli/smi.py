"""cgpu-smi: who has what of each GPU, in the published table or as JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from cgpusched.cli import link

RULE = "+---+----------------+----------+----------------+-----------------------+"
HEADER = "|GPU|       pod      | highprio | GPU-Util/Limit | GPU Memory Usage/Total|"
DOUBLE = "+===+================+==========+================+=======================+"


def table(status: dict[str, Any]) -> str:
    """The table of a ``status`` answer. Columns and widths are the original's: scripts cut by position.

    What the audit found stands below it, a line an instance.
    """
    product = "cgpufs, simulated device" if status["simulated"] else "cgpufs"
    lines = [f"|  {product:<37}cgpufs Version:  {status['version']}", RULE, HEADER, DOUBLE]
    for gpu in status["gpus"]:
        for one in gpu["instances"]:
            lines.append(
                f"|{gpu['index']:>3}| {one['short']:<15}|{int(one['highprio']):>5}     "
                f"|{round(one['percent']):>7}/{round(one['entitled']):>3}     "
                f"|{one['mem_used'] >> 20:>15}/{one['mem_limit'] >> 20:<7}|"
            )
    if lines[-1] != DOUBLE:
        lines.append(RULE)
    for gpu in status["gpus"]:
        for one in gpu["instances"]:
            if found := findings(one):
                lines.append(f"GPU {gpu['index']} {one['short']}: {'; '.join(found)}")
    return "\n".join(lines)


def findings(instance: dict[str, Any]) -> list[str]:
    """What the audit holds against an instance now, in words."""
    audit = instance["audit"]
    found = [f"{what}: pid {', '.join(map(str, audit[key]))}"
             for key, what in (("unhooked", "past the hook"), ("unexplained", "unexplained memory")) if audit[key]]
    if audit["excess"]:
        found.append(f"{audit['excess'] >> 20} MiB over")
    if instance["shut"]:
        found.append("gate shut")
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cgpu-smi",
        description="Shows each instance's share of device time over the last second against what it is entitled to "
                    "(both in percent), and its memory against its limit (MiB).",
    )
    link.add_common_arguments(parser)
    parser.add_argument("--json", action="store_true", help="all the daemon knows, one JSON object a line with -l")
    parser.add_argument("-l", "--loop", type=_seconds, metavar="SECONDS", help="again every so many seconds, until ^C")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{ascii(text)} is not allowed: seconds, 0.1-86400")
    return value


def _show(args: argparse.Namespace) -> None:
    status = link.ask(args.socket, "status")
    del status["ok"]
    if args.json:
        print(json.dumps(status, indent=None if args.loop else 2), flush=True)
    else:
        print(table(status), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; gives the exit status (docs/commands.md has the table)."""
    args = build_parser().parse_args(argv)

    def body() -> int:
        _show(args)
        while args.loop:
            time.sleep(args.loop)
            _show(args)
        return 0

    return link.exit_status("cgpu-smi", body)


if __name__ == "__main__":
    sys.exit(main())
