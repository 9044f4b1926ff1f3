# Sourced by the other scripts: puts a Python environment with this package on PATH.
#
# An active virtual environment is used as it is; else .venv beside this folder is made. What is installed
# is noted in the environment, so that a second run finds it done and takes no time.

set -eu
caller="$PWD"
cd "$(dirname "$0")/.."

if [ -z "${VIRTUAL_ENV:-}" ]; then
    if [ ! -f .venv/bin/activate ]; then # also where an earlier try ended half-way
        python="$(command -v python3 || command -v python)" || {
            echo "scripts: no python3 on PATH; install Python 3.10 or later" >&2
            exit 2
        }
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
            echo "scripts: $("$python" --version) is too old; install Python 3.10 or later" >&2
            exit 2
        }
        echo "scripts: making .venv" >&2
        "$python" -m venv .venv
    fi
    . .venv/bin/activate
fi

# install EXTRAS: install this package, editable, with the extras named ("" for none), once.
install() {
    wanted="$(cksum <pyproject.toml) $PWD"
    stamp="$VIRTUAL_ENV/.elastic_mnist-installed${1:+-$1}"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    # A torch that is there and fits stays; on a bare machine these are the versions this project is tested with.
    if ! python -c 'import torch, torchvision' 2>/dev/null; then
        echo "scripts: installing torch (once; some minutes)" >&2
        python -m pip install -qq "torch==2.14.1" "torchvision==0.29.1" ||
            python -m pip install -qq "torch>=2.11,<3" "torchvision>=0.26,<1"
    fi
    echo "scripts: installing elastic_mnist${1:+[$1]}" >&2
    python -m pip install -qq --editable ".${1:+[$1]}"
    echo "$wanted" >"$stamp"
}
