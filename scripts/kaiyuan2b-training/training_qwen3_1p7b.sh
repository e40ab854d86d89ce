#!/usr/bin/env bash
# Train qwen3_1p7b through its five phases; the same command goes on with an interrupted run.
# Usage: [DATA=DIR] [RUN=DIR] bash training_qwen3_1p7b.sh [options of kaiyuan train] [KEY=VALUE...]
# Try it without GPU: --dry-run; without data, too: kaiyuan plan qwen3_1p7b. On several machines: docs/multi_node.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan train qwen3_1p7b --data "${DATA:-$root/data/converted}" \
  --output "${RUN:-$root/runs/qwen3_1p7b}" "$@"
