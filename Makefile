.PHONY: demo test test-slow test-arm test-avx-vnni test-transformers test-clients lint format bench-peers wheel clean

demo: ## set up, then answer from a long prompt exactly and sparsely
	./demo

test: ## set up, then every check and the tests; more pytest options: make test ARGS="-x -k masks"
	./test $(ARGS)

test-slow: ## the tests that take longer than a few seconds each
	./test -m slow $(ARGS)

test-arm: ## the ARM core: cross-compiled, every kernel run under emulation
	scripts/test_arm.sh

test-transformers: ## installs PyTorch and Transformers into .venv and runs the tests of that host
	scripts/test_transformers.sh $(ARGS)

test-clients: ## installs litellm and LangChain into .venv and runs the tests that drive the server with them
	scripts/test_clients.sh $(ARGS)

test-avx-vnni: ## the AVX-VNNI kernels, on a processor with AVX-512 VNNI
	scripts/test_avx_vnni.sh

lint: ## the checks without the tests
	scripts/setup.sh dev
	scripts/lint.sh

format: ## let ruff and clang-format rewrite what they can
	scripts/setup.sh dev
	scripts/lint.sh --fix

bench-peers: ## speed beside other engines, about 10 minutes; IK_BIN=PATH adds ik_llama.cpp's llama-bench
	scripts/bench_peers.sh $(if $(IK_BIN),--ik-bin $(IK_BIN)) $(ARGS)

wheel: ## a wheel in dist/, built in isolation (needs a C++20 compiler on PATH)
	scripts/setup.sh
	.venv/bin/python -m pip wheel --no-deps -w dist .

clean: ## remove everything that is made, the environment included
	rm -rf .venv build dist report .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
