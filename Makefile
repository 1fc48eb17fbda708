# One command each; `make` is lint and the quick tests.
.PHONY: default lint format test nightly engines soak chaos power-cuts fuzz fuzz-csrc fuzz-lies mutants-csrc flips measurements docs locks proto clean llama-server installed-ollama pins vulkan arm64 distros containers deb release installs
default:
	./scripts/test quick
lint:
	.venv/bin/ruff check && .venv/bin/ruff format --check && .venv/bin/mypy && .venv/bin/lint-imports
format:
	.venv/bin/ruff format
test:
	./scripts/test
nightly: # also what waits its turn in tests/turns.py, and the slow engine tests: hours
	./scripts/test nightly
engines: # the engine tests on four more versions of Ollama: an hour and a half on 2 cores, with their builds
	./scripts/engines
soak:
	TIERING_SOAK=100 .venv/bin/python -m pytest -q -p no:cacheprovider --timeout 0 tests/contract/test_store_machine.py
chaos:
	TIERING_CHAOS=1000 .venv/bin/python -m pytest -q -p no:cacheprovider --timeout 0 tests/fault/test_chaos.py
power-cuts:
	TIERING_POWER_CUTS=$${TIERING_POWER_CUTS:-20000} .venv/bin/python -m pytest -q -s -p no:cacheprovider --timeout 0 tests/fault/test_power_cuts.py
fuzz:
	TIERING_FUZZ=1000000 .venv/bin/python -m pytest -q -s -p no:cacheprovider --timeout 0 tests/fuzz --ignore tests/fuzz/test_flips.py
fuzz-lies: # a sidecar's lies to llama-server's library, under sanitizers: some minutes
	TIERING_LIES=50000 .venv/bin/python -m pytest -q -s -p no:cacheprovider --timeout 0 tests/fuzz/test_lies.py
fuzz-csrc:
	./scripts/test-csrc fuzz 1000000
mutants-csrc: # each rule of the exact order broken in turn: a test has to fail; a few minutes
	./scripts/attention/mutants-csrc
flips:
	TIERING_FLIPS=10000 .venv/bin/python -m pytest -q -s -p no:cacheprovider --timeout 0 tests/fuzz/test_flips.py
llama-server: # with the tiering, and without: make llama-server SOURCE=version-sdist-or-folder FOLDER=where; 6 minutes
	.venv/bin/python scripts/llama_server.py $(or $(SOURCE),0.3.35) $(FOLDER)
installed-ollama: llama-server # an Ollama v0.32.15 as if installed, for its tests; `tiering fetch --tag v0.32.15` first
	.venv/bin/python scripts/installed_ollama.py
pins: # where the lines of llama-server fit: sources of llama.cpp, which are downloaded (75 MB each); 2 minutes
	.venv/bin/python -m scripts.llama_server_pins
vulkan: # three engines on GGML's Vulkan backend, on a device that is a program; installs nothing, says what is missing; 12 minutes of builds once
	./scripts/vulkan
arm64: # the patched Ollama cross-compiled for ARM64, and its demo in an emulator; installs nothing, says what is missing
	./scripts/arm64
distros: # README's commands on fresh Debian systems, as root: make distros CASES="debian13 debian13-clang"; 10 minutes each
	./scripts/distros $(CASES)
containers: # the image of packaging/docker, built with buildah and tried, as root; 5 minutes each, and once their builds
	./scripts/containers $(CASES)
deb: # a Debian package in build/deb, for the release whose python3 this machine has; 2 minutes
	./scripts/release deb
release: # sdist, wheel, Debian package, SBOM and checksums in dist, of this commit
	./scripts/release
installs: # a release of the last commit, made twice, and each way to install it: 15 minutes
	TIERING_INSTALLS=1 .venv/bin/python -m pytest -v -p no:cacheprovider tests/integration/test_release.py
measurements: # hours, on a machine that does nothing else; `scripts/measure.py --list` says what and how long
	.venv/bin/python scripts/measure.py
locks:
	./scripts/lock
docs: # docs/commands.md and the tables of docs/configuration.md, from the code
	.venv/bin/python scripts/gen_docs.py
proto:
	.venv/bin/python scripts/gen_proto.py
	.venv/bin/python scripts/gen_cpp_numbers.py
clean:
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
