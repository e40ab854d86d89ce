#!/usr/bin/env bash
# Let the newest checkpoint of gpt_smoke continue texts.
# Usage: [RUN=DIR] bash eval_gpt_smoke.sh [--prompt TEXT]... [other options of kaiyuan generate]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
[ $# -gt 0 ] || set -- --prompt "The capital of France is" --prompt "中国的首都是" \
  --prompt "def fibonacci(n):"
kaiyuan generate "${RUN:-$root/runs/gpt_smoke}" "$@"
