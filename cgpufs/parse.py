"""One strict parser a control file: the bytes of one write in, a typed value out.

A write is one whole command: ASCII, at most MAX_COMMAND bytes, with optional spaces, tabs and newlines around it.
Everything else raises UserError with one line that shows the value and says what is allowed; what depends on the
state (free weight, free memory, who exists) is the state's to refuse.
"""

from collections.abc import Callable, Mapping

from cgpusched.commands import Create, Destroy
from cgpusched.errors import UserError
from cgpusched.units import check_id, parse_integer, parse_size, show

MAX_COMMAND = 4095
"""Bytes of one write. 4096 is what stdio writes of anything longer, so a piece of a longer text is never a command."""

INST_CTL_ALLOWED = "create ID [gpu=0,1] [memsize=3GiB,4GiB] [weight=W] [highprio=0|1], or destroy ID; one a write"

_BLANKS = " \t\n"


def text(data: bytes) -> str:
    """The text of one write, blanks around it taken off."""
    if len(data) > MAX_COMMAND:
        raise UserError(f"{len(data)} bytes are not allowed: one command of at most {MAX_COMMAND} bytes")
    try:
        return data.decode("ascii").strip(_BLANKS)
    except UnicodeDecodeError:
        raise UserError(f"{show(data.decode('latin-1'))} is not allowed: ASCII only") from None


def integer(data: bytes, low: int, high: int) -> int:
    """``policy``, ``max_inst``, ``prio_ratio``, ``weight``, ``highprio``: one integer in ``low`` .. ``high``."""
    return parse_integer(text(data), low, high)


def size(data: bytes) -> int:
    """``memsize``, ``default_memsize``: bytes, or an integer with a unit. Returns bytes."""
    return parse_size(text(data))


def upgrade(data: bytes) -> None:
    """``upgrade``: takes ``1``."""
    value = text(data)
    if value != "1":
        raise UserError(f"{show(value)} is not allowed: 1")


def inst_ctl(data: bytes) -> Create | Destroy:
    """``inst_ctl``: ``create ID [key=value]...`` or ``destroy ID``, words separated by spaces or tabs."""
    line = text(data)
    if "\n" in line:
        raise UserError(f"{show(line)} is not allowed: {INST_CTL_ALLOWED}")
    match line.replace("\t", " ").split(" "):
        case ["create", *words] if named := [word for word in words if word]:
            return _create(named[0], _options(named[1:]))
        case ["destroy", *words] if len(named := [word for word in words if word]) == 1:
            return Destroy(check_id(named[0]))
        case _:
            raise UserError(f"{show(line)} is not allowed: {INST_CTL_ALLOWED}")


def _options(words: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("gpu", "memsize", "weight", "highprio"):
            raise UserError(f"{show(word)} is not allowed: {INST_CTL_ALLOWED}")
        if key in options:
            raise UserError(f"{show(word)}: {key} is given twice")
        options[key] = value
    return options


def _create(name: str, options: Mapping[str, str]) -> Create:
    check_id(name)
    gpus = _list("gpu", options["gpu"], parse_integer) if "gpu" in options else (0,)
    memsize = _list("memsize", options["memsize"], parse_size) if "memsize" in options else None
    weight = _named("weight", options["weight"], parse_integer) if "weight" in options else None
    highprio = _named("highprio", options.get("highprio", "0"), lambda value: parse_integer(value, 0, 1))
    return Create(name, gpus, memsize, weight, bool(highprio))


def _list(key: str, value: str, parse: Callable[[str], int]) -> tuple[int, ...]:
    return tuple(_named(key, item, parse) for item in value.split(","))


def _named(key: str, value: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(value)
    except UserError as error:
        raise UserError(f"{key}: {error}") from None
