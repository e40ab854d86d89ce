#!/usr/bin/env bash
# Let the newest checkpoint of gpt_smoke continue texts.
# Usage: [RUN=DIR] bash eval_gpt_smoke.sh [--prompt TEXT]... [--engine megatron]
#   [other options of kaiyuan generate]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../setup.sh" train
prompts=(--prompt "The capital of France is" --prompt "中国的首都是" --prompt "def fibonacci(n):")
case " $*" in *" --prompt"*) prompts=() ;; esac
kaiyuan generate "${RUN:-$root/runs/gpt_smoke}" "${prompts[@]}" "$@"
