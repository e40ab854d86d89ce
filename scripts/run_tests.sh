#!/usr/bin/env bash
# Set up with the test dependencies, check style and types, run the tests.
# Usage: bash scripts/run_tests.sh [pytest's arguments, such as -m slow]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" train,test,dev,eval,serve,wandb
cd "$root"
python -m ruff check .
python -m ruff format --check .
python -m mypy
python -m pytest "$@"
