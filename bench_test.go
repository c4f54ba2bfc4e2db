package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// random is a tensor of N(0,1) numbers that repeat after a while: benchmarks
// need hundreds of megabytes of them.
func random(of tensor.Dtype, shape ...int) *tensor.Dense {
	rng := rand.New(rand.NewPCG(1, 2))
	numbers := make([]float64, 8191)
	for i := range numbers {
		numbers[i] = rng.NormFloat64()
	}
	x := tensor.New(tensor.Of(of), tensor.WithShape(shape...))
	switch m := x.Data().(type) {
	case []float32:
		fill(m, numbers, func(f float64) float32 { return float32(f) })
	case []la.F16:
		fill(m, numbers, half.FromFloat64)
	case []la.BF16:
		fill(m, numbers, half.BFromFloat64)
	}
	return x
}

func fill[T any](x []T, numbers []float64, convert func(float64) T) {
	for i := range min(len(x), len(numbers)) {
		x[i] = convert(numbers[i])
	}
	for n := len(numbers); n < len(x); n *= 2 {
		copy(x[n:], x[:n])
	}
}

// BenchmarkDecode is one step of decoding: one query of 12 heads of 64, over
// contexts of n tokens. MB/s is the keys and values that the step has to read.
//
//	default   a run of the graph of Default, on the tape machine
//	lean      a run of the graph of Attention, with K and V in float32
//	lean-f16  the same, in Float16
//	lean-bf16 the same, in BFloat16
//	attend    Attend on what lean has: the engine without the graph
func BenchmarkDecode(b *testing.B) {
	const heads, dim = 12, 64
	graphRun := func(build func(q, k, v *G.Node) (*G.Node, error)) func(*testing.B, *tensor.Dense, *tensor.Dense, *tensor.Dense) {
		return func(b *testing.B, q, k, v *tensor.Dense) {
			g := G.NewGraph()
			out, err := build(input(g, "q", q), input(g, "k", k), input(g, "v", v))
			if err != nil {
				b.Fatal(err)
			}
			var outV G.Value
			G.Read(out, &outV)
			vm := G.NewTapeMachine(g)
			defer vm.Close()
			for b.Loop() {
				if err := vm.RunAll(); err != nil {
					b.Fatal(err)
				}
				vm.Reset()
			}
		}
	}
	lean := graphRun(func(q, k, v *G.Node) (*G.Node, error) { return la.Attention(q, k, v) })
	for _, c := range []struct {
		name string
		kv   tensor.Dtype
		run  func(b *testing.B, q, k, v *tensor.Dense)
	}{
		{"default", tensor.Float32, graphRun(func(q, k, v *G.Node) (*G.Node, error) { return la.Default(q, k, v) })},
		{"lean", tensor.Float32, lean},
		{"lean-f16", la.Float16, lean},
		{"lean-bf16", la.BFloat16, lean},
		{"attend", tensor.Float32, func(b *testing.B, q, k, v *tensor.Dense) {
			a := la.Args{Q: q, K: k, V: v, Out: tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(q.Shape()...))}
			if err := la.Attend(a); err != nil { // its memory grows once
				b.Fatal(err)
			}
			for b.Loop() {
				if err := la.Attend(a); err != nil {
					b.Fatal(err)
				}
			}
		}},
	} {
		for _, n := range []int{128, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536} {
			b.Run(fmt.Sprintf("%s/h%dn%dd%d", c.name, heads, n, dim), func(b *testing.B) {
				q := random(tensor.Float32, 1, heads, 1, dim)
				k, v := random(c.kv, 1, heads, n, dim), random(c.kv, 1, heads, n, dim)
				b.SetBytes(int64(k.MemSize() + v.MemSize()))
				b.ReportAllocs()
				c.run(b, q, k, v)
			})
		}
	}
}

// BenchmarkScoreMods runs attention in float32 with what changes scores, decode and
// prompts, beside the same without.
func BenchmarkScoreMods(b *testing.B) {
	const heads, dim = 12, 64
	slopes := make([]float64, heads)
	for h := range slopes {
		slopes[h] = math.Exp2(-8 * float64(h+1) / heads)
	}
	for _, c := range []struct {
		name    string
		opts    []la.Option
		hasBias bool
	}{
		{name: "plain"},
		{name: "alibi", opts: []la.Option{la.WithALiBi(slopes)}},
		{name: "bias", hasBias: true},
		{name: "cap", opts: []la.Option{la.WithSoftCap(30)}},
	} {
		for _, n := range [][2]int{{1, 16384}, {1, 1024}, {512, 512}} {
			b.Run(fmt.Sprintf("%s/q%dn%d", c.name, n[0], n[1]), func(b *testing.B) {
				q := random(tensor.Float32, 1, heads, n[0], dim)
				a := la.Args{
					Q: q, K: random(tensor.Float32, 1, heads, n[1], dim), V: random(tensor.Float32, 1, heads, n[1], dim),
					Out: tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(q.Shape()...)),
				}
				if c.hasBias {
					a.Bias = random(tensor.Float32, 1, heads, n[0], n[1])
				}
				opts := append([]la.Option{la.WithCausal()}, c.opts...)
				b.ReportAllocs()
				for b.Loop() {
					if err := la.Attend(a, opts...); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
