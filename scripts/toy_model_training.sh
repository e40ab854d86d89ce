#!/usr/bin/env bash
# The whole chain, from parquet to a talking model, on a toy: no GPU, no download, a few minutes.
# Usage: bash scripts/toy_model_training.sh [--out DIR]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" train
kaiyuan demo "$@"
