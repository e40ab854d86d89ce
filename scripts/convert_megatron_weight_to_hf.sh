#!/usr/bin/env bash
# Convert a checkpoint of Megatron to a Hugging Face folder.
#   bash scripts/convert_megatron_weight_to_hf.sh CHECKPOINT OUTPUT [options of kaiyuan export]
# CHECKPOINT is a run, its folder "checkpoints", or the folder of one iteration.
set -euo pipefail
if [ $# -lt 2 ]; then
  sed -n '2,4s/^# //p' "$0" >&2
  exit 2
fi
kaiyuan=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/kaiyuan
[ -x "$kaiyuan" ] || kaiyuan=kaiyuan
checkpoint=$1 output=$2
shift 2
exec "$kaiyuan" export "$checkpoint" --output "$output" "$@"
