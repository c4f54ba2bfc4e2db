package figure

import (
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestBalance: what the paper says of its algorithm 1, and of its partial outputs (section D.3).
func TestBalance(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		lengths := rapid.SliceOfN(rapid.OneOf(rapid.Int64Range(0, 9), rapid.Int64Range(0, 1<<40)), 0, 60).Draw(t, "lengths")
		if rapid.Bool().Draw(t, "short") {
			for i := range lengths {
				lengths[i] %= 50
			}
		}
		workers := rapid.IntRange(1, 50).Draw(t, "workers")
		alpha, beta := rapid.Int64Range(0, 100).Draw(t, "alpha"), rapid.Int64Range(1, 5).Draw(t, "beta")
		cost := func(keys int64) int64 { return alpha + beta*keys }
		most, chunks := balance(lengths, workers, cost)

		var all int64
		for _, n := range lengths {
			all += n
		}
		if n := int64(workers); all > 0 && (most*n < all || (most-1)*n >= all) {
			t.Fatalf("chunks of at most %d, of %d for %d workers", most, all, workers)
		}
		// From the longest to the shortest, each to a worker that has least so far.
		costs, last, largest := make([]int64, workers), most, int64(0)
		for i, c := range chunks {
			n := c.end - c.begin
			if n < 1 || n > last {
				t.Fatalf("chunk %d has %d keys behind one of %d", i, n, last)
			}
			if last = n; costs[c.worker] != slices.Min(costs) {
				t.Fatalf("chunk %d is for worker %d, and costs are %v", i, c.worker, costs)
			}
			costs[c.worker] += cost(n)
			largest = max(largest, cost(n))
		}
		if most, least := slices.Max(costs), slices.Min(costs); most-least > largest {
			t.Fatalf("costs from %d to %d, and no chunk has more than %d", least, most, largest)
		}
		// Every query tile has its keys once, in chunks that all but one have the most.
		of := make([][]chunk, len(lengths))
		for _, c := range chunks {
			of[c.tile] = append(of[c.tile], c)
		}
		partials := 0
		for i, parts := range of {
			slices.SortFunc(parts, func(a, b chunk) int { return int(a.begin/most - b.begin/most) })
			at := int64(0)
			for j, c := range parts {
				if c.begin != at || c.end-c.begin != most && j < len(parts)-1 {
					t.Fatalf("query tile %d of %d keys: %+v", i, lengths[i], parts)
				}
				at = c.end
			}
			if at != lengths[i] {
				t.Fatalf("query tile %d of %d keys: %+v", i, lengths[i], parts)
			}
			if len(parts) > 1 {
				partials += len(parts)
			}
		}
		if partials > 2*workers {
			t.Fatalf("%d partials of %d workers", partials, workers)
		}
		if _, again := balance(lengths, workers, cost); !reflect.DeepEqual(again, chunks) {
			t.Fatal("the second plan differs")
		}
	})
}

// TestBalanceExample: one long sequence, two of middle length and a short one, worked out by hand.
func TestBalanceExample(t *testing.T) {
	most, got := balance([]int64{9, 4, 1, 4}, 4, func(keys int64) int64 { return keys })
	want := []chunk{{0, 0, 5, 0}, {0, 5, 9, 1}, {1, 0, 4, 2}, {3, 0, 4, 3}, {2, 0, 1, 1}}
	if most != 5 || !reflect.DeepEqual(got, want) {
		t.Errorf("at most %d, %+v, want %+v", most, got, want)
	}
}
