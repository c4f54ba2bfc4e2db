#!/bin/sh
# Measures, and writes docs/benchmarks/*.json, docs/benchmarks.md and its pictures:
#
#   docs/benchmarks.sh [-q] [PART ...]
#
# Parts are decode, cpu, peers, e2e and paper-cpu; without any, all of these. gpu, layer,
# prefill, linear, prompts, batches, e2e-gpu, llama and paper-gpu need a GPU. -q is quick and less certain. peers, e2e, paper-cpu, and those
# need Python: cmd/leanbench/peers/setup.sh makes an environment of several GB in the
# user's cache folder.
#
# Nothing else should run on the machine meanwhile.
set -eu
cd "$(dirname "$0")/.."

quick= time=1s
while getopts q option; do
	case $option in
	q) quick=-quick time=100ms ;;
	*) echo "usage: $0 [-q] [PART ...]" >&2; exit 2 ;;
	esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || set -- decode cpu peers e2e paper-cpu

json=$PWD/docs/benchmarks raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
go -C cmd/leanbench build -o "$raw/leanbench" . # built, it knows its commit
leanbench() { "$raw/leanbench" "$@"; }
python() { cmd/leanbench/peers/setup.sh; }

# gobench FILE CONTENDER BENCHMARK PACKAGE: the second says which part of a name is the contender.
gobench() {
	line="go test -run '^\$' -bench $3 -benchmem $4"
	# Not through a pipe, which would hide that it failed.
	go test -run '^$' -bench "$3" -benchmem -benchtime $time "$4" >"$raw/bench" || { cat "$raw/bench" >&2; exit 1; }
	leanbench gobench -from "$raw/bench" -json "$json/$1" -contender "$2" -command "$line"
}

for part; do
	case $part in
	decode) gobench decode.json 1 Decode . ;;
	cpu) leanbench cpu $quick -json "$json/cpu.json" ;;
	peers) leanbench peers $quick -json "$json/peers.json" -python "$(python)" ;;
	e2e) leanbench e2e $quick -json "$json/e2e.json" -python "$(python)" ;;
	gpu)
		leanbench gpu -full -json "$raw/gpu.json" -python "$(python)"
		leanbench gputables -from "$raw/gpu.json" -json "$json/gpu.json"
		;;
	layer) leanbench gpu -layer -json "$json/gpu-layer.json" ;;
	prefill) leanbench gpu -prefill -json "$json/gpu-prefill.json" -python "$(python)" ;;
	linear) leanbench gpu -linear -json "$json/gpu-linear.json" -python "$(python)" ;;
	batches) leanbench e2e -device gpu $quick -shapes 1.3b,6.7b -batches 32,64,128 -long "" -json "$json/e2e-batches.json" -python "$(python)" ;;
	e2e-gpu) leanbench e2e -device gpu $quick -json "$json/e2e-gpu.json" -python "$(python)" ;;
	llama) leanbench e2e -device gpu $quick -shapes llama-3.2-1b,llama-3-8b -json "$json/e2e-llama.json" -python "$(python)" ;;
	paper-cpu) leanbench paper $quick -device cpu -json "$json/paper-cpu.json" -python "$(python)" ;;
	paper-gpu) leanbench paper $quick -device gpu -json "$json/paper-gpu.json" -python "$(python)" ;;
	prompts) leanbench e2e -device gpu $quick -shapes 1.3b,6.7b -prompts 1x2048,1x8192,16x512 -json "$json/e2e-prompts.json" -python "$(python)" ;;
	*) echo "$0: no part is called $part" >&2; exit 2 ;;
	esac
done
leanbench report "$json"/*.json
