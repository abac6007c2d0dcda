"""cuda_min.h and nvml_min.h against NVIDIA's headers, where those are installed."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

ABI = Path(__file__).resolve().parents[2] / "csrc/abi"
CUDA_H = Path("/usr/local/cuda/include/cuda.h")
STRUCTS = {"CUDA_ARRAY3D_DESCRIPTOR": "Flags", "CUDA_ARRAY_DESCRIPTOR": "NumChannels", "CUDA_ARRAY_MEMORY_REQUIREMENTS":
           "alignment", "CUDA_CHILD_GRAPH_NODE_PARAMS": "ownership", "CUDA_EXTERNAL_MEMORY_BUFFER_DESC": "flags",
           "CUDA_GRAPH_INSTANTIATE_PARAMS": "result_out", "CUDA_HOST_NODE_PARAMS": "userData",
           "CUDA_KERNEL_NODE_PARAMS": "ctx", "CUDA_LAUNCH_PARAMS": "kernelParams", "CUDA_MEMCPY2D": "Height",
           "CUDA_MEMCPY3D": "Depth", "CUDA_MEMCPY3D_BATCH_OP": "flags", "CUDA_MEMCPY3D_PEER": "Depth",
           "CUDA_MEMCPY_NODE_PARAMS": "copyParams", "CUDA_MEM_ALLOC_NODE_PARAMS": "dptr", "CUctxCreateParams":
           "cigParams", "CUdevprop": "textureAlign", "CUgraphEdgeData": "type", "CUgraphExecUpdateResultInfo":
           "errorFromNode", "CUgraphNodeParams": "reserved2", "CUipcMemHandle": "reserved", "CUlaunchAttribute":
           "value", "CUlaunchConfig": "numAttrs", "CUmemAccessDesc": "flags", "CUmemAllocationProp": "allocFlags",
           "CUmemLocation": "id", "CUmemPoolProps": "usage", "CUmemcpy3DOperand": "op", "CUmemcpyAttributes": "flags",
           "CUuuid": "bytes"}
NAMES = re.compile(r"\b(CU(?:DA)?_(?:ERROR|SUCCESS|GET_PROC|STREAM_CAPTURE|MEMORYTYPE|MEM_|MEMPOOL|"
                   r"GRAPH_|LIMIT_|EVENT_|CTX_|DEVICE_ATTRIBUTE|POINTER_ATTRIBUTE|FUNC_ATTRIBUTE|JIT_INPUT|AD_FORMAT|MEMHOST|ARRAY3D|"
                   r"LAUNCH_ATTRIBUTE)\w*)")


def compile_and_run(tmp_path: Path, name: str, include: str, lines: list[str]) -> str:
    source = tmp_path / f"{name}.c"
    body = "\n".join(lines)
    source.write_text(f"#include <stddef.h>\n#include <stdio.h>\n{include}\nint main(void) {{\n{body}\nreturn 0; }}\n")
    subprocess.run(["gcc", "-w", "-o", str(tmp_path / name), str(source)], check=True)
    return subprocess.run([str(tmp_path / name)], check=True, capture_output=True, text=True).stdout


@pytest.mark.skipif(not CUDA_H.exists(), reason="no CUDA toolkit with headers of 13.0")
def test_cuda_layout(tmp_path: Path) -> None:
    if "#define CUDA_VERSION 13000" not in CUDA_H.read_text():
        pytest.skip("the CUDA toolkit here is not 13.0")
    ours = (ABI / "cuda_min.h").read_text()
    constants = sorted(name for name in set(NAMES.findall(ours)) - {"CU_DEVICE_ATTRIBUTE_MAX", "CU_FUNC_ATTRIBUTE_MAX",
                                                                    "CU_LIMIT_MAX"}
                       if name.removesuffix("_v1") not in STRUCTS)
    assert len(constants) > 200
    lines = [f'printf("%s %zu %zu\\n", "{name}", sizeof({name}), offsetof({name}, {last}));' for name,
             last in STRUCTS.items()]
    lines += [f'printf("%s %lld\\n", "{name}", (long long)({name}));' for name in constants]
    assert compile_and_run(tmp_path, "ours", f'#include "{ABI}/cuda_min.h"', lines) == compile_and_run(
        tmp_path, "theirs", f'#include "{CUDA_H}"', lines)


def test_nvml_layout(tmp_path: Path) -> None:
    """Against NVIDIA's Python bindings of NVML, which the daemon uses."""
    pynvml = pytest.importorskip("pynvml")
    pairs = {"nvmlMemory_t": "c_nvmlMemory_t", "nvmlMemory_v2_t": "c_nvmlMemory_v2_t", "nvmlBAR1Memory_t":
             "c_nvmlBAR1Memory_t", "nvmlPciInfo_t": "nvmlPciInfo_t", "nvmlPciInfo_v2_t": "nvmlPciInfo_v2_t",
             "nvmlProcessInfo_t": "c_nvmlProcessInfo_v3_t", "nvmlProcessDetail_v1_t": "c_nvmlProcessDetail_v1_t",
             "nvmlProcessDetailList_t": "c_nvmlProcessDetailList_t", "nvmlUtilization_t": "c_nvmlUtilization_t",
             "nvmlProcessUtilizationSample_t": "c_nvmlProcessUtilizationSample_t", "nvmlProcessUtilizationInfo_v1_t":
             "c_nvmlProcessUtilizationInfo_v1_t", "nvmlEventData_t": "c_nvmlEventData_t",
             "nvmlProcessesUtilizationInfo_t": "c_nvmlProcessesUtilizationInfo_v1_t", "nvmlUUID_t": "c_nvmlUUID_t",
             "nvmlAccountingStats_t": "c_nvmlAccountingStats_t"}
    lines = [f'printf("%s %zu\\n", "{ours}", sizeof({ours}));' for ours in pairs]
    sizes = compile_and_run(tmp_path, "nvml", f'#include "{ABI}/nvml_min.h"', lines)
    assert sizes == "".join(f"{ours} {ctypes.sizeof(getattr(pynvml, theirs))}\n" for ours, theirs in pairs.items())
