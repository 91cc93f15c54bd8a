#!/usr/bin/env bash
# Makes the virtual environment of each peer that `benchmarks/compare.py` runs: `torch` (Hugging Face and TRL), `tunix`.
#
#     bash benchmarks/peers/make_environments.sh [DIRECTORY]
#
# DIRECTORY, or else $JAXFT_PEERS, or else benchmarks/peers/.environments; say the same to compare.py by JAXFT_PEERS.
# $PYTHON is the interpreter to make them from (python3 unless told). What is complete already is left alone, so a second
# call costs nothing. An environment that cannot be made is named at the end, the others are made all the same, and the
# exit code is the number of those missing. About five minutes and 6 GiB.
set -u

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
directory=${1:-${JAXFT_PEERS:-$here/.environments}}
python=${PYTHON:-python3}
missing=()

# make NAME REQUIREMENTS...: each argument is one pip call, in order, as torch must be there before what depends on it.
make() {
    local name=$1 place=$directory/$1 log=$directory/$1.log
    shift
    if [[ -f $place/complete && $(<"$place/complete") == "$*" ]]; then
        echo "$name: already there, in $place"
        return
    fi
    rm -rf "$place"
    mkdir -p "$directory"
    echo "$name: making it in $place (log: $log)"
    if ! "$python" -m venv "$place" >"$log" 2>&1; then
        fail "$name" "$log"
        return
    fi
    local step
    for step in "$@"; do
        # shellcheck disable=SC2086  # a step is several words
        if ! "$place/bin/python" -m pip install --quiet --disable-pip-version-check $step >>"$log" 2>&1; then
            fail "$name" "$log"
            return
        fi
    done
    echo "$*" >"$place/complete"
    echo "$name: made"
}

fail() {
    echo "$1: could not be made: $(grep -v '^ *$' "$2" | tail -n 1)" >&2
    missing+=("$1")
}

make torch "torch==2.13.0" "transformers>=5.23 trl>=1.16 tokenizers datasets accelerate numpy>=2"
make tunix "google-tunix==0.1.7 numpy>=2"

if ((${#missing[@]})); then
    echo "missing: ${missing[*]}; compare.py will say so of their sides" >&2
fi
exit ${#missing[@]}
