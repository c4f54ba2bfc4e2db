#!/bin/sh
# Makes a Python virtual environment with the programs that LeanAttention is
# measured against, and prints the path of its python:
#
#   peers/setup.sh [-d FOLDER]
#
# FOLDER is by default leanattention/peers in the user's cache folder. What is
# there already is used again. PYTHON names the python to begin with (3.10 or
# newer). PyPI's PyTorch for Linux comes with CUDA, 5 GB of it; pip takes the
# build for CPUs alone, where it can be reached, with
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
set -eu

folder=${XDG_CACHE_HOME:-$HOME/.cache}/leanattention/peers
while getopts d: option; do
	case $option in
	d) folder=$OPTARG ;;
	*) echo "usage: $0 [-d FOLDER]" >&2; exit 2 ;;
	esac
done
shift $((OPTIND - 1))
[ $# -eq 0 ] || { echo "usage: $0 [-d FOLDER]" >&2; exit 2; }

requirements=$(cd "$(dirname "$0")" && pwd)/requirements.txt
python=$folder/bin/python
# The copy is the last thing to be written, so it tells that all is there.
if ! cmp -s "$requirements" "$folder/requirements.txt"; then
	"${PYTHON:-python3}" -m venv --clear "$folder" >&2
	"$python" -m pip install --disable-pip-version-check -r "$requirements" >&2
	cp "$requirements" "$folder/requirements.txt"
fi
echo "$python"
