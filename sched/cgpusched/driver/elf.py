"""Reads what a shared library offers: its dynamic symbols, their versions, its SONAME and what it needs.

Only the program headers and the dynamic section are used, as the loader does: section headers may have been stripped.
Every offset is checked against the file before it is followed; a damaged file is a ``UserError``.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cgpusched.errors import UserError

EM_X86_64 = 62
ET_DYN = 3
PT_LOAD, PT_DYNAMIC = 1, 2
PF_X = 1
DT_NEEDED, DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SONAME = 1, 4, 5, 6, 10, 14
DT_GNU_HASH, DT_VERSYM, DT_VERDEF, DT_VERDEFNUM = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFD
STB_GLOBAL, STB_WEAK = 1, 2
STT_NOTYPE, STT_OBJECT, STT_FUNC, STT_COMMON, STT_TLS, STT_GNU_IFUNC = 0, 1, 2, 5, 6, 10
SHN_UNDEF, SHN_ABS = 0, 0xFFF1
VERSYM_HIDDEN = 0x8000
VER_FLG_BASE, VER_FLG_WEAK = 1, 2


@dataclass(frozen=True, order=True)
class Export:
    """A function that a library offers. ``version`` is empty when it has none; ``hidden``: not that name's default."""

    name: str
    version: str = ""
    hidden: bool = False
    weak: bool = False


@dataclass(frozen=True)
class Version:
    """A version that a library defines. ``parents`` are those it inherits from, as the file lists them."""

    name: str
    flags: int
    parents: tuple[str, ...] = ()


@dataclass(frozen=True)
class Library:
    """``functions`` sorted by name and version; ``data`` names the exported variables, which no proxy can stand for."""

    path: Path
    soname: str
    needed: tuple[str, ...]
    functions: tuple[Export, ...]
    data: tuple[str, ...]
    versions: tuple[Version, ...] = field(default=())


def read(path: Path) -> Library:
    """Reads the x86-64 shared library at ``path``.

    UserError: not readable, not ELF, for another machine, or damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            return _Reader(path, image).library()
    except (OSError, ValueError) as error:  # ValueError: mmap of an empty file
        raise UserError(f"{path}: cannot be read: {error}") from None
    except (struct.error, IndexError, OverflowError, UnicodeDecodeError):  # overflow: an offset past 2**63
        raise UserError(f"{path}: damaged ELF file") from None


class _Reader:
    def __init__(self, path: Path, image: mmap.mmap) -> None:
        self.path = path
        self.image = image
        if image[:4] != b"\x7fELF":
            raise UserError(f"{path}: not an ELF file")
        if len(image) < 64 or image[4] != 2 or image[5] != 1:
            raise UserError(f"{path}: not a 64-bit little-endian library; proxies are made for x86-64 only")
        kind, machine = struct.unpack_from("<HH", image, 16)
        if machine != EM_X86_64:
            raise UserError(f"{path}: made for ELF machine {machine}; proxies are made for x86-64 ({EM_X86_64}) only")
        if kind != ET_DYN:
            raise UserError(f"{path}: not a shared library (ELF type {kind})")
        phoff, = struct.unpack_from("<Q", image, 32)
        phentsize, phnum = struct.unpack_from("<HH", image, 54)
        # (type, flags, offset, vaddr, filesz, memsz)
        self.segments: list[tuple[int, int, int, int, int, int]] = []
        for index in range(phnum):
            at = phoff + index * phentsize
            kind, flags, offset, vaddr, _, filesz, memsz, _ = struct.unpack_from("<IIQQQQQQ", image, at)
            self.segments.append((kind, flags, offset, vaddr, filesz, memsz))
        self.dynamic = self._dynamic()

    def _damaged(self, what: str) -> UserError:
        return UserError(f"{self.path}: damaged ELF file: {what}")

    def _dynamic(self) -> list[tuple[int, int]]:
        for kind, _, offset, _, filesz, _ in self.segments:
            if kind == PT_DYNAMIC:
                if offset + filesz > len(self.image):
                    raise self._damaged("its dynamic section lies outside the file")
                entries: list[tuple[int, int]] = []
                for tag, value in struct.iter_unpack("<qQ", self.image[offset:offset + filesz // 16 * 16]):
                    if tag == 0:
                        break
                    entries.append((tag, value))
                return entries
        raise UserError(f"{self.path}: not a shared library (no dynamic section)")

    def _tag(self, tag: int) -> int | None:
        return next((value for found, value in self.dynamic if found == tag), None)

    def _offset(self, vaddr: int) -> int:
        """File offset of a virtual address."""
        for kind, _, offset, start, filesz, _ in self.segments:
            if kind == PT_LOAD and start <= vaddr < start + filesz and offset + filesz <= len(self.image):
                return offset + vaddr - start
        raise self._damaged(f"address {vaddr:#x} lies outside the file")

    def _executable(self, vaddr: int) -> bool:
        return any(kind == PT_LOAD and flags & PF_X and start <= vaddr < start + memsz
                   for kind, flags, _, start, _, memsz in self.segments)

    def _string(self, at: int) -> str:
        table = self._tag(DT_STRTAB)
        size = self._tag(DT_STRSZ)
        if table is None or size is None or at >= size:
            raise self._damaged("a name lies outside the string table")
        start = self._offset(table)
        end = self.image.find(b"\0", start + at, start + size)
        if end < 0:
            raise self._damaged("a name has no end")
        return self.image[start + at:end].decode("utf-8")

    def _symbol_count(self) -> int:
        table = self._tag(DT_HASH)
        if table is not None:
            _, chains = struct.unpack_from("<II", self.image, self._offset(table))
            return int(chains)
        table = self._tag(DT_GNU_HASH)
        if table is None:
            raise self._damaged("no symbol hash table")
        at = self._offset(table)
        nbuckets, first, nbloom, _ = struct.unpack_from("<IIII", self.image, at)
        at += 16 + 8 * nbloom
        buckets = struct.unpack_from(f"<{nbuckets}I", self.image, at)
        last = max(buckets, default=0)
        if last < first:
            return int(first)
        at += 4 * nbuckets
        while not struct.unpack_from("<I", self.image, at + 4 * (last - first))[0] & 1:  # the chain's end has bit 0 set
            last += 1
        return int(last) + 1

    def _versions(self) -> Iterator[tuple[int, Version]]:
        table, count = self._tag(DT_VERDEF), self._tag(DT_VERDEFNUM)
        if table is None or not count:
            return
        if count > 0x7FFF:
            raise self._damaged(f"{count} versions")
        at = self._offset(table)
        for _ in range(count):
            _, flags, index, names, _, aux, step = struct.unpack_from("<HHHHIII", self.image, at)
            found: list[str] = []
            entry = at + aux
            for _ in range(names):
                name, next_entry = struct.unpack_from("<II", self.image, entry)
                found.append(self._string(name))
                entry += next_entry
            if not found:
                raise self._damaged("a version without a name")
            yield index & 0x7FFF, Version(found[0], flags, tuple(found[1:]))
            at += step

    def library(self) -> Library:
        symtab = self._tag(DT_SYMTAB)
        if symtab is None:
            raise self._damaged("no dynamic symbols")
        symbols, count = self._offset(symtab), self._symbol_count()
        if symbols + 24 * count > len(self.image):
            raise self._damaged("its dynamic symbols lie outside the file")
        versym = self._tag(DT_VERSYM)
        versions_at = None if versym is None else self._offset(versym)
        versions = dict(self._versions())
        functions: set[Export] = set()
        data: set[str] = set()
        for index in range(1, count):
            name, info, other, section, value, _ = struct.unpack_from("<IBBHQQ", self.image, symbols + 24 * index)
            bind, kind = info >> 4, info & 15
            # other & 3: hidden (2) and internal (1) symbols are nobody's to see
            if section in (SHN_UNDEF, SHN_ABS) or bind not in (STB_GLOBAL, STB_WEAK, 10) or other & 3 in (1, 2):
                continue
            code = kind in (STT_FUNC, STT_GNU_IFUNC) or kind == STT_NOTYPE and self._executable(value)
            if not code:
                if kind in (STT_OBJECT, STT_COMMON, STT_TLS):
                    data.add(self._string(name))
                continue
            version, hidden = "", False
            if versions_at is not None:
                number, = struct.unpack_from("<H", self.image, versions_at + 2 * index)
                if number & 0x7FFF == 0:  # local: bound by the linker, offered to nobody
                    continue
                defined = versions.get(number & 0x7FFF)
                if defined is not None and not defined.flags & VER_FLG_BASE:
                    version, hidden = defined.name, bool(number & VERSYM_HIDDEN)
            functions.add(Export(self._string(name), version, hidden, bind == STB_WEAK))
        soname = self._tag(DT_SONAME)
        return Library(
            path=self.path,
            soname="" if soname is None else self._string(soname),
            needed=tuple(self._string(value) for tag, value in self.dynamic if tag == DT_NEEDED),
            functions=tuple(sorted(functions)),
            data=tuple(sorted(data)),
            versions=tuple(version for _, version in sorted(versions.items(), key=lambda item: item[0])),
        )
