#!/usr/bin/env bash
# The test suite on a fresh machine: makes its own environment, checks style and types, runs the tests.
#
#   bash scripts/test.sh              everything that is not slow
#   bash scripts/test.sh -m slow      the slow tests; any arguments go to pytest
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"
source scripts/environment.sh

make_environment "[dev]"
say "ruff and mypy"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
bash scripts/typecheck.sh "$VENV/bin/python"
say "pytest"
# Small tensors: threads would only wait for each other.
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} exec "$VENV/bin/python" -m pytest "$@"
