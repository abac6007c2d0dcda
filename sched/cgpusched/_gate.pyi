from typing import Any

class _FFI:
    CData = Any
    NULL: Any
    def new(self, cdecl: str, init: Any = ...) -> Any: ...
    def addressof(self, cdata: Any, *fields: str | int) -> Any: ...
    def buffer(self, cdata: Any, size: int = ...) -> Any: ...

class _Lib:
    CGPU_SLOTS: int
    CORE_ENTITIES: int
    CORE_ACTIONS: int
    CORE_TICK: int
    CORE_JOIN: int
    CORE_LEAVE: int
    CORE_PLAN: int
    CORE_REPORT: int
    CORE_GRANT: int
    CORE_CLOSE: int
    CORE_DEADLINE: int
    CORE_SHUT: int
    CORE_OPEN: int
    CORE_CLOSING: int
    CORE_TAIL: int
    def __getattr__(self, name: str) -> Any: ...

ffi: _FFI
lib: _Lib
