#!/usr/bin/env bash
# Evaluate what training_smoke_gpt2.sh found for gpt_smoke: train some whole steps at its fastest settings,
# compare the speed with what was promised, and trace where the time goes.
# Usage: [OUT=DIR] bash eval_gpt_smoke.sh [options of kaiyuan profile] [KEY=VALUE...]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan profile gpt_smoke --output "${OUT:-$root/profile/gpt_smoke}" \
  --grid "$root/scripts/kaiyuan2b-profiling/params/gpt_smoke/grid.yaml" --check --trace "$@"
