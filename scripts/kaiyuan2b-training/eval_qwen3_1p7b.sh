#!/usr/bin/env bash
# Let the newest checkpoint of qwen3_1p7b continue texts.
# Usage: [RUN=DIR] bash eval_qwen3_1p7b.sh [--prompt TEXT]... [--engine megatron]
#   [other options of kaiyuan generate]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
prompts=(--prompt "The capital of France is" --prompt "中国的首都是" --prompt "def fibonacci(n):")
case " $*" in *" --prompt"*) prompts=() ;; esac
kaiyuan generate "${RUN:-$root/runs/qwen3_1p7b}" "${prompts[@]}" "$@"
