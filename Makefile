# SPDX-License-Identifier: Apache-2.0
# `make test TAG=` tests that one.
TAGS := $(or $(TAGS),$(TAG))
TAG ?= v0.32.0
DEVICE ?= cuda
PYTHON ?= python3

export PYTHONPATH := $(CURDIR)/scripts
# Imports of vLLM take twice as long without it.
unexport PYTHONDONTWRITEBYTECODE
TOOL := @$(PYTHON) -m patchtool
TESTS := @$(PYTHON) ci/run_tests.py

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | \
	  awk -F ':.*## ' '{ printf "%-15s %s\n", $$1, $$2 }'
	@echo 'TAG is one of $(notdir $(wildcard patches/v*)), $(TAG) if not given.'

.PHONY: apply-patches quilt refresh new-tag check-patches tags-page new-releases
apply-patches: ## build/TAG/src: sdist + series + overlay; FORCE=1 loses edits [TAG= FORCE=]
	$(TOOL) apply $(TAG) $(if $(FORCE),--force)

check-patches: ## every tag: zero fuzz, refresh gives no diff, headers, every prefix imports
	$(TOOL) check

refresh: ## rewrite the patches of a tag as `quilt refresh` does [TAG=]
	$(TOOL) refresh $(TAG)

new-tag: ## carry a series to another release, see docs/rebase.md [FROM= TAG= CONTINUE=]
	$(if $(FROM),,$(error new-tag needs FROM=, the tag to start from, and TAG=))
	$(TOOL) new-tag $(TAG) --from $(FROM) $(if $(CONTINUE),--continue)

tags-page: ## docs/tags.md and the table in README.md, from all series and ci/tested.toml
	$(TOOL) tags-page

new-releases: ## try the newest series on releases of upstream that have none
	@$(PYTHON) ci/new_releases.py

quilt: ## quilt in build/TAG/src with the project's settings [TAG= ARGS=refresh]
	$(TOOL) quilt $(TAG) $(ARGS)

.PHONY: wheel env sync
wheel: ## build/wheels: release wheel + series + overlay [TAG= DEVICE=cuda|cpu ARCH=]
	$(TOOL) wheel $(TAG) --device $(DEVICE) $(if $(ARCH),--arch $(ARCH))

env: ## build/env/TAG: venv with the patched CPU build and the test tools [TAG=]
	$(TOOL) env $(TAG)

sync: ## copy changed patches and overlay into build/env/TAG [TAG=]
	$(TOOL) sync $(TAG)

.PHONY: demo
demo: env ## conversations that outgrow the device cache, tier off and on [TAG=]
	@build/env/$(TAG)/bin/python -m demo --out build/demo

.PHONY: test test-all lint test-tooling test-unit test-sim test-e2e test-upstream upstream-diff compat format
test: ## all checks, for the newest two tags, or [TAG= or TAGS=v0.25.1,v0.28.0]
	$(TESTS) --tags '$(TAGS)'

test-all: ## all checks, for all tags
	$(TESTS) --tags all

lint: ## ruff and mypy [TAG=]
	$(TESTS) --tags $(TAG) env lint

test-tooling: ## tests of the patch tooling [TAG=]
	$(TESTS) --tags $(TAG) env tooling

test-unit: ## tests without scheduler and engine [TAG=]
	$(TESTS) --tags $(TAG) env unit

test-sim: ## upstream's scheduler with the tier against a simulated worker [TAG=]
	$(TESTS) --tags $(TAG) env sim

test-e2e: ## the real engine on a CPU [TAG=]
	$(TESTS) --tags $(TAG) env e2e

test-upstream: ## upstream's own tests, tier off and swapped in [TAG=]
	$(TESTS) --tags $(TAG) env upstream

upstream-diff: env ## upstream's own tests, unpatched against patched, 15 minutes [TAG=]
	$(TESTS) --tags $(TAG) upstream-diff

compat: env ## docs/compatibility.md from the results in build/compat [TAG=]
	@build/env/$(TAG)/bin/python scripts/compat.py \
	  --python build/env/$(TAG)/bin/python build/compat/*.jsonl

format: env ## ruff: format, and mend what it can [TAG=]
	@build/env/$(TAG)/bin/ruff format --quiet .
	@build/env/$(TAG)/bin/ruff check --quiet --fix .

.PHONY: docs size report
docs: env ## build/site: the documentation, strict; writes the references of settings and metrics [TAG=]
	@build/env/$(TAG)/bin/python scripts/reference.py
	@build/env/$(TAG)/bin/python scripts/metrics_doc.py docs/metrics.md
	@build/env/$(TAG)/bin/mkdocs build --quiet

size: env ## hit rates to expect of host sizes and policies, from a trace [TAG= ARGS=]
	@build/env/$(TAG)/bin/python scripts/size.py $(ARGS)

report: env ## build/report.html: a demo or benchmark run on one page [TAG= ARGS=]
	@build/env/$(TAG)/bin/python -m page $(or $(ARGS),build/demo)

.PHONY: soak
soak: env ## a server with the tier under mixed HTTP load, answers and memory checked, 17 minutes [TAG= MINUTES=10]
	@build/env/$(TAG)/bin/python -m soak --minutes $(or $(MINUTES),10) --out build/soak $(ARGS)

.PHONY: bench bench-copy bench-memory bench-scheduler bench-off-path gpu-check
bench: ## the tier beside upstream's connectors on this machine's GPU, an hour or two [ARGS=]
	@$(PYTHON) scripts/bench/compare.py --out build/bench $(ARGS)

bench-copy: ## rates of the copy engines on this machine's GPU
	@$(PYTHON) scripts/bench/copy_rate.py --out build/bench-copy

bench-memory: ## host memory at start on this machine's GPU
	@$(PYTHON) scripts/bench/host_memory.py

bench-scheduler: env ## what the tier adds to a scheduler step, against upstream's connectors [TAG=]
	@build/env/$(TAG)/bin/python scripts/bench/scheduler_step.py --out build/bench-scheduler/$(TAG)

bench-off-path: env ## a scheduler step, patched with the tier off against upstream [TAG=]
	@build/env/$(TAG)/bin/python scripts/bench/off_path.py --tag $(TAG)

gpu-check: ## outputs with the tier on this machine's GPU; vLLM must be installed
	@$(PYTHON) scripts/bench/gpu_check.py --out build/gpu-check

.PHONY: clean clean-cache
clean: ## remove build/; downloads stay
	@rm -rf build

clean-cache: ## remove the downloads too
	@rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/vllm-kv-tier"
