#!/usr/bin/env bash
# Find the fastest settings of kaiyuan_2b_fp16 on this machine; the same command goes on with a sweep.
# Usage: [OUT=DIR] bash training_kaiyuan_2b_fp16.sh [options of kaiyuan profile] [KEY=VALUE...]
# Try it without GPU: --dry-run. What comes out: docs/profiling.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan profile kaiyuan_2b_fp16 --output "${OUT:-$root/profile/kaiyuan_2b_fp16}" \
  --grid "$root/scripts/kaiyuan2b-profiling/params/kaiyuan_2b_fp16/grid.yaml" "$@"
