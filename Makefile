# The front door. `make` lists what there is. Every target does its own set-up first.
JOBS ?= $(shell awk -v cores=$$(nproc) '/MemAvailable/ { n = int($$2 / 2000000); print n < 1 ? 1 : n < cores ? n : cores }' /proc/meminfo)

# nvcc-came FOLDER: whether there was no nvcc when it was configured, and there is one now.
nvcc-came = grep -qs '^TIERFLOW_NVCC:.*NOTFOUND' $(1)/CMakeCache.txt && { command -v nvcc || ls /usr/local/cuda/bin/nvcc; } >/dev/null 2>&1

# build-preset PRESET,FOLDER[,TARGET]: configures once (the build itself notices changed CMake files), again where FOLDER/early says
# that there was no LibTorch then (tools/setup_program.sh) or where nvcc came since, and builds.
define build-preset
	@[ -f $(2)/build.ninja ] && [ ! -e $(2)/early ] && ! { $(call nvcc-came,$(2)); } || { cmake --preset $(1) $$([ ! -e $(2)/early ] || echo -DTIERFLOW_TORCH=ON) && rm -f $(2)/early; }
	@cmake --build $(2) --parallel $(JOBS) $(if $(3),--target $(3))
endef

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev program build test demo demo-lora asan tsan test-faults test-kills fuzz soak-io mutants test-neon test-gpu bench-gpu gpu-kit bench format lint rebuild-time install clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install what is missing: packages with apt (as root or through sudo), Python packages into .venv
	@tools/setup.sh

setup-dev: ## the same and clang-format, clang-tidy and pre-commit, for contributors
	@tools/setup.sh requirements-dev.txt

program: ## build/tierflow alone, and no more set-up than that takes
	@tools/setup_program.sh $(JOBS)
	$(call build-preset,release,build,tierflow_program)

build: setup ## all there is to build: the program, the libraries, the Python package, the tests
	$(call build-preset,release,build)

test: build ## every test: ctest, then pytest
	@tools/test.sh build

demo: program ## fine-tune a small Llama with its state on the drive; DATA=path for text of your own
	@tools/demo.sh

demo-lora: program ## tune adapters (QLoRA) of a small model, and show its answers before and after
	@tools/demo_lora.sh

asan: setup ## the C++ tests under the address and undefined-behaviour sanitizers
	$(call build-preset,asan,build-asan)
	@ctest --preset asan

tsan: setup ## the C++ tests below LibTorch under the thread sanitizer
	$(call build-preset,tsan,build-tsan)
	@ctest --preset tsan

test-faults: setup ## the commit protocol under faults: RUNS (100000) on simulated drives, FLIPS (10000) of bits, CUTS (1000) of power
	@[ -f build/build.ninja ] || cmake --preset release
	@cmake --build build --parallel $(JOBS) --target swap_test
	@tools/test_faults.sh build $(JOBS)

test-kills: build ## a training run killed at KILLS (225) points, and gone on with
	@TIERFLOW_BUILD=build TIERFLOW_KILLS=$(or $(KILLS),225) .venv/bin/python -m pytest -q tests/python/test_resume.py -k each_call

fuzz: setup ## the parsers of foreign files on random bytes, MINUTES (1) each, or RUNS inputs; PARSER=config names one. Needs clang
	@command -v clang++ >/dev/null || { echo "make fuzz needs clang: apt-get install clang" >&2; exit 4; }
	$(call build-preset,fuzz,build-fuzz)
	@tools/fuzz.sh build-fuzz $(JOBS)

soak-io: setup ## random volumes, requests and faults for MINUTES (10); SEED=n plays one round again, STORAGE=folder says where
	@[ -f build/build.ninja ] || cmake --preset release
	@cmake --build build --parallel $(JOBS) --target io_soak
	@tools/soak_io.sh build

mutants: setup-dev ## do the tests notice wrong code? Of FOLDER (all), for MINUTES (20) each; SEED=n draws the same again
	@.venv/bin/python tools/mutants.py $(FOLDER) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json $(JSON))

test-neon: setup ## the optimizer's tests as 64-bit ARM code in an emulator (g++-aarch64-linux-gnu, qemu-user)
	@tools/test_neon.sh

test-gpu: setup ## the tests that need an NVIDIA GPU; says so and does nothing where there is none
	@tools/test_gpu.sh

bench-gpu: build ## training on an NVIDIA GPU beside PyTorch and DeepSpeed; says so and does nothing where there is none
	@.venv/bin/python benchmarks/gpu/bench.py

gpu-kit: setup ## one archive that proves and measures all this on a borrowed machine with a GPU: GPU_ARCH (90), KIT_DIR (build-kit)
	@command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || { echo "make gpu-kit needs nvcc: install the CUDA toolkit" >&2; exit 4; }
	@cmake --preset release -B build-kit -DTIERFLOW_CUDA=ON -DTIERFLOW_TORCH=ON -DCMAKE_CUDA_ARCHITECTURES=$(or $(GPU_ARCH),90)-real
	@cmake --build build-kit --parallel $(JOBS) --target gpu_kit_programs
	@.venv/bin/python tools/gpu_kit.py --build build-kit --out $(or $(KIT_DIR),build-kit)/tierflow-gpu-kit.tar.xz

bench: program ## storage and optimizer of this machine; STORAGE=folder on the drive to measure
	@tools/bench.sh build

format: setup-dev ## clang-format on every C++ file
	@git ls-files '*.h' '*.cpp' '*.cu' | xargs .venv/bin/clang-format -i

lint: setup-dev build ## format, include directions, Python types, and clang-tidy on what needs no LibTorch
	@tools/lint.sh build

rebuild-time: build ## seconds until the program is built again after a change to one file of runtime/session, or to each of FILES
	@.venv/bin/python tools/rebuild_time.py $(FILES)

install: build ## headers, libraries and the program into PREFIX (default /usr/local)
	@cmake --install build $(if $(PREFIX),--prefix $(PREFIX))

clean: ## remove everything that was built, but not .venv
	rm -rf build build-cpu build-cuda build-kit build-asan build-tsan build-neon build-mutants demo .cache
