# `make demo` and `make test` do all the set-up, from a fresh clone with nothing
# but make and Python >= 3.11: a virtual environment in .venv with exactly what
# requirements.txt pins (uv installs it where uv is on the PATH, else pip).
#
#   make demo     train the quickstart, draw its loss, sample text   (5 minutes)
#   make test     every cheap test and, of the dear ones, a sample that turns
#                 with the commits: 6 minutes on two idle cores
#                                    make test ARGS="tests/train -k resume"
#   make test-all      every test, but those of packages that are not installed
#                      (torch, lm-eval, pyarrow, libtpu; .ci/run brings them);
#                      writes what each cost and which modules it executed
#                      (tests/ledger.json, tests/executed.json)
#   make knockouts     every claim's mechanism switched off: it must fail
#   make test-changed  tests that execute what differs from BASE (HEAD)
#   make mutants       breaks one line at a time: a check must see each break
#                      (15 minutes on two cores, resumable)
#                                    make mutants ARGS=--only=ring_direction
#   make lint     ruff check, ruff format --check
#   make types    basedpyright
#   make format   the repairs that ruff can make by itself
#   make lock     requirements.in -> requirements.txt                 (needs uv)
#   make clean    remove .venv, builds and caches; runs/ and results/ stay
#
# Another interpreter, beside the first: make test PYTHON=python3.12 VENV=.venv312

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
ARGS ?=
BASE ?= HEAD

# Images often set it: every process would compile jax's 2,400 modules again.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := runs/quickstart

.PHONY: demo test test-all test-changed knockouts mutants lint types format \
  lock clean install
.DEFAULT_GOAL := demo

install: $(STAMP)

# The first of these that is new enough. One shell, so that $$py survives.
define find_python
py=; for p in "$(PYTHON)" python3.12 python3.11 python3.13; do \
  if "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    2>/dev/null; then py=$$p; break; fi; \
done; \
if [ -z "$$py" ]; then \
  echo "paraxis needs Python 3.11 or newer, but '$(PYTHON)' is" \
    "$$("$(PYTHON)" --version 2>&1 || true). Name another one:" \
    "make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; \
  exit 2; \
fi
endef

# --only-binary: nothing is built, no package's set-up code runs. When uv cannot
# reach its index (it does not read pip's configuration), pip gets its turn.
# --no-compile: most of 900 MB is never imported; Python compiles what is.
$(STAMP): requirements.txt setup.cfg pyproject.toml
	@set -e; $(find_python); \
	if ! "$(BIN)/python" -m pip --version >/dev/null 2>&1; then \
	  echo "creating $(VENV) with $$("$$py" --version)"; \
	  rm -rf "$(VENV)"; \
	  "$$py" -m venv "$(VENV)" || { \
	    command -v uv >/dev/null || { \
	      echo "'$$py -m venv' failed: install its venv module" \
	        "(Debian, Ubuntu: apt install python3-venv) or uv." >&2; exit 2; }; \
	    uv venv --quiet --clear --seed --python "$$py" "$(VENV)"; }; \
	fi; \
	echo "installing what requirements.txt pins (about 230 MB, first time only)"; \
	if ! { command -v uv >/dev/null && uv pip install --quiet --python \
	    "$(BIN)/python" --require-hashes --only-binary :all: \
	    -r requirements.txt; }; then \
	  "$(BIN)/python" -m pip install -qq --disable-pip-version-check \
	    --no-compile --require-hashes --only-binary :all: -r requirements.txt; \
	fi
	@"$(BIN)/python" -m pip install -qq --disable-pip-version-check \
	  --no-deps --no-build-isolation --editable .
	@touch "$@"

demo: $(STAMP)
	"$(BIN)/paraxis" train --config=configs/quickstart.py --workdir=$(RUN)
	"$(BIN)/paraxis" plot --workdir=$(RUN)
	"$(BIN)/paraxis" decode --checkpoint=$(RUN) \
	  --max_new_tokens=64 --temperature=0.6 --top_k=40 --seed=5 \
	  --domain=scripture --prompt="And it came to pass" \
	  --domain=drama --prompt="HAMLET." \
	  --domain=code --prompt="def read(self" \
	  --domain=manual --prompt='The "with" statement' \
	  --domain=dictionary --prompt="house (n.)" \
	  --domain=translation --prompt="en: Enter a valid"

PYTEST = "$(BIN)/python" -m pytest -n $(WORKERS) --dist loadgroup

test: $(STAMP)
	$(PYTEST) $(ARGS)

# The recorder of executed modules reaches the processes that tests start too.
test-all: $(STAMP)
	PARAXIS_EXECUTED=on PYTHONPATH=tests/executed $(PYTEST) --all --record $(ARGS)

test-changed: $(STAMP)
	$(PYTEST) --changed=$(BASE) $(ARGS)

# A process for each config: what one switches off, no other sees.
NAMES = 'from paraxis.configs.base import command_line as c; \
  print(*(p.stem for p in c.papers()))'

# One of which nothing can be checked here has said so, and why: exit code 77.
knockouts: $(STAMP)
	@failed=; skipped=; for name in $$("$(BIN)/python" -c $(NAMES)); do \
	  echo "=== $$name"; \
	  "$(BIN)/paraxis" reproduce $$name --knockout; code=$$?; \
	  case $$code in 0) ;; 77) skipped="$$skipped $$name";; \
	    *) failed="$$failed $$name";; esac; \
	done; \
	if [ -n "$$skipped" ]; then echo "skipped:$$skipped"; fi; \
	if [ -n "$$failed" ]; then echo "not as they must:$$failed" >&2; exit 1; fi

mutants: $(STAMP)
	"$(BIN)/python" tests/mutate.py --jobs=$(WORKERS) $(ARGS)

lint: $(STAMP)
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m ruff format --check .

types: $(STAMP)
	"$(BIN)/basedpyright" --pythonpath "$(BIN)/python"

format: $(STAMP)
	"$(BIN)/python" -m ruff check --fix .
	"$(BIN)/python" -m ruff format .

lock:
	uv pip compile --quiet --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header \
	  requirements.in -o requirements.txt

clean:
	rm -rf "$(VENV)" build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .mypy_cache .hypothesis .ci/venv*
	find configs sharding models train decode pallas_kernels tests notebooks \
	  -name __pycache__ -prune -exec rm -rf {} +
