#!/usr/bin/env bash
# Train gpt_smoke, 60 steps of each of the five phases; the same command goes on with an interrupted run.
# Usage: [DATA=DIR] [RUN=DIR] bash training_smoke_gpt2.sh [options of kaiyuan train] [KEY=VALUE...]
# Try it without GPU: --dry-run; without data, too: kaiyuan plan gpt_smoke. On several machines: docs/multi_node.md.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
kaiyuan train gpt_smoke --data "${DATA:-$root/data/converted}" \
  --output "${RUN:-$root/runs/gpt_smoke}" "$@"
