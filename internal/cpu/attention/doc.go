// Package attention computes exact attention over paged keys and values on the CPU.
//
// For query head h of KV head g = h/(Heads/KVHeads), query position i of a sequence and the keys j that are visible to
// i:
//
//	s_j = Scale * q_i . k_j
//	out_i = sum_j e^(s_j) v_j / sum_j e^(s_j)
//	lse_i = ln sum_j e^(s_j)
//
// If no key is visible, out_i = 0 and lse_i = -Inf.
//
// A Plan is made once for a step: it lays out the LeanTiles of all sequences and cuts them into workers' ranges
// (package lean). Run computes one layer by a plan. Each worker walks its range with a tile kernel, writes the output
// tiles that are whole in its range, and stores a partial state of every other output tile. The last worker to store a
// partial of an output tile merges the partials in worker order, so no worker waits. The result depends only on the
// data, the plan and the kernel: it is the same, bit for bit, on every run. It depends on the number of logical
// workers, and not on the number of threads.
//
// Rows of an output tile are packed: all query heads of a KV head attend together, for a block of query positions, so
// keys and values are read once for the whole group.
//
// Scores are of base 4 (Scale*log4(e) is folded into q). They are accumulated in the type of the query. Keys and values
// of another type are widened row by row.
package attention
