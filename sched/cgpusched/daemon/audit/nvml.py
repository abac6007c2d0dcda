"""How much memory each process uses on a GPU, by NVML: the real one's word or the simulated one's.

Everything here may block for as long as the driver likes: call it in a thread.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cgpusched.daemon.devices import load_nvml
from cgpusched.errors import UserError
from cgpusched.model import Gpu

LISTS = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
         "nvmlDeviceGetMPSComputeRunningProcesses")


class Unreadable(UserError):
    """NVML has no such figures now; ``str()`` says why."""


class Nvml:
    """A handle on NVML that outlives a driver that is reloaded: after an error it begins anew."""

    def __init__(
        self, library: Path, sim_dir: Path | None = None, load: Callable[[Path], Any] = load_nvml
    ) -> None:
        self._library = library
        self._sim_dir = sim_dir
        self._load = load
        self._pynvml: Any = None

    def used(self, gpu: Gpu) -> dict[int, int]:
        """Bytes by pid of the processes on this GPU. Pids are the host's where the daemon runs in its namespace.

        Unreadable: no driver or a broken one, a lost GPU, or one of which NVML does not say it (MIG without the
        privilege, WSL).
        """
        nvml = self._pynvml or self._start()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
            # A process is in several lists when it does several things, each time with all that it has.
            lists = [_add_up(nvml, handle, name, required=name is LISTS[0]) for name in LISTS]
        except nvml.NVMLError as error:
            if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INSUFFICIENT_SIZE):
                self._stop()
            raise Unreadable(str(error)) from None
        return {pid: min(max(one[pid] for one in lists), gpu.memory) for pid in set().union(*lists)}

    def _start(self) -> Any:
        if self._sim_dir is not None:
            os.environ["CGPU_SIM_DIR"] = str(self._sim_dir)  # the simulated NVML asks there
        try:
            nvml = self._load(self._library)
        except UserError as error:
            raise Unreadable(str(error)) from None
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise Unreadable(str(error)) from None
        self._pynvml = nvml
        return nvml

    def _stop(self) -> None:
        nvml, self._pynvml = self._pynvml, None
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _add_up(nvml: Any, handle: object, name: str, required: bool) -> Counter[int]:
    found: Counter[int] = Counter()
    unsaid = 0
    for process in _list(nvml, handle, name, required):
        if process.usedGpuMemory is None:
            unsaid += 1
        else:
            found[process.pid] += process.usedGpuMemory  # of several parts of a partitioned GPU
    if unsaid and not found:
        raise Unreadable("NVML does not say how much memory a process uses")
    return found


def _list(nvml: Any, handle: object, name: str, required: bool) -> list[Any]:
    for version in ("", "_v2"):  # the newest that pynvml knows; drivers before 510 have the second
        call = getattr(nvml, name + version, None)
        if call is None:
            continue
        try:
            return list(call(handle))
        except nvml.NVMLError as error:
            absent = error.value == nvml.NVML_ERROR_FUNCTION_NOT_FOUND
            if not absent and (required or error.value != nvml.NVML_ERROR_NOT_SUPPORTED):
                raise
            if not absent:
                return []
    if required:
        raise Unreadable("this driver's NVML lists no processes")
    return []
