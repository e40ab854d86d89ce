#!/usr/bin/env bash
# Let the newest checkpoint of kaiyuan_2b_fp16 continue texts.
# Usage: [RUN=DIR] bash eval_kaiyuan_2b_fp16.sh [--prompt TEXT]... [other options of kaiyuan generate]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
[ $# -gt 0 ] || set -- --prompt "The capital of France is" --prompt "中国的首都是" \
  --prompt "def fibonacci(n):"
kaiyuan generate "${RUN:-$root/runs/kaiyuan_2b_fp16}" "$@"
