#!/usr/bin/env bash
# Builds the CUDA form with nvcc from NVIDIA's wheels, without an installation of CUDA: ./cuda.sh [build arguments].
# To run it, the host needs NVIDIA's driver.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
version=${CUDA_WHEELS:-13.0}
home=$PWD/target/cuda-$version
if [ ! -x "$home/bin/nvcc" ]; then
    mkdir -p "$home/wheels"
    # The compiler and its parts, the headers, and the libraries that candle links.
    python3 -m pip download -q --no-deps -d "$home/wheels" \
        "nvidia-cuda-nvcc==$version.*" "nvidia-nvvm==$version.*" "nvidia-cuda-crt==$version.*" "nvidia-cuda-runtime==$version.*" \
        "nvidia-cuda-nvrtc==$version.*" "nvidia-cuda-cccl==$version.*" \
        "nvidia-cublas==$version.*" nvidia-curand
    for wheel in "$home"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$home/unpacked"; done
    # All wheels of CUDA 13 unpack into one tree.
    cp -a "$home"/unpacked/nvidia/cu13/. "$home/"
    chmod +x "$home"/bin/* "$home"/nvvm/bin/* 2>/dev/null || true
    # The linker looks for names without a version; the driver's library is a stub until there is a driver.
    mkdir -p "$home/lib64"
    for library in "$home"/lib/*.so.*; do
        name=$(basename "$library")
        ln -sf "$library" "$home/lib64/${name%%.so.*}.so"
        ln -sf "$library" "$home/lib64/$name"
    done
    if ! ldconfig -p | grep -q 'libcuda\.so'; then
        echo 'int cuInit(unsigned flags) { return (int)flags; }' | cc -shared -x c - -o "$home/lib64/libcuda.so"
    fi
fi
export CUDA_HOME=$home CUDA_PATH=$home CUDA_ROOT=$home PATH=$home/bin:$PATH
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}
export LD_LIBRARY_PATH=$home/lib64:${LD_LIBRARY_PATH:-}
export RUSTFLAGS="${RUSTFLAGS:-} -L native=$home/lib64"
exec cargo build --release --features cuda "$@"
