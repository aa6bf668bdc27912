#!/bin/bash
# make_kit.sh KIT.tar.xz: what SGLang 0.5.15 needs beside an image with Python 3.12, torch 2.11 for CUDA 13, triton 3.6
# and the usual scientific packages, for a GPU machine without a network. About 45 MB; takes a minute and a half.
# FlashAttention-3 (565 MB) is left out: the server attends with Triton, for DeepSeek-V3.2 with FlashMLA.
set -euo pipefail
kit=$(realpath -m "${1:?name of the kit}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

platforms=(--platform manylinux1_x86_64 --platform manylinux2014_x86_64)
for minor in 5 17 24 26 27 28 31 34 35 39; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
packages=(
  sglang==0.5.15 sglang-kernel==0.4.4 sgl-deep-gemm==0.1.4 flashinfer_python==0.6.12 cuda-tile transformers==5.12.1 tokenizers==0.22.2
  apache-tvm-ffi==0.1.11 compressed-tensors==0.17.0
  pydantic==2.12.5 pydantic-core==2.41.5 annotated-types typing-inspection
  fastapi==0.135.1 starlette==0.52.1 uvicorn python-multipart msgspec orjson pyzmq setproctitle pybase64
  openai==2.6.1 openai-harmony==0.0.4 anthropic distro sniffio jiter docstring-parser
  partial_json_parser interegular gguf dill loguru jsonschema attrs referencing rpds-py jsonschema-specifications
)
python3 -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: -d "$work/wheels" \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" "${packages[@]}"

python3 - "$work" <<'PY'
import pathlib, sys, zipfile

work = pathlib.Path(sys.argv[1])
left_out = ("sgl_kernel/flash_ops", "sgl_kernel/sm100/", "flashinfer/data/cutlass/")
for wheel in work.glob("wheels/*.whl"):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(work / "site", [n for n in archive.namelist() if not n.startswith(left_out)])
PY
mkdir -p "$(dirname "$kit")"
tar -C "$work/site" -cf - . | xz -T0 -6 > "$kit"
ls -l "$kit"
