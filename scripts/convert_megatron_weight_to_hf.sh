#!/usr/bin/env bash
# Convert a checkpoint of Megatron to a Hugging Face folder.
# Usage: bash convert_megatron_weight_to_hf.sh CHECKPOINT OUTPUT [options of kaiyuan export]
# CHECKPOINT is a run, its folder "checkpoints", or the folder of one iteration.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,4s/^# //p' "$0" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" train
kaiyuan export "$1" --output "$2" "${@:3}"
