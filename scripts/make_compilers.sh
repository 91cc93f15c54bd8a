#!/usr/bin/env bash
# Makes an environment with the compilers for NVIDIA's GPUs and for TPUs, which `jaxft plan`, the tests marked `aot` and
# benchmarks/aot.py use to compile for accelerators that are not here:
#     scripts/make_compilers.sh [FOLDER]            default: ~/.cache/jaxft/compilers; 4 GB, about five minutes
#     PYTHON=.venv/bin/python scripts/make_compilers.sh
# PYTHON (default: python3) has jax, whose version the compilers get. An environment in FOLDER is replaced. The last
# lines are the versions of what was installed.
set -euo pipefail
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/jaxft/compilers}
mkdir -p "$(dirname "$folder")"
folder=$(cd "$(dirname "$folder")" && pwd)/$(basename "$folder")
python=${PYTHON:-python3}
if [[ $python == */* ]]; then python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! jax=$("$python" -c 'import jax; print(jax.__version__)'); then
    echo "$python has no jax: set PYTHON to the interpreter of an environment with jaxft" >&2
    exit 2
fi
if [[ -e $folder && ! -e $folder/pyvenv.cfg ]]; then
    echo "$folder exists and is no virtual environment: it is left as it is" >&2
    exit 2
fi
"$python" -m venv --clear "$folder"

# libtpu (0.7 GB) is the compiler for TPUs. jaxft comes with all that it needs, as its programs are traced there; which
# checkout is traced is the caller's choice, by PYTHONPATH.
"$folder/bin/pip" install --quiet "jax[tpu]==$jax" -e .

# The plugin and pjrt (0.4 GB) are the compiler for GPUs. It loads cuDNN (0.9 GB), which builds the plans of attention,
# and cuBLAS with the CUDA runtime and nvrtc. nvcc and nvvm bring ptxas and libdevice, which turn XLA's and Triton's
# kernels into machine code (with cuBLAS 1.1 GB). jax[cuda13] would add 2 GB for collectives, sparse matrices and FFTs,
# which only running programs need.
"$folder/bin/pip" install --quiet --no-deps "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax" \
    nvidia-cudnn-cu13 nvidia-cublas nvidia-cuda-runtime nvidia-cuda-nvrtc nvidia-cuda-nvcc nvidia-nvvm

"$folder/bin/python" -m jaxft.planning.compiler
echo "compilers for jax $jax are in $folder"
