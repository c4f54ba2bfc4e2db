package figure

import (
	"cmp"
	"container/heap"
	"slices"
)

// chunk is a range of the keys of a query tile, assigned to a worker.
type chunk struct {
	tile       int   // number of the query tile
	begin, end int64 // range of keys, in the unit of balance's lengths
	worker     int
}

// balance computes FlashInfer's balanced schedule (Ye et al., "FlashInfer", algorithm 1) for query tiles with
// the given numbers of keys. No chunk has more than
//
//	most = ceil(sum of all lengths / workers)
//
// keys. The chunks are assigned from the longest to the shortest, each to the worker with the least cost so
// far, and returned in this order. cost returns the cost of a chunk, alpha*T_q + beta*l in the paper. Ties go
// to the first chunk and to the first worker, so the result depends on the lengths only.
func balance(lengths []int64, workers int, cost func(keys int64) int64) (most int64, chunks []chunk) {
	var all int64
	for _, n := range lengths {
		all += n
	}
	if all == 0 {
		return 0, nil
	}
	most = (all-1)/int64(workers) + 1
	for i, n := range lengths {
		for at := int64(0); at < n; at += most {
			chunks = append(chunks, chunk{tile: i, begin: at, end: min(at+most, n)})
		}
	}
	slices.SortStableFunc(chunks, func(a, b chunk) int { return cmp.Compare(b.end-b.begin, a.end-a.begin) })
	queue := make(queue, workers) // ascending worker numbers and equal costs form a heap
	for w := range queue {
		queue[w].worker = w
	}
	for i := range chunks {
		c, least := &chunks[i], &queue[0]
		c.worker = least.worker
		least.cost += cost(c.end - c.begin)
		heap.Fix(&queue, 0)
	}
	return most, chunks
}

// queue is a heap of workers, ordered by cost and then by number.
type queue []struct {
	cost   int64
	worker int
}

func (q queue) Len() int      { return len(q) }
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q queue) Less(i, j int) bool {
	return cmp.Or(cmp.Compare(q[i].cost, q[j].cost), cmp.Compare(q[i].worker, q[j].worker)) < 0
}

// Push and Pop are never called, because the set of workers is fixed.
func (q queue) Push(any) { panic("unreachable") }
func (q queue) Pop() any { panic("unreachable") }
