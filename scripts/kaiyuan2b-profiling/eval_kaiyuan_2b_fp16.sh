#!/usr/bin/env bash
# Evaluate what training_kaiyuan_2b_fp16.sh found for kaiyuan_2b_fp16: train some whole steps at its fastest settings,
# compare the speed with what was promised, and trace where the time goes.
# Usage: [OUT=DIR] bash eval_kaiyuan_2b_fp16.sh [options of kaiyuan profile] [KEY=VALUE...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan profile kaiyuan_2b_fp16 --output "${OUT:-$root/profile/kaiyuan_2b_fp16}" \
  --grid "$root/scripts/kaiyuan2b-profiling/params/kaiyuan_2b_fp16/grid.yaml" --check --trace "$@"
