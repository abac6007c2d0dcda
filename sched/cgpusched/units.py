"""What people type: sizes, plain integers, instance IDs and GPU UUIDs, parsed strictly.

``int()`` is no parser for these: it takes ``1_0``, ``+7``, spaces and other scripts' digits. Everything here raises
UserError with one line that shows the value and says what is allowed. Line ends are the caller's to strip.
"""

import re

from cgpusched.errors import UserError

SIZE_MAX = (1 << 63) - 1
"""The largest size taken, in bytes. No card comes near it; it fits every integer on the way to the driver."""

SIZE_ALLOWED = "bytes, or an integer with a unit K, M, G or T (alone or with iB, powers of 1024), like 6GiB or 512M"
ID_ALLOWED = "1-128 of A-Z a-z 0-9 _ . -, not beginning with a dot, and not the name of a node of the tree"

NODE_NAMES = frozenset({
    "default_memsize", "inst_ctl", "upgrade", "version",
    "free_weight", "major", "max_inst", "policy", "prio_ratio",
    "highprio", "id", "meminfo", "memsize", "weight",
})  # fmt: skip
"""Every file of the tree. An instance's directory lies beside some of them, so its ID may be none of them."""

_SHIFT = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"(0|[1-9][0-9]{0,19})(?:([KMGT])(?:iB)?)?")
_INTEGER = re.compile(r"0|[1-9][0-9]{0,19}")
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")
_UUID = re.compile(r"GPU-([0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12})")


def show(text: object) -> str:
    """A value for a message: text quoted, printable ASCII, on one line, cut where it is long."""
    raw = text if isinstance(text, str) else str(text)
    raw = raw if len(raw) <= 60 else raw[:57] + "..."
    return ascii(raw) if isinstance(text, str) else ascii(raw)[1:-1]


def parse_size(text: str) -> int:
    """A size in bytes: ``0``, ``1024``, ``6GiB``, ``512M``. Units are powers of 1024 and case matters."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise UserError(f"{show(text)} is no size: {SIZE_ALLOWED}")
    value = int(match[1]) << _SHIFT[match[2] or ""]
    if value > SIZE_MAX:
        raise UserError(f"{show(text)} is too large a size: at most {SIZE_MAX} bytes")
    return value


def format_size(value: int) -> str:
    """The shortest exact form that parse_size() reads back: ``6GiB``, ``6610MiB``, ``1000``."""
    if value:
        for unit in "TGMK":
            if value % (1 << _SHIFT[unit]) == 0:
                return f"{value >> _SHIFT[unit]}{unit}iB"
    return str(value)


def parse_integer(text: str, low: int = 0, high: int = SIZE_MAX) -> int:
    """A plain decimal integer in ``low`` .. ``high``: no sign, no leading zero, no other base."""
    if _INTEGER.fullmatch(text) is None or not low <= int(text) <= high:
        raise UserError(f"{show(text)} is not allowed: one decimal integer {low}-{high}")
    return int(text)


def check_id(text: str) -> str:
    """``text``, if it can be an instance's ID (and so a directory in the tree and below the runtime folder)."""
    if _ID.fullmatch(text) is None or text in NODE_NAMES:
        raise UserError(f"{show(text)} is no instance ID: {ID_ALLOWED}")
    return text


def uuid_bytes(text: str) -> bytes:
    """The 16 bytes of a GPU UUID as NVML prints it (``GPU-8-4-4-4-12`` hexadecimal digits)."""
    match = _UUID.fullmatch(text)
    if match is None:
        raise UserError(f"{show(text)} is no GPU UUID: GPU- and 8-4-4-4-12 hexadecimal digits")
    return bytes.fromhex(match[1].replace("-", ""))
