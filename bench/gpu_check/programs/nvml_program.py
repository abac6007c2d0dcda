"""What pynvml shows of GPU 0, as JSON."""

import json

import pynvml

pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
name = pynvml.nvmlDeviceGetName(handle)
print(json.dumps({
    "count": pynvml.nvmlDeviceGetCount(), "name": name.decode() if isinstance(name, bytes) else name,
    "total": memory.total, "used": memory.used, "free": memory.free,
    "driver": str(pynvml.nvmlSystemGetDriverVersion()),
    "processes": [[one.pid, one.usedGpuMemory] for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
}))
