#!/usr/bin/env bash
# Find the fastest settings of gpt_smoke on this machine; the same command goes on with a sweep.
# Usage: [OUT=DIR] bash training_smoke_gpt2.sh [options of kaiyuan profile] [KEY=VALUE...]
# Try it without GPU: --dry-run. What comes out: docs/profiling.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan profile gpt_smoke --output "${OUT:-$root/profile/gpt_smoke}" \
  --grid "$root/scripts/kaiyuan2b-profiling/params/gpt_smoke/grid.yaml" "$@"
