"""``make gpu-check``: does cgpufs do on a real NVIDIA GPU what it does on the simulated one, and at what cost?

    python3 bench/gpu_check [--out FILE] [--only CHECK] [--budget SECONDS] [--simulated] [--no-tree]

As root, on a machine with an NVIDIA driver; no network is used, and eight minutes are enough. What the machine has is
run, unmodified, behind the proxies: the CUDA runtime, cuBLAS, CuPy, numba-cuda and PyTorch of any Python on PATH or in
conda, nvidia-smi, pynvml. What it lacks is skipped, with the reason. Each check is a process of its own with a time
limit: one that fails or hangs stops no other. A table comes last; all figures, with the device's name, are in the JSON
(default: build/gpu-check/DEVICE.json; the daemon's log lies beside it). The exit status is 1 when a check failed, 2
when nothing could be checked.

Nothing needs to be installed: where ``make`` has built the environment (.venv), that is used. To a machine without pip
or a network, carry a build:

    python3 bench/gpu_check --carry        # where there is a network and a built .venv: fills build/gpu-check/carried
    # copy the checkout with build/gpu-check/carried to the machine; .venv is not needed there
    python3 bench/gpu_check                # there, with any Python from 3.11 on

``carried`` (about 10 MB) holds this package as built, the Python packages it imports, cffi's backend for Python 3.11 to
3.14, and the C programs, which are compiled anew where there is a gcc. Where FUSE is missing (/dev/fuse or pyfuse3),
cgpud runs without its tree, and what needs the tree is skipped; ``--no-tree`` asks for that.

``--simulated`` runs the same checks on the simulated device, shorter, to see that they themselves work: its figures
mean nothing.
"""

import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
NAMES = ("python3", "python3.14", "python3.13", "python3.12", "python3.11")


def become_a_newer_python():
    """This may be any python3, so what stands in this file is old Python; what follows needs 3.11."""
    folders = [os.path.join(ROOT, ".venv", "bin")] + os.environ.get("PATH", "").split(":") + ["/opt/conda/bin"]
    for path in [os.path.join(folder, name) for folder in folders for name in NAMES]:
        if os.access(path, os.X_OK) and subprocess.call(
                [path, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], stderr=subprocess.DEVNULL) == 0:
            os.execv(path, [path, HERE] + sys.argv[1:])
    sys.stderr.write("gpu-check: needs a Python from 3.11 on, and PATH has none\n")
    sys.exit(2)


if __name__ == "__main__":
    try:
        import tomllib  # noqa: F401  # new in 3.11
    except ImportError:
        become_a_newer_python()
    sys.path.insert(0, HERE)
    from runner import main

    sys.exit(main())
