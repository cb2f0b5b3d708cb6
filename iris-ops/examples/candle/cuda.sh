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
    # The linker looks for names without a version; the wheels' names have one.
    mkdir -p "$home/lib64"
    for library in "$home"/lib/*.so.*; do
        name=$(basename "$library")
        ln -sf "../lib/$name" "$home/lib64/${name%%.so.*}.so"
        ln -sf "../lib/$name" "$home/lib64/$name"
    done
    # The driver is linked by a stub that has every name of its header; the real one is found when the program starts.
    grep -oE '\bcu[A-Z][A-Za-z0-9]*(_v[0-9]+)?' "$home/include/cuda.h" | sort -u | sed 's/.*/int &(void) { return 100; }/' |
        cc -w -shared -Wl,-soname,libcuda.so.1 -x c - -o "$home/lib64/libcuda.so"
fi
export CUDA_HOME=$home CUDA_PATH=$home CUDA_ROOT=$home PATH=$home/bin:$PATH
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-90}
export LD_LIBRARY_PATH=$home/lib64:${LD_LIBRARY_PATH:-}
export RUSTFLAGS="${RUSTFLAGS:-} -L native=$home/lib64"
exec cargo build --release --features cuda "$@"
