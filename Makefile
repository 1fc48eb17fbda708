# One command each; `make` is lint and the quick tests.
.PHONY: default lint format test locks proto clean
default:
	./scripts/test quick
lint:
	.venv/bin/ruff check && .venv/bin/ruff format --check && .venv/bin/mypy && .venv/bin/lint-imports
format:
	.venv/bin/ruff format
test:
	./scripts/test
locks:
	./scripts/lock
proto:
	.venv/bin/python scripts/gen_proto.py
clean:
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
