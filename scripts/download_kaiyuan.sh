#!/usr/bin/env bash
# Download the pre-training data of Kaiyuan-2B; run again to go on where it stopped.
#
#   bash scripts/download_kaiyuan.sh                         # all five phases (3.7 TB) into ./data
#   PHASES=1,2 DEST=/ssd/data bash scripts/download_kaiyuan.sh
#   bash scripts/download_kaiyuan.sh --dry-run               # options go on to `kaiyuan download`
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh" train
kaiyuan download --phase "${PHASES:-all}" --dest "${DEST:-data}" "$@"
