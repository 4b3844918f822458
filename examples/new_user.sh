#!/bin/sh
# The path of a new user, from a clone to a file for another runtime:
#
#     git clone … && cd rankwise && make demo && . .venv/bin/activate && sh examples/new_user.sh
#
# DEMO=no leaves the demo out. The first argument is the folder to write into.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-new-user-out}
mkdir -p "$work"

if [ "${DEMO:-yes}" = yes ]; then
  rankwise demo --out "$work/demo"
fi

# A network of your own: a factory in a file, and its trained weights.
python "$here/my_network.py" "$work/weights.safetensors"
rankwise inspect "$here/my_network.py:network" --weights "$work/weights.safetensors" --input 1,1,8,8

# The smallest network that loses at most 2 points of a metric of your own.
rankwise compress "$here/my_network.py:network" --weights "$work/weights.safetensors" --input 1,1,8,8 \
  --metric "$here/my_network.py:metric" --max-drop 2 --out "$work/small" --force

# The report: one file, opens in any browser without a network.
test -s "$work/small/report.html"

# A file for ONNX Runtime; it is read back and compared before the command says done.
rankwise export "$work/small" --to onnx --input 1,1,8,8 --base "$here/my_network.py:network"
