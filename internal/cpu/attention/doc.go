// Package attention runs exact attention over paged keys and values on the CPU.
//
// For query head h of KV head g = h/(Heads/KVHeads), query position i of a sequence and the keys
// j that i may see:
//
//	s_j = Scale * q_i . k_j
//	out_i = sum_j e^(s_j) v_j / sum_j e^(s_j)
//	lse_i = ln sum_j e^(s_j)
//
// and out_i = 0, lse_i = -Inf where there is no such j.
//
// A Plan is made once for a step: it lays out the LeanTiles of all sequences and cuts them into
// workers' ranges (package lean). Run carries a plan out for one layer: each worker walks its range
// with a tile kernel, writes the output tiles that it holds whole, and leaves a partial state of the
// others; whoever is the last to leave one merges them in worker order. Nobody waits for anybody, and
// the result depends on nothing but the data, the plan and the kernel: it is the same, bit for bit, on
// every run. The number of threads does not enter it; the number of logical workers does.
//
// The rows of an output tile are packed: all query heads of a KV head, for a block of query positions,
// attend together, so keys and values are read once for the whole group.
//
// Scores are kept in base 4 (Scale*log4(e) is folded into q) and accumulated in the type of the query;
// keys and values in any other type are widened row by row.
package attention
