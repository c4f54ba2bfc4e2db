package choose

import (
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"

	"pgregory.net/rapid"
)

// TestKept: the tokens that can be chosen are a prefix of the sorted vocabulary, in the order of ids, for any earlier
// use of the same Memory. u finds each token by the sum of weights before the token.
func TestKept(t *testing.T) {
	var m Memory
	rapid.Check(t, func(t *rapid.T) {
		logit := rapid.OneOf(rapid.Float32Range(-5, 5), rapid.SampledFrom([]float32{0, 1, 1, -1e30, 3e38, -3e38, float32(math.Inf(-1))}))
		logits := rapid.SliceOfN(logit, 1, 40).Draw(t, "logits")
		temperature := rapid.SampledFrom([]float64{1e-300, 1e-9, 0.3, 1, 2, 1e9}).Draw(t, "temperature")
		topK := rapid.IntRange(-1, 45).Draw(t, "topK")
		topP := rapid.SampledFrom([]float64{-1, 0, 1e-12, 0.1, 0.5, 0.9, 1, 2}).Draw(t, "topP")
		u := rapid.Float64Range(0, math.Nextafter(1, 0)).Draw(t, "u")
		most := slices.Max(logits)
		got := m.Token(logits, temperature, topK, topP, u)
		if math.IsInf(float64(most), -1) {
			if got != -1 {
				t.Fatalf("token %d of nothing", got)
			}
			return
		}
		order := make([]int, len(logits))
		weights := make([]float64, len(logits))
		for i, x := range logits {
			order[i] = i
			if weights[i] = math.Exp((float64(x) - float64(most)) / temperature); !(weights[i] >= leastWeight) {
				weights[i] = 0
			}
			if x == most {
				weights[i] = 1
			}
		}
		sort.SliceStable(order, func(a, b int) bool { return logits[order[a]] > logits[order[b]] })
		if topK > 0 {
			order = order[:min(topK, len(order))]
		}
		total, sum := 0.0, 0.0
		for _, i := range order {
			total += weights[i]
		}
		for n, i := range order {
			if sum += weights[i]; topP > 0 && topP < 1 && sum >= topP*total*(1-1e-12) {
				order = order[:n+1]
				break
			}
		}
		if !slices.Contains(order, got) || weights[got] == 0 {
			// Rounding may move topP's border by one token.
			t.Fatalf("token %d, and %v are kept", got, order)
		}
		total, sum = 0, 0
		for _, i := range order {
			total += weights[i]
			if i < got {
				sum += weights[i]
			}
		}
		if slack := 1e-9 * total; u*total < sum-slack || u*total > sum+weights[got]+slack {
			t.Fatalf("u %v: token %d has [%v, %v] of %v", u, got, sum, sum+weights[got], total)
		}
	})
}

func TestLargest(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, c := range []struct {
		x    []float32
		want int
	}{
		{nil, -1}, {[]float32{nan}, -1}, {[]float32{1, inf}, -1}, {[]float32{-inf, -inf}, -1}, {[]float32{5, 1, 1, 1, 1, nan}, -1},
		{[]float32{-inf, -3, -3}, 1}, {[]float32{1, 3, 3}, 1}, {[]float32{0, 0, 0, 0, 0, 0, 0, 0, 1}, 8}, {[]float32{9, 0, 0, 0, 0, 0, 0, 0, 1}, 0},
	} {
		if got := Largest(c.x); got != c.want {
			t.Errorf("%v: %d, want %d", c.x, got, c.want)
		}
	}
}

// TestOdd: settings that are NaN or infinite, or at the end of their range, have one meaning.
func TestOdd(t *testing.T) {
	inf, nan, least := math.Inf(1), math.NaN(), float32(math.Inf(-1))
	var m Memory
	for _, c := range []struct {
		x           []float32
		temperature float64
		topK        int
		topP, u     float64
		want        int
	}{
		{[]float32{1, 3}, nan, 0, 1, 0.5, -1}, {[]float32{1, 3}, nan, 1, 0.5, 0.5, -1},
		{[]float32{1, 3}, -1, 0, 1, 0.5, -1}, {[]float32{1, 3}, -inf, 0, 1, 0.5, -1}, {[]float32{1, 3}, -math.SmallestNonzeroFloat64, 0, 1, 0.5, -1},
		{[]float32{1, 3}, 0, 0, 1, 0, 1}, {[]float32{1, 3}, math.Copysign(0, -1), 0, 1, 0, 1},
		{[]float32{least, 1, 3e38}, inf, 0, 1, 0, 1}, {[]float32{least, 1, 3e38}, inf, 0, 1, 0.49, 1}, {[]float32{least, 1, 3e38}, inf, 0, 1, 0.51, 2},
		{[]float32{1, 2, 3}, inf, 2, 1, 0, 1}, {[]float32{1, 2, 3}, inf, 2, 1, 0.99, 2},
		{[]float32{1, 1}, 1, 0, nan, 0.9, 1}, {[]float32{1, 1}, 1, -5, -1, 0.9, 1},
		{[]float32{1, 1}, 1, 0, 1, 0.5, 1}, {[]float32{1, 1}, 1, 0, 1, math.Nextafter(0.5, 0), 0}, // the sum is greater than u
		{[]float32{1, 1}, 1, 0, 0.5, 0.99, 0}, {[]float32{1, 1}, 1, 0, 0.500001, 0.99, 1}, // the fewest that sum to topP
		{[]float32{0, -30 * math.Ln2}, 1, 0, 1, 1 - 0x1p-40, 1}, {[]float32{0, -43.9 * math.Ln2}, 1, 0, 1, math.Nextafter(1, 0), 1},
		{[]float32{0, -44.1 * math.Ln2}, 1, 0, 1, math.Nextafter(1, 0), 0}, // less than 2^-44 is never chosen
		{[]float32{3, 3, 1}, math.SmallestNonzeroFloat64, 0, 1, 0.6, 1}, {[]float32{math.MaxFloat32, -math.MaxFloat32}, math.MaxFloat64, 0, 1, 0.6, 1},
		{[]float32{least, least}, 1, 0, 1, 0.5, -1}, {nil, 1, 0, 1, 0.5, -1}, {nil, 0, 0, 1, 0.5, -1},
	} {
		if got := m.Token(c.x, c.temperature, c.topK, c.topP, c.u); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

// TestLast: the largest u chooses the last kept token, also if rounding leaves a part of u.
func TestLast(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var m Memory
	for range 2000 {
		logits, last := make([]float32, 30), 0
		for i := range logits {
			logits[i] = float32(10 * rng.Float64())
		}
		sorted := slices.Sorted(slices.Values(logits))
		for i, x := range logits {
			if x >= sorted[len(sorted)-20] {
				last = i
			}
		}
		if got := m.Token(logits, 1, 20, 1, math.Nextafter(1, 0)); got != last {
			t.Fatalf("%v: token %d, want %d", logits, got, last)
		}
	}
}
