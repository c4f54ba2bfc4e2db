#!/bin/sh
# Measures, and puts what comes out into docs/benchmarks.md:
#
#   docs/benchmarks.sh [-q] [PART ...]
#
# The parts are those of the page: decode, step, cpu, peers, e2e; without any,
# all of them, but for gpu, layer and e2e-gpu, which need a GPU. -q is quick and
# less certain. peers, e2e, gpu and e2e-gpu need Python, with which
# cmd/leanbench/peers/setup.sh makes an environment of several GB in the user's
# cache folder. JSON, if set, names a folder for leanbench's reports.
#
# Nothing else should run on the machine meanwhile.
set -eu
cd "$(dirname "$0")/.."

quick= time=1s budget=5m
while getopts q option; do
	case $option in
	q) quick=-quick time=100ms budget=1m ;;
	*) echo "usage: $0 [-q] [PART ...]" >&2; exit 2 ;;
	esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || set -- decode step cpu peers e2e

# measure PART writes the figures of a part in Markdown.
measure() {
	json=${JSON:+-json=$JSON/$1.json}
	case $1 in
	decode) gobench . Decode ;;
	step) gobench ./examples/opt/model OPTStep ;;
	cpu) go -C cmd/leanbench run . cpu $quick $json ;;
	peers | e2e)
		python=$(cmd/leanbench/peers/setup.sh)
		go -C cmd/leanbench run . "$1" $quick $json -python "$python"
		;;
	gpu)
		python=$(cmd/leanbench/peers/setup.sh)
		go -C cmd/leanbench run . gpu -budget $budget $json -python "$python"
		;;
	e2e-gpu)
		python=$(cmd/leanbench/peers/setup.sh)
		go -C cmd/leanbench run . e2e -device gpu $quick $json -python "$python"
		;;
	layer) go -C cmd/leanbench run . gpu -layer $json ;;
	*) echo "$0: no part is called $1" >&2; exit 2 ;;
	esac
}

gobench() {
	# Not through a pipe, which would hide that it failed.
	go test -run '^$' -bench "$2" -benchmem -benchtime $time "$1" >"$raw" || { cat "$raw" >&2; exit 1; }
	printf '```text\n'
	grep -vE '^(PASS|ok )' "$raw"
	printf '```\n'
}

page=docs/benchmarks.md
figures=$(mktemp) raw=$(mktemp) new=$(mktemp)
trap 'rm -f "$figures" "$raw" "$new"' EXIT
case ${JSON:-/} in
/*) ;;
*) JSON=$PWD/$JSON ;; # leanbench runs in a folder of its own
esac
for part; do
	grep -q "^<!-- $part -->\$" $page || { echo "$0: no part is called $part" >&2; exit 2; }
	measure "$part" >"$figures"
	# What is between the part's marks gives way to the figures.
	awk -v begin="<!-- $part -->" -v end="<!-- end of $part -->" -v figures="$figures" '
		$0 == end { inside = 0 }
		!inside { print }
		$0 == begin { inside = 1; while ((getline line < figures) > 0) print line }
	' $page >"$new"
	cat "$new" >$page
done
