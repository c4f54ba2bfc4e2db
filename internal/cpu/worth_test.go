package cpu

import (
	"math"
	"testing"
)

// TestThreadsFor says how many threads and shares of attention what is worth, of 2, 8, 16 and 32.
func TestThreadsFor(t *testing.T) {
	defer ForceTier(BestTier().String())()
	if InUse() == TierGo {
		t.Skip("the numbers are those of assembly")
	}
	attention := func(heads, keys, dim, size int) float64 {
		n := 2 * float64(heads) * float64(keys) * float64(dim)
		return WorkOf(n*float64(size), n)
	}
	linear := func(rows, in, out, size int) float64 {
		n := float64(in) * float64(out)
		return WorkOf(n*float64(size), n*float64(rows))
	}
	norm := func(rows, n int) float64 { return float64(rows) * float64(n) * VectorNanos }
	stored := func(rows, n int) float64 { return float64(rows) * float64(n) * VectorNanos }
	for _, c := range []struct {
		name    string
		work    float64
		threads [4]int
		shares  [4]int
	}{
		{"a norm of 768 elements", norm(1, 768), [4]int{1, 1, 1, 1}, [4]int{1, 1, 1, 1}},
		{"a norm of 16 rows of 2048", norm(16, 2048), [4]int{2, 7, 7, 7}, [4]int{1, 1, 1, 1}},
		{"a norm of 515 rows of 777", norm(515, 777), [4]int{2, 8, 16, 25}, [4]int{1, 1, 1, 1}},
		{"an activation of 16 rows of 8192", 16 * 8192 * ElementNanos, [4]int{2, 8, 16, 29}, [4]int{2, 1, 1, 1}},
		{"keys and values of a token, 2048 each", stored(1, 4096), [4]int{1, 1, 1, 1}, [4]int{1, 1, 1, 1}},
		{"keys and values of 500 tokens, 2048 each", stored(500, 4096), [4]int{2, 8, 16, 32}, [4]int{4, 2, 1, 1}},
		{"12 heads x 16 x 64, float32", attention(12, 16, 64, 4), [4]int{2, 4, 4, 4}, [4]int{1, 1, 1, 1}},
		{"12 heads x 128 x 64, float32", attention(12, 128, 64, 4), [4]int{2, 8, 12, 12}, [4]int{1, 1, 1, 1}},
		{"12 heads x 1024 x 64, float32", attention(12, 1024, 64, 4), [4]int{2, 8, 16, 32}, [4]int{3, 1, 1, 1}},
		{"12 heads x 1024 x 64, float16", attention(12, 1024, 64, 2), [4]int{2, 8, 16, 25}, [4]int{1, 1, 1, 1}},
		{"32 heads x 8192 x 128, float16", attention(32, 8192, 128, 2), [4]int{2, 8, 16, 32}, [4]int{4, 4, 4, 4}},
		{"a layer of 768 x 768, float16", linear(1, 768, 768, 2), [4]int{2, 8, 15, 15}, [4]int{1, 1, 1, 1}},
		{"a layer of 2048 x 2048, float16", linear(1, 2048, 2048, 2), [4]int{2, 8, 16, 32}, [4]int{4, 1, 1, 1}},
		{"a layer of 64 x 64, float32", linear(1, 64, 64, 4), [4]int{1, 1, 1, 1}, [4]int{1, 1, 1, 1}},
	} {
		for i, procs := range []int{2, 8, 16, 32} {
			n := threadsOf(c.work, procs)
			if n != c.threads[i] {
				t.Errorf("%s: %d threads of %d, want %d", c.name, n, procs, c.threads[i])
			}
			if s := SharesFor(c.work, n, ShareNanos); s != c.shares[i] {
				t.Errorf("%s: %d shares a thread of %d, want %d", c.name, s, procs, c.shares[i])
			}
		}
	}
	if n := threadsOf(math.Inf(1), 1); n != 1 {
		t.Errorf("%d threads of one", n)
	}
	for work := 1.0; work < 1e9; work *= 1.1 { // more work, or more threads, are never worth fewer
		for procs := 1; procs <= 64; procs++ {
			n := threadsOf(work, procs)
			if n < 1 || n > procs || n > threadsOf(1.1*work, procs) || n > threadsOf(work, procs+1) {
				t.Fatalf("%v ns: %d threads of %d", work, n, procs)
			}
		}
	}
}
