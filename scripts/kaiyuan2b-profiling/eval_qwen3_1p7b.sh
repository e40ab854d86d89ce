#!/usr/bin/env bash
# Evaluate what training_qwen3_1p7b.sh found for qwen3_1p7b: train some whole steps at its fastest settings,
# compare the speed with what was promised, and trace where the time goes.
# Usage: [OUT=DIR] bash eval_qwen3_1p7b.sh [options of kaiyuan profile] [KEY=VALUE...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan profile qwen3_1p7b --output "${OUT:-$root/profile/qwen3_1p7b}" \
  --grid "$root/scripts/kaiyuan2b-profiling/params/qwen3_1p7b/grid.yaml" --check --trace "$@"
