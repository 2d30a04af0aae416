# Sourced by quickstart.sh and test.sh: makes the virtual environment that both use. Needs Python 3.11+ and git only.
# $HEADSMITH_VENV names another place for it, $PYTHON another interpreter.

VENV=${HEADSMITH_VENV:-$ROOT/.venv}

fail() { # fail WHAT REMEDY
    printf '\nerror: %s\n  -> %s\n' "$1" "$2" >&2
    exit 2
}

say() { printf '\n[%s] %s\n' "$(date +%H:%M:%S)" "$1"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer was found" "install one (with its venv module), or name it: PYTHON=/path/to/python3.12 bash $0"
}

install_packages() { # install_packages EXTRAS
    local pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c "$ROOT/scripts/constraints.txt")
    # torch first and alone: resolved together with the rest, pip may fetch another build of several gigabytes.
    "${pip[@]}" torch && "${pip[@]}" -e "$ROOT$1" && return
    fail "the packages could not be installed (pip's message is above)" \
        "check the network connection (about 600 MB are fetched) and the free disk (2 GB), then run this again"
}

make_environment() { # make_environment EXTRAS, as in "[test]"
    local python free_mb stamp
    python=$(find_python) || exit $?
    free_mb=$(df -Pm "$ROOT" | awk 'NR == 2 {print $4}')
    [ -x "$VENV/bin/python" ] || [ "$free_mb" -ge 3000 ] ||
        fail "only $free_mb MB are free under $ROOT" "free 3 GB, or set HEADSMITH_VENV to a folder on another disk"
    stamp="$VENV/.headsmith-$(printf '%s' "$1" | tr -dc a-z)-$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/constraints.txt" | cksum | cut -d' ' -f1)"
    if [ -f "$stamp" ]; then
        say "environment $VENV is ready"
        return
    fi
    say "making the environment $VENV with $("$python" --version) (about 2 minutes the first time)"
    [ -x "$VENV/bin/python" ] || "$python" -m venv "$VENV" ||
        fail "$python cannot make a virtual environment" "install its venv module (Debian: apt install python3-venv)"
    install_packages "$1"
    touch "$stamp"
}
