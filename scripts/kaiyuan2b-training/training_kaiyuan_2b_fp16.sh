#!/usr/bin/env bash
# Train kaiyuan_2b_fp16 through its five phases; the same command goes on with an interrupted run.
# Usage: [DATA=DIR] [RUN=DIR] bash training_kaiyuan_2b_fp16.sh [options of kaiyuan train] [KEY=VALUE...]
# Try it without GPU: --dry-run; without data, too: kaiyuan plan kaiyuan_2b_fp16. On several machines: docs/multi_node.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan train kaiyuan_2b_fp16 --data "${DATA:-$root/data/converted}" \
  --output "${RUN:-$root/runs/kaiyuan_2b_fp16}" "$@"
