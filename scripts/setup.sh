# Sourced by the other scripts: makes .venv with the project in it, and defines `python` and
# `kaiyuan` for them. Quick when nothing changed. Usage: source scripts/setup.sh EXTRA[,EXTRA...]
#
# PYTHON=/path/to/python picks the interpreter (3.12 or newer) for a new .venv.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="${KAIYUAN_VENV:-$root/.venv}"

# A name on the PATH is not enough: pyenv's shims refuse versions that are not switched on.
fits() {
  "$1" -c 'import sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] < (3, 14))' \
    >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    fits "$PYTHON" && { echo "$PYTHON"; return 0; }
    echo "PYTHON=$PYTHON is no Python 3.12 or 3.13 with venv" >&2
    return 1
  fi
  for candidate in python3.12 python3.13 python3; do
    fits "$candidate" && { command -v "$candidate"; return 0; }
  done
  if command -v pyenv >/dev/null 2>&1; then
    for candidate in "$(pyenv root 2>/dev/null)"/versions/3.1[23]*/bin/python; do
      fits "$candidate" && { echo "$candidate"; return 0; }
    done
  fi
  if command -v uv >/dev/null 2>&1; then
    candidate="$(uv python find 3.12 2>/dev/null)" ||
      candidate="$(uv python install -q 3.12 2>/dev/null && uv python find 3.12 2>/dev/null)"
    [ -n "$candidate" ] && fits "$candidate" && { echo "$candidate"; return 0; }
  fi
  echo "no Python 3.12 or 3.13 found: install one (apt-get install python3.12-venv," \
    "pyenv install 3.12, or uv) or give PYTHON=/path/to/python" >&2
  return 1
}

set_up() {
  local extras="$1" stamp="$venv/.kaiyuan-$1" wanted python log
  wanted="$(cat "$root/pyproject.toml" "$root/scripts/setup.sh" | sha256sum | cut -d' ' -f1) $root"
  if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    return 0
  fi
  if ! fits "$venv/bin/python"; then
    python="$(find_python)" || return 2
    echo "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" || return 2
  fi
  echo "installing kaiyuan[$extras]; the first time takes some minutes, most of them for torch"
  log="$venv/install.log"
  if ! "$venv/bin/python" -m pip install --disable-pip-version-check -q -e "$root[$extras]" \
    >"$log" 2>&1; then
    grep -v '^WARNING' "$log" | tail -n 5 >&2
    echo "the installation failed; the whole log is $log" >&2
    return 2
  fi
  echo "$wanted" >"$stamp"
}

set_up "${1:-train}" || exit $?
# Only this file's functions, not the environment: a .venv needs no activation.
python() { "$venv/bin/python" "$@"; }
kaiyuan() { "$venv/bin/kaiyuan" "$@"; }
