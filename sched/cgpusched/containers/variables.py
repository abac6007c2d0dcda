"""What a container's environment asks for, as a pure function of it and the node's GPUs.

The variables and most rules are those of Alibaba Cloud's cGPU documentation; docs/containers.md has them all and says
which are ours. The one rule above the others: a container that asks for a limit never runs without one. So a value that
makes no sense is an error that stops it, and only what is unset or says "off" leaves it to NVIDIA's own service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cgpusched.errors import UserError
from cgpusched.model import MAX_INST_DEFAULT
from cgpusched.units import parse_integer, show

DISABLE = "CGPU_DISABLE"
DEV = "ALIYUN_COM_GPU_MEM_DEV"
CONTAINER = "ALIYUN_COM_GPU_MEM_CONTAINER"
UNIT = "ALIYUN_COM_GPU_MEM_UNIT"
WEIGHT = "ALIYUN_COM_GPU_SCHD_WEIGHT"
PRIORITY = "ALIYUN_COM_GPU_HIGH_PRIO"
OURS = "ALIYUN_COM_GPU_VISIBLE_DEVICES"
NVIDIA = "NVIDIA_VISIBLE_DEVICES"
CDI = "CGPU_CDI_DEVICE_"
"""With a GPU's index behind it: set by the CDI specification for each of its devices that was asked for."""

UNITS = ("GiB", "MiB")
"""What sizes may be in. CONTAINER and DEV only matter by their ratio, so it is the same for both."""
_SIZE_MAX = 1 << 31
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")


@dataclass(frozen=True)
class Card:
    """A GPU. ``memory`` in bytes; ``index`` and ``uuid`` as NVML has them; ``max_inst`` of its tree node."""

    index: int
    uuid: str
    memory: int
    max_inst: int = MAX_INST_DEFAULT


@dataclass(frozen=True)
class Ask:
    """A share of GPUs. ``gpus``: host indices, in the order that lists count by; ``memsize``: bytes of each."""

    gpus: tuple[int, ...]
    memsize: tuple[int, ...]
    weight: int | None
    """None: not said."""
    highprio: bool
    visible: str
    """What NVIDIA_VISIBLE_DEVICES must be for NVIDIA's runtime to bring in these GPUs, and the native ones."""
    native: tuple[int, ...] = ()
    """Host indices of the GPUs that it gets whole, beside the shared ones."""


@dataclass(frozen=True)
class Off:
    """Nothing of ours: NVIDIA's own service, or no GPU at all. Its configuration must not be touched."""

    reason: str
    warning: str | None = None


def variables(env: Iterable[str]) -> dict[str, str]:
    """``KEY=VALUE`` entries as the program will see them: of several the last counts."""
    pairs = (entry.partition("=") for entry in env)
    return {key: value for key, equals, value in pairs if equals}


def ask(env: Iterable[str], cards: Sequence[Card], ignore_disable: bool = False) -> Ask | Off:
    """Raises UserError: one line that names the variable, its value and what is allowed.

    ``ignore_disable``: who asks for memory is held to it whatever CGPU_DISABLE says, which an image may have brought.
    """
    values = variables(env)
    if _disabled(values) and not ignore_disable:
        reason, asked = f"{DISABLE}={values[DISABLE]}", values.get(CONTAINER, "0")
        return Off(reason, f"{reason}, though {CONTAINER}={show(asked)}" if asked != "0" else None)
    if CONTAINER not in values:
        return _off(f"{CONTAINER} is not set", values)
    sizes = _sizes(values[CONTAINER])
    if 0 in sizes:
        return _off(f"{CONTAINER}={values[CONTAINER]}", values)
    _check_unit(values)
    total = _total(values)
    for size in sizes:
        if size > total:
            raise _wrong(CONTAINER, values[CONTAINER], f"at most the {total} of {DEV}, the whole GPU,")
    shared, native, visible = _gpus(values, cards)
    if len(sizes) > len(shared):
        raise _wrong(CONTAINER, values[CONTAINER],
                     f"one size for each of its {len(shared)} shared GPUs at most (the last repeats)")
    sizes += [sizes[-1]] * (len(shared) - len(sizes))
    most = min(card.max_inst for card in shared)
    return Ask(
        tuple(card.index for card in shared),
        tuple(_memsize(card, size, total) for card, size in zip(shared, sizes, strict=True)),
        _integer(WEIGHT, values[WEIGHT], 1, most) if WEIGHT in values else None,
        bool(_integer(PRIORITY, values[PRIORITY], 0, 1)) if PRIORITY in values else False,
        visible,
        tuple(card.index for card in native),
    )


def _wrong(name: str, value: str, allowed: str) -> UserError:
    return UserError(f"{name}={show(value)}: {allowed} is allowed")


def _disabled(values: dict[str, str]) -> bool:
    value = values.get(DISABLE, "")
    if value.lower() not in _TRUE + _FALSE:
        raise _wrong(DISABLE, value, "true or 1, false or 0")
    return value.lower() in _TRUE


def _off(reason: str, values: dict[str, str]) -> Off:
    said = [name for name in (WEIGHT, PRIORITY) if name in values]
    warning = f"{' and '.join(said)} without a memory size in {CONTAINER}: the container runs without cGPU"
    return Off(reason, warning if said else None)


def _integer(name: str, value: str, low: int, high: int) -> int:
    try:
        return parse_integer(value, low, high)
    except UserError:
        raise _wrong(name, value, f"an integer {low}-{high}") from None


def _sizes(text: str) -> list[int]:
    try:
        return [parse_integer(part, 0, _SIZE_MAX) for part in text.split(",")]
    except UserError:
        raise _wrong(CONTAINER, text, "an integer, or a list of one for each GPU like 3,4 (a 0: no cGPU)") from None


def _check_unit(values: dict[str, str]) -> None:
    if values.get(UNIT, UNITS[0]) not in UNITS:
        raise _wrong(UNIT, values[UNIT], " or ".join(UNITS))


def _total(values: dict[str, str]) -> int:
    if DEV not in values:
        raise UserError(f"{DEV} is not set: {CONTAINER}={show(values[CONTAINER])} is a part of that, the whole GPU")
    return _integer(DEV, values[DEV], 1, _SIZE_MAX)


def _memsize(card: Card, size: int, total: int) -> int:
    """Bytes. Whole MiB, rounded down: 6 of 15 of a card of 15,109 MiB is 6,043 MiB (fits every published sample)."""
    mebibytes = (card.memory >> 20) * size // total
    if mebibytes == 0:
        raise UserError(f"{CONTAINER}={size} of {DEV}={total} is less than 1 MiB of GPU {card.index}: at least that is "
                        "allowed")
    return mebibytes << 20


# Which GPUs


def _gpus(values: dict[str, str], cards: Sequence[Card]) -> tuple[list[Card], list[Card], str]:
    """The shared GPUs, the native ones, and the new NVIDIA_VISIBLE_DEVICES.

    NVIDIA's documentation takes "void" and an empty value for unset: it brings in no GPU then. Where ours names GPUs
    they are taken so; alone they say that the container must see none, which a memory size contradicts.
    """
    name, theirs, ours = OURS, values.get(NVIDIA), values.get(OURS)
    if ours is None and (devices := sorted(key[len(CDI) :] for key in values if key.startswith(CDI))):
        name, ours = CDI, ",".join(devices)
    if ours is None:
        if theirs is None or theirs == "all":
            return _all(cards), [], "all"
        return _listed(NVIDIA, theirs, cards), [], theirs
    shared = _all(cards) if ours == "all" else _listed(name, ours, cards)
    if theirs in (None, "all", "void", ""):
        return shared, [], ours
    assert theirs is not None
    visible = [] if theirs == "none" else _listed(NVIDIA, theirs, cards)
    for card in shared:
        if card not in visible:
            raise UserError(f"{name}={show(ours)}: GPU {card.index} is not in {NVIDIA}={show(theirs)}: a part of that "
                            "list is allowed")
    return shared, [card for card in visible if card not in shared], theirs


def _all(cards: Sequence[Card]) -> list[Card]:
    if not cards:
        raise UserError(f"{CONTAINER} asks for GPU memory, and this node has no GPU")
    return list(cards)


def _listed(name: str, text: str, cards: Sequence[Card]) -> list[Card]:
    """The GPUs of a list of indices and UUIDs, in its order."""
    found: list[Card] = []
    for part in text.split(","):
        card = next((card for card in cards if part == str(card.index) or part.lower() == card.uuid.lower()), None)
        if card is None or card in found:
            why = "is named twice" if card else "is no GPU of this node"
            has = ",".join(str(card.index) for card in cards) or "none"
            raise _wrong(name, text, f"{show(part)} {why}: a list of indices ({has}) or UUIDs, each once, or all,")
        found.append(card)
    return found
