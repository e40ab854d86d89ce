#!/usr/bin/env bash
# Let the newest checkpoint of qwen3_1p7b continue texts.
# Usage: [RUN=DIR] bash eval_qwen3_1p7b.sh [--prompt TEXT]... [other options of kaiyuan generate]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
[ $# -gt 0 ] || set -- --prompt "The capital of France is" --prompt "中国的首都是" \
  --prompt "def fibonacci(n):"
kaiyuan generate "${RUN:-$root/runs/qwen3_1p7b}" "$@"
