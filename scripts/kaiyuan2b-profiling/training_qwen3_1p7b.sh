#!/usr/bin/env bash
# Find the fastest settings of qwen3_1p7b on this machine; the same command goes on with a sweep.
# Usage: [OUT=DIR] bash training_qwen3_1p7b.sh [options of kaiyuan profile] [KEY=VALUE...]
# Try it without GPU: --dry-run. What comes out: docs/profiling.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan profile qwen3_1p7b --output "${OUT:-$root/profile/qwen3_1p7b}" \
  --grid "$root/scripts/kaiyuan2b-profiling/params/qwen3_1p7b/grid.yaml" "$@"
