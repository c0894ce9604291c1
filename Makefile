# SPDX-License-Identifier: Apache-2.0
# `make test TAG=` tests that one.
TAGS := $(or $(TAGS),$(TAG))
# Empty where no TAG= is given: what begins a series or checks all asks for it.
NAMED_TAG := $(TAG)
TAG ?= v0.32.0
comma := ,
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

.PHONY: apply-patches quilt refresh new-tag carry differs mutate-series seam-tests check-patches tags-page goodput-page new-releases
apply-patches: ## build/TAG/src: sdist + series + overlay; FORCE=1 loses edits [TAG= FORCE=]
	$(TOOL) apply $(TAG) $(if $(FORCE),--force)

check-patches: ## every tag: zero fuzz, refresh gives no diff, headers, every prefix imports [TAG= or TAGS=]
	$(TOOL) check $(subst $(comma), ,$(TAGS))

refresh: ## rewrite the patches of a tag as `quilt refresh` does [TAG=]
	$(TOOL) refresh $(TAG)

new-tag: ## carry the series of the neighbours to a release, see docs/rebase.md [TAG= FROM= CONTINUE=]
	$(if $(NAMED_TAG),,$(error new-tag needs TAG=, the release to carry a series to))
	$(TOOL) new-tag $(TAG) $(if $(FROM),--from $(FROM)) $(if $(CONTINUE),--continue)

carry: ## a changed or new patch of a series, made in the others [PATCH=0004 FROM= TAGS= BASE=HEAD]
	$(if $(PATCH),,$(error carry needs PATCH=, the begin of its name, and FROM=, its series))
	$(TOOL) carry $(or $(FROM),$(TAG)) $(PATCH) $(if $(BASE),--base $(BASE)) --to $(subst $(comma), ,$(TAGS))

differs: ## write the questions on a series into its file `differs`, for answers by hand [TAG=]
	$(TOOL) differs $(TAG)

mutate-series: ## make errors of four kinds in every series: check-patches must notice [EACH=4]
	$(TOOL) mutate $(if $(EACH),--each $(EACH))

seam-tests: env ## take each seam out of build/env/TAG for a while: its test must fail [TAG= ONLY=tests/unit]
	$(TOOL) seam-tests $(TAG) $(if $(ONLY),--only '$(ONLY)')

tags-page: ## docs/tags.md and the table in README.md, from all series and ci/tested.toml
	$(TOOL) tags-page

goodput-page: ## the table and picture of rising rates, from the kept runs or those in DIRS
	python3 scripts/bench/goodput_page.py $(DIRS)

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

.PHONY: test test-all lint test-fast test-tooling test-scripts test-field test-unit test-sim test-e2e test-upstream upstream-diff compat format
test: ## all checks, for the newest two tags, or [TAG= or TAGS=v0.25.1,v0.28.0]
	$(TESTS) --tags '$(TAGS)'

test-all: ## all checks, for all tags
	$(TESTS) --tags all

lint: ## ruff and mypy [TAG=]
	$(TESTS) --tags $(TAG) env lint

test-fast: ## pool, policies, plan, waiting, and the tidy house: half a minute [TAG=]
	$(TESTS) --tags $(TAG) env fast

test-tooling: ## tests of the patch tooling [TAG=]
	$(TESTS) --tags $(TAG) env tooling

test-scripts: ## tests of demo, soak, sizing, benchmarks and documents [TAG=]
	$(TESTS) --tags $(TAG) env scripts

test-field: ## recipes in deploy/; KV_TIER_FIELD=all: also routers and a container's steps [TAG=]
	$(TESTS) --tags $(TAG) env field

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

format: env ## ruff: format, and fix what it can [TAG=]
	@build/env/$(TAG)/bin/ruff format --quiet .
	@build/env/$(TAG)/bin/ruff check --quiet --fix .

.PHONY: docs size report
docs: env ## build/site: the documentation, strict; writes the references of settings and metrics [TAG=]
	@build/env/$(TAG)/bin/python scripts/reference.py
	@build/env/$(TAG)/bin/mkdocs build --quiet

size: env ## hit rates to expect of host sizes and policies, from a trace [TAG= ARGS=]
	@PYTHONHASHSEED=0 build/env/$(TAG)/bin/python scripts/size.py $(ARGS)

report: env ## build/report.html: a demo or benchmark run on one page [TAG= ARGS=]
	@build/env/$(TAG)/bin/python -m page $(or $(ARGS),build/demo)

.PHONY: soak pool-kills
pool-kills: env ## engines of a pool, their ranks and the keeper, killed at random moments [TAG= KILLS=200]
	@build/env/$(TAG)/bin/python -m tests.e2e.pool_crowd build/pool-kills --kills $(or $(KILLS),200) $(ARGS)

soak: env ## a server with the tier under mixed HTTP load, answers and memory checked, 17 minutes [TAG= MINUTES=10]
	@build/env/$(TAG)/bin/python -m soak --minutes $(or $(MINUTES),10) --out build/soak $(ARGS)

.PHONY: bench speed bench-copy bench-memory bench-scale bench-scheduler bench-off-path gpu-check
bench: ## the tier beside upstream's connectors on this machine's GPU, an hour or two [ARGS=]
	@$(PYTHON) scripts/bench/compare.py --out build/bench $(ARGS)

speed: ## all tables of docs/benchmarks.md on this machine's GPU, in calls of ten minutes [ARGS='1 2']
	@PYTHON=$(PYTHON) scripts/bench/speed.sh build/speed $(ARGS)

bench-copy: ## rates of the copy engines on this machine's GPU
	@$(PYTHON) scripts/bench/copy_rate.py --out build/bench-copy

bench-memory: ## host memory at start on this machine's GPU
	@$(PYTHON) scripts/bench/host_memory.py

bench-scheduler: env ## what the tier adds to a scheduler step, against upstream's connectors [TAG=]
	@build/env/$(TAG)/bin/python scripts/bench/scheduler_step.py --out build/bench-scheduler/$(TAG)

bench-scale: env ## steps, memory and the longest step with 10,000 to 4,000,000 slots [TAG= ARGS=]
	@PYTHONPATH=scripts:scripts/bench build/env/$(TAG)/bin/python scripts/bench/scale.py --out build/bench-scale/$(TAG) $(ARGS)

.PHONY: worst-step
worst-step: env ## the longest scheduler step where clients do their worst, 200,000 slots [TAG= ARGS=]
	@PYTHONPATH=.:scripts build/env/$(TAG)/bin/python scripts/bench/worst_step_below.py $(ARGS)

.PHONY: bench-hybrid
bench-hybrid: env ## what hybrid models take of host and link, beyond what hits need [TAG= ARGS=]
	@PYTHONPATH=scripts:scripts/bench build/env/$(TAG)/bin/python scripts/bench/hybrid_bytes.py $(ARGS)

bench-off-path: env ## a scheduler step, patched with the tier off against upstream [TAG=]
	@build/env/$(TAG)/bin/python scripts/bench/off_path.py --tag $(TAG)

gpu-check: ## outputs with the tier on this machine's GPU; vLLM must be installed
	@$(PYTHON) scripts/bench/gpu_check.py --out build/gpu-check

.PHONY: clean clean-cache
clean: ## remove build/; downloads stay
	@rm -rf build

clean-cache: ## remove the downloads too
	@rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/vllm-kv-tier"
