package gpu

import (
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/lean"
)

// The structs that kernels read (kernels/work.cuh, kernels/append.cuh), field by
// field.

// sequence is struct Seq.
type sequence struct {
	row, queries, keys int32
	pages              int32 // its first entry of the block table; the page itself where pages hold whole sequences
}

// work is struct Work: a thread block's range of LeanTiles.
type work struct {
	seq, head, block, tile int32 // the first: its output tile, and its place there
	tiles                  int32
	host, sharers          int32 // of the first output tile
	guests                 int32 // how many have a part of the last output tile, if this block hosts it
	first                  sequence
}

// params is struct LaunchParams.
type params struct {
	keyMap, valueMap cuda.TensorMap
	paramsBody
	_ [40]byte // up to a multiple of 64, the alignment of maps
}

// paramsBody is struct Params.
type paramsBody struct {
	keys, values, query, out, lse                            uint64 // addresses
	work, seqs, pages, blind, partials, counters             uint64
	queryRow, queryHead, outRow, outHead, lseRow, lseHead    int64
	pageRows, headRows, pageTokens                           int32
	heads, group                                             int32
	tileShift, box, rows, warps, slots, rooms, parts, causal int32
	queryType, outType, early, streamed                      int32
	scale, perGroup                                          float32
	_                                                        [4]byte
}

// appendParams is struct AppendParams.
type appendParams struct {
	newKeys, newValues, keys, values, slots uint64
	headRows, heads, dim, newType, dtype    int32
	_                                       [4]byte
}

// packWorks writes the ranges of a plan that was cut, one for each thread block;
// seqs are its sequences.
func packWorks(p *lean.Plan, seqs []sequence, works []work) {
	clear(works)
	for b := range p.Workers() {
		it := p.Work(b)
		k, ok := it.Next()
		if !ok {
			continue
		}
		begin, end := p.Range(b)
		host, _, sharers := p.Sharers(k)
		works[b] = work{
			seq: int32(k.Seq), head: int32(k.Head), block: int32(k.Block), tile: int32(k.Begin),
			tiles: int32(end - begin), host: int32(host), sharers: int32(sharers), first: seqs[k.Seq],
		}
		if !k.Host() { // then it is the last output tile of its host
			works[host].guests = int32(sharers)
		}
	}
}
