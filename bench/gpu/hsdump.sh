#!/bin/bash
# hsdump.sh KIT.tar.xz OUT PART...: measure hsdump on the GPU of this machine. Run it from the checkout's root.
#   PART: correct  states of random weights against Transformers            (3 min the first time)
#         sparse   the same for DeepSeek-V3.2, with its indexer             (3 min the first time)
#         tensor   the same for two ranks on two GPUs, all-reduce fused and not; one rank on one GPU
#         disk     dump to a disk, beside the disk's own bandwidth           (3 min)
#         active    dump to memory alone, a minute, with a reader            (3 min)
#         ratios   unpatched, inactive, active to memory, naive, built-in    (9 min, or 7 with caches)
# OUT gets the logs and caches.tar.xz, the compiled kernels: lay it beside the kit and the next start takes a third.
# LIMIT (seconds, default 570) bounds the whole run; what does not fit any more is left out, and said.
set -euo pipefail
kit=$(realpath "${1:?kit}") out=$(realpath -m "${2:?folder for results}")
shift 2
here=$(cd "$(dirname "$0")" && pwd)
venv=${VENV:-/tmp/hsdump-engine}
began=$(date +%s)
mkdir -p "$out"

if [ ! -e "$venv/ready" ]; then
  rm -rf "$venv"
  python3 -m venv --without-pip "$venv"
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  base=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  tar -xJf "$kit" -C "$site"
  cp "$here/stand_ins.py" "$site/"
  printf 'import stand_ins\n%s\n' "$base" > "$site/image.pth"   # the image's torch, after the kit's packages
  caches=$(dirname "$kit")/caches.tar.xz
  if [ -e "$caches" ]; then tar -xJf "$caches" -C "$HOME"; fi
  touch "$venv/ready"
fi
echo "engine ready after $(($(date +%s) - began)) s"
status=0
"$venv/bin/python" -u -m bench.gpu.hsdump --out "$out" --limit "${LIMIT:-570}" --began "$began" "$@" || status=$?
for folder in .cache/tvm-ffi .cache/flashinfer .triton; do
  if [ -d "$HOME/$folder" ]; then echo "$folder"; fi
done | tar -C "$HOME" -cf - -T - | xz -T0 -3 > "$out/caches.tar.xz"
ls -l "$out/caches.tar.xz"
exit $status
