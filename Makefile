# Two commands on a fresh Debian 12 or 13, as root: `make demo` and `make test`. Each installs what it needs.

PYTHON := python3
VENV   := .venv
BIN    := $(VENV)/bin
APT    := gcc g++ libc6-dev binutils libfuse3-dev pkg-config python3-dev python3-venv
# the interpreter that builds the environment may itself not be there yet
HAVE   := command -v gcc >/dev/null && command -v g++ >/dev/null && command -v readelf >/dev/null && pkg-config --exists fuse3 && \
          $(PYTHON) -c 'import ensurepip, os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
CODE   := pyproject.toml build_ffi.py systemd/cgpud.service $(shell find csrc -type f -not -name '*.pyc')
FRAMEWORKS := .venv-frameworks
# all that numba-cuda looks for beside the driver; numpy 2.5 has no row_stack, which this numba-cuda asks for
FRAMEWORK_PACKAGES := 'numba-cuda==0.30.4' cuda-bindings 'numpy<2.5' gpustat nvitop \
                      'nvidia-nvvm==13.*' 'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*' \
                      'nvidia-cuda-nvcc==13.*' 'nvidia-cuda-cccl==13.*'
# nvcc of the release of PyTorch's own CUDA libraries
FULL_PACKAGES := 'torch==2.14.1' numpy 'jax[cuda13]==0.10.2' 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' \
                 'nvidia-nvvm==13.0.*' 'nvidia-cuda-cccl==13.0.*'

.PHONY: demo test bench gpu-check soak soak-memory lint types wheel test-frameworks test-frameworks-full deps clean

demo: $(VENV)/.ready $(VENV)/.demo
	$(BIN)/python demo/demo.py

test: $(VENV)/.dev
	$(BIN)/pytest $(TESTS)

bench: $(VENV)/.dev
	$(BIN)/python bench/run.py

# On a machine with a real GPU, as root: checks and figures. Needs neither pip nor a network (bench/gpu_check/__main__.py).
gpu-check:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) bench/gpu_check

# 100 kills and 100 upgrades of the daemon under load in 600 s, SOAK_SECONDS for another length (bench/soak/__main__.py).
soak: $(VENV)/.dev
	$(BIN)/python bench/soak

# 10,000 random lives and deaths, and a kill at each instruction inside the ledger; CGPU_SOAK_SEED picks another course.
soak-memory: $(VENV)/.dev
	CGPU_SOAK_STEPS=10000 $(BIN)/pytest -s tests/soak

lint: $(VENV)/.dev
	$(BIN)/ruff check .

types: $(VENV)/.dev
	$(BIN)/mypy

# Holds every library; tests/packaging checks what is in it.
wheel: $(VENV)/.dev
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist ./

# Unmodified numba-cuda and cuda-bindings on the simulated device, nvcc's programs with a stand-in cudart. Downloads about
# 270 MB the first time.
test-frameworks: $(VENV)/.dev $(FRAMEWORKS)/.ready
	CGPU_FRAMEWORKS_PYTHON=$(abspath $(FRAMEWORKS))/bin/python $(BIN)/pytest tests/frameworks \
		tests/e2e/test_frameworks_under_quota.py tests/nvml/test_nvml_monitors.py

# Unmodified PyTorch, Triton, torch.compile and JAX too (docs/frameworks.md). By hand: it downloads 3.5 GB at first.
test-frameworks-full: $(VENV)/.dev $(FRAMEWORKS)-full/.ready
	CGPU_FRAMEWORKS_FULL_PYTHON=$(abspath $(FRAMEWORKS))-full/bin/python $(BIN)/pytest tests/frameworks

deps:
	@$(HAVE) || { test "$$(id -u)" = 0 || { echo "make: packages are missing; run this as root, or have installed: $(APT)" >&2; \
		exit 1; }; apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends $(APT); }

$(VENV)/.venv: | deps
	$(PYTHON) -m venv $(VENV)
	touch $@

# Editable: the commands run this checkout's code; C changes are rebuilt by the same rule.
$(VENV)/.ready: $(VENV)/.venv $(CODE)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

$(VENV)/.demo: $(VENV)/.ready
	$(BIN)/pip install --quiet --editable '.[demo]'
	touch $@

# nvcc needs g++
$(FRAMEWORKS)-full/.ready:
	command -v g++ >/dev/null || DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends g++
	$(PYTHON) -m venv $(FRAMEWORKS)-full
	$(FRAMEWORKS)-full/bin/pip install --quiet $(FULL_PACKAGES)
	touch $@

$(FRAMEWORKS)/.ready:
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/pip install --quiet $(FRAMEWORK_PACKAGES)
	touch $@

clean:
	rm -rf build dist $(VENV) $(FRAMEWORKS) sched/cgpusched/lib sched/cgpusched/_gate.abi3.so
