# Each target is a thin call; what it does is in build.py, images/host.py, tests/ and bench/.
PY := .venv/bin/python
# SLURM=26.05: that release's packages, in place of the default's.
OTHER_SLURM := 26.05
# ARCH=arm64, amd64 or both: for that architecture, in place of this machine's own.
BUILD := $(PY) build.py $(if $(SLURM),--slurm $(SLURM)) $(if $(ARCH),--arch $(ARCH))

.PHONY: help images other-slurm other-architecture unit test-one coverage test test-slurm test-emulated up ssh status down lint map bench \
	reproduce push release clean test-kubernetes kube-up kube-status kube-down

help:                ## this list
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  +##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 18

# The host script is standard library only: it runs before anything is installed.
.venv/ready: pyproject.toml requirements.txt images/host.py
	@python3 images/host.py venv

images: .venv/ready  ## build every image, whatever is missing on this machine first
	@$(if $(ARCH),python3 images/host.py emulation $(ARCH))
	@$(BUILD) build --ready-engine --when-vanished relock $(ROLES)

test: images lint    ## lint, and every test: unit, process, container, cluster
	@python3 images/host.py test-tools
	@$(MAKE) -s other-slurm
	@$(MAKE) -s other-architecture
	@$(PY) -m tests $(ARGS)

# What stands beside the default, for the test that goes from one to the other; `latest` stays the default's.
other-slurm: images
	@$(PY) build.py --slurm $(OTHER_SLURM) build --when-vanished relock
	@$(BUILD) build
	@$(PY) build.py --slurm $(OTHER_SLURM) build --when-vanished relock slinky-controller slinky-worker slinky-login

# Where programs of the other architecture can be run; where not, this says why, and so do the tests that are left out.
other-architecture: images
	@! python3 images/host.py emulation both || $(PY) build.py --arch both build --when-vanished relock controller

# `make test` has the upgrade from one to the other; everything else of a cluster it has of the default alone.
test-slurm: .venv/ready  ## the cluster's tests on another release of Slurm: SLURM=26.05, or the one beside the default
	@python3 images/host.py engine
	@python3 images/host.py test-tools
	@$(PY) build.py build --when-vanished relock
	@$(PY) build.py --slurm $(or $(SLURM),$(OTHER_SLURM)) build --when-vanished relock
	@MINIVM_BUILD_SLURM=$(or $(SLURM),$(OTHER_SLURM)) $(PY) -m pytest tests/cluster $(ARGS)

test-emulated: .venv/ready  ## pods of another architecture, run by qemu: ARCH=arm64, and the images that they need
	@$(MAKE) -s images ARCH=$(or $(ARCH),arm64) ROLES="controller worker"
	@python3 images/host.py test-tools
	@$(PY) -m pytest tests/container/init/test_emulated.py $(ARGS)

test-kubernetes: images  ## the chart's whole life on three machines; KUBECONFIG=... takes that Kubernetes instead
	@python3 images/host.py test-tools
	@test -n "$$KUBECONFIG" || $(PY) -m tests.kubernetes build
	@$(PY) -m pytest tests/kubernetes $(ARGS)

kube-up: images      ## a Kubernetes of three machines on this one, with the images
	@python3 images/host.py test-tools
	@$(PY) -m tests.kubernetes up $(ARGS)

kube-status:         ## its machines and nodes
	@$(PY) -m tests.kubernetes status

kube-down:           ## stop it, leave nothing behind
	@$(PY) -m tests.kubernetes down

unit: lint           ## lint, types and unit tests: needs no image and no root
	@$(PY) -m pytest -q -n auto tests/unit $(ARGS)

test-one: .venv/ready  ## one test or folder: make test-one ARGS="tests/unit/gitsync -k lease"
	@test -n "$(ARGS)" || { echo 'make test-one needs ARGS=PATH, for example ARGS=tests/unit/gitsync' >&2; exit 2; }
	@$(PY) -m pytest $(ARGS)

coverage: .venv/ready  ## what the unit tests (or ARGS) execute, by module; every line in build/coverage/html
	@mkdir -p build/coverage
	@$(PY) -m coverage erase
	@failed=0; $(PY) -m coverage run -m pytest -q -n auto $(or $(ARGS),tests/unit) || failed=$$?; \
		$(PY) -m coverage combine -q && $(PY) -m coverage html -q && $(PY) -m coverage report && exit $$failed

lint: .venv/ready    ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check --quiet .
	@$(PY) -m mypy

map: .venv/ready     ## each module with its first sentence; writes the folders into docs/architecture.md
	@$(PY) -m tests.unit.test_map

up: images           ## a whole cluster on this machine
	@$(PY) build.py up $(if $(SLURM),--slurm-version $(SLURM)) $(ARGS)

ssh:                 ## ssh into the login pod as the demo user
	@$(PY) build.py ssh $(ARGS)

status:              ## the pods: ready, or why not
	@$(PY) build.py status $(ARGS)

down:                ## stop the cluster, leave nothing behind
	@$(PY) build.py down $(ARGS)

bench: images        ## the figures of docs/performance.md
	@$(PY) -m bench $(ARGS)

reproduce: .venv/ready  ## build twice from nothing and compare every digest
	@python3 images/host.py engine
	@$(if $(ARCH),python3 images/host.py emulation $(ARCH))
	@$(BUILD) reproduce $(ROLES)

push: images         ## push every image: make push REGISTRY=host:port/path
	@$(BUILD) push --registry $(REGISTRY)

release: .venv/ready  ## version, changelog, tag: make release VERSION=1.2.3; with REGISTRY=... SIGN=KEY images and chart too
	@test -n "$(VERSION)" || { echo 'make release needs VERSION=x.y.z' >&2; exit 2; }
	@$(BUILD) release $(if $(REGISTRY),--registry $(REGISTRY)) $(if $(SIGN),--sign $(SIGN)) -- $(VERSION)

clean:               ## remove the virtual environment and build/
	@rm -rf .venv build
