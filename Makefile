# Two commands for everybody: `make deploy` and `make test`. The others are their parts.

PYTHON ?= python3
threshold ?= 5
python ?= 3.11
wheelhouse ?= wheelhouse

COMPILE := $(CURDIR)/.venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--custom-compile-command "make lock"
# What SGLang names as needed but a host without a GPU cannot use: 3 GB of kernels and CUDA libraries. The rest of the
# CUDA libraries has to stay, because torch links them.
GPU_ONLY := sglang-kernel flashinfer-cubin flashinfer-python sgl-deep-gemm cuda-tile nvidia-cutlass-dsl \
	nvidia-cutlass-dsl-libs-base nvidia-cutlass-dsl-libs-cu13 torchao torchcodec torch-memory-saver flash-attn-4 \
	quack-kernels tokenspeed-mla tokenspeed-triton tilelang z3-solver torch-c-dlpack-ext nvidia-cudnn-frontend \
	cuda-python cuda-core cuda-bindings cuda-pathfinder nvidia-cusolver nvidia-cuda-nvrtc nvidia-nvtx

.DEFAULT_GOAL := help
.PHONY: help deploy test extended setup lint unit browser model host-up host-down lock wheelhouse clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

deploy: model host-up ## Set everything up, start a rehearsal host and deploy to it (threshold=5)
	.venv/bin/ansible-playbook deploy.yml -e threshold=$(threshold)

test: lint model browser ## Set everything up and run the linters and the tests: unit, browser, engine and hosts
	.venv/bin/pytest

extended: model ## Run the tests that `make test` leaves out: arms, rolls of two hosts, sources of releases, all faults
	STAGE_FAULTS=all .venv/bin/pytest tests/hosts/test_deployed_arms.py tests/hosts/test_rolling.py \
		tests/hosts/test_release_sources.py tests/hosts/test_stage_faults.py

setup: .venv/requirements.lock ## Make .venv, with the packages that requirements.lock pins

lint: setup ## Run the linters and the type checker
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/yamllint --strict .
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/ansible-lint

unit: setup ## Run the tests that need neither the engine nor a host
	.venv/bin/pytest -n auto tests/unit

# Debian has a package; Ubuntu's only points to a snap, and Playwright's own Chromium comes from its maker's host. Without
# any the tests of the page are skipped, and say so.
browser: setup ## Install Chromium for the tests of the report's page, where there is none
	@.venv/bin/python tests/browser/chromium.py >/dev/null || { \
		echo "installing Chromium"; sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); . /etc/os-release; \
		if [ "$$ID" = debian ]; then \
			$$sudo apt-get update -qq && $$sudo apt-get install --yes -qq --no-install-recommends chromium; \
		else .venv/bin/playwright install --with-deps chromium || \
			echo "no Chromium could be installed: the tests of the report's page will be skipped" >&2; fi; } </dev/null

model: setup ## Train the rehearsal model, unless it is in the cache
	.venv/bin/python -m rehearsal model

host-up: setup ## Start rehearsal-1
	.venv/bin/python -m rehearsal up

host-down: setup ## Shut the rehearsal hosts down; their disks stay
	.venv/bin/python -m rehearsal down

lock: setup ## Compile requirements.lock and files/locks, keeping what still fits
	$(COMPILE) pyproject.toml --group test --output-file requirements.lock
	cd files/locks && for input in *-cpu.in; do \
		$(COMPILE) $$input $(GPU_ONLY:%=--no-emit-package=%) --output-file $${input%.in}.txt || exit; done
	cd files/locks && for input in *-cuda*.in sglang-router-*.in; do $(COMPILE) $$input --output-file $${input%.in}.txt || exit; done

# A lock file is for all platforms: first its packages for one, without markers, then their wheels. glibc 2.35 is that of
# Ubuntu 22.04; SGLang's wheels need 2.34.
wheelhouse: setup ## Download a lock file's wheels for hosts without network (lock=NAME python=3.11 wheelhouse=FOLDER)
	@[ -f "$(or $(wildcard files/locks/$(lock)),$(lock))" ] || { echo "give lock=NAME, one of files/locks" >&2; exit 1; }
	mkdir -p $(wheelhouse)
	.venv/bin/uv pip compile --quiet --no-deps --no-header --no-annotate --generate-hashes --python-version $(python) \
		--python-platform x86_64-manylinux_2_35 --output-file $(wheelhouse)/lock.txt \
		$(or $(wildcard files/locks/$(lock)),$(lock)) roles/release/files/uv.txt
	.venv/bin/pip download --disable-pip-version-check --quiet --require-hashes --no-deps --only-binary :all: \
		--implementation cp --python-version $(python) --platform linux_x86_64 --platform manylinux2014_x86_64 \
		$$(seq --format "--platform manylinux_2_%g_x86_64" 5 35) \
		--dest $(wheelhouse) --requirement $(wheelhouse)/lock.txt

clean: setup ## Delete the rehearsal hosts and .venv; the cache in ~/.cache/specgate stays
	for hosts in .rehearsal/hosts .rehearsal/*/hosts; do [ ! -d "$$hosts" ] || \
		SPECGATE_REHEARSAL_DIR=$${hosts%/hosts} .venv/bin/python -m rehearsal remove || exit 1; done
	rm -rf .rehearsal .venv

# pip installs only the uv that the lock pins, and uv, much faster, the rest. The copy of the lock, written last, says
# what is installed: a set-up that was interrupted is done again.
.venv/requirements.lock: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "installing python3-venv"; sudo=$$([ "$$(id -u)" = 0 ] || echo sudo); \
		$$sudo apt-get update -qq && $$sudo apt-get install --yes --no-install-recommends python3-venv; } </dev/null
	$(PYTHON) -m venv .venv
	sed -n '/^uv==/,/# via/p' requirements.lock >.venv/uv.lock
	.venv/bin/pip install --quiet --disable-pip-version-check --require-hashes --requirement .venv/uv.lock
	.venv/bin/uv pip sync --quiet --python .venv --require-hashes requirements.lock
	cp requirements.lock $@
