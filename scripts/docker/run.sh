#!/usr/bin/env bash
# Start a shell, or a command, in the container.
# Usage: run.sh [options] [-- COMMAND...]
#   --image NAME      default kaiyuan (docker build -f scripts/docker/Dockerfile -t kaiyuan .)
#   --name NAME       default kaiyuan-training
#   --gpus WHICH      default all; none for a machine without
#   --shm-size SIZE   default 64g
#   --mount DIR       seen inside under the same path; repeatable; default: the current folder
#   --workdir DIR     default: the current folder
#   --dry-run         print the command and end
set -euo pipefail
image=kaiyuan name=kaiyuan-training gpus=all shm=64g workdir=$PWD run=
mounts=()
while [ $# -gt 0 ]; do
  case $1 in
    --image) image=$2 ;;
    --name) name=$2 ;;
    --gpus) gpus=$2 ;;
    --shm-size) shm=$2 ;;
    --mount) mounts+=("$2") ;;
    --workdir) workdir=$2 ;;
    --dry-run) run=no; shift; continue ;;
    --) shift; break ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown option $1; see --help" >&2; exit 2 ;;
  esac
  [ $# -ge 2 ] || { echo "run.sh: $1 needs a value" >&2; exit 2; }
  shift 2
done
[ ${#mounts[@]} -gt 0 ] || mounts=("$PWD")
[ $# -gt 0 ] || set -- bash
argv=(docker run --rm --ipc=host --shm-size="$shm" --ulimit memlock=-1 --name "$name" -w "$workdir")
[ -t 0 ] && argv+=(-it)
[ "$gpus" = none ] || argv+=(--gpus "$gpus")
for mount in "${mounts[@]}"; do argv+=(-v "$mount:$mount"); done
if [ -n "$run" ]; then echo "${argv[@]}" "$image" "$@"; else exec "${argv[@]}" "$image" "$@"; fi
