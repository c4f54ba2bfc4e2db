package leanattention_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/rewrite"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
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
	case []float64:
		fill(m, numbers, func(f float64) float64 { return f })
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
			out, err := build(graphtest.Input(g, "q", q), graphtest.Input(g, "k", k), graphtest.Input(g, "v", v))
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

// BenchmarkScoreMods is attention with what changes scores, or hides keys, beside the same without, in turn: a
// query of each head and of 8 at the end of a text, with keys of all types in the cache and in memory, and a
// prompt. It reports how many times as long each takes, the median of the ratios of the turns.
func BenchmarkScoreMods(b *testing.B) {
	const heads, dim = 12, 64
	slopes := make([]float64, heads)
	for h := range slopes {
		slopes[h] = math.Exp2(-8 * float64(h+1) / heads)
	}
	for _, kv := range []tensor.Dtype{tensor.Float64, tensor.Float32, la.Float16, la.BFloat16} {
		for _, n := range [][2]int{{1, 1024}, {1, 16384}, {8, 1024}, {8, 16384}, {512, 512}} {
			b.Run(fmt.Sprintf("%v/q%dn%d", kv, n[0], n[1]), func(b *testing.B) {
				dt := tensor.Float32
				if kv == tensor.Float64 {
					dt = kv
				}
				q := random(dt, 1, heads, n[0], dim)
				plain := la.Args{
					Q: q, K: random(kv, 1, heads, n[1], dim), V: random(kv, 1, heads, n[1], dim),
					Out: tensor.New(tensor.Of(dt), tensor.WithShape(q.Shape()...)),
				}
				biased, sinks, tree := plain, plain, plain
				biased.Bias, sinks.Sinks = random(dt, 1, heads, n[0], n[1]), random(dt, heads)
				tree.Parents = [][]int{make([]int, n[0])}
				for i := range n[0] { // a binary tree
					tree.Parents[0][i] = (i+1)/2 - 1
				}
				type change struct {
					name string
					args la.Args
					opts []la.Option
				}
				changes := []change{
					{"plain", plain, nil}, {"again", plain, nil}, {"alibi", plain, []la.Option{la.WithALiBi(slopes)}}, {"bias", biased, nil},
					{"cap", plain, []la.Option{la.WithSoftCap(30)}}, {"sinks", sinks, nil}, {"tree", tree, nil},
				}
				if n[0] > 64 {
					changes = changes[:len(changes)-1]
				}
				times := make([][]float64, len(changes)) // of each, the ratios
				for b.Loop() {
					least := 0.0
					for i, c := range changes {
						opts := append([]la.Option{la.WithCausal()}, c.opts...)
						runs := max(1, 1<<22/(n[0]*n[1]*heads))
						begin := time.Now()
						for range runs {
							if err := la.Attend(c.args, opts...); err != nil {
								b.Fatal(err)
							}
						}
						took := time.Since(begin).Seconds()
						if i == 0 {
							least = took
						}
						times[i] = append(times[i], took/least)
					}
				}
				for i, c := range changes[1:] {
					slices.Sort(times[i+1])
					b.ReportMetric(times[i+1][len(times[i+1])/2], "x/"+c.name)
				}
				b.ReportMetric(0, "ns/op")
			})
		}
	}
}

// BenchmarkWindow is a query of each head that sees the last 1024 of 65536 keys, beside one that has no others, in turn:
// how many times as long it takes, the median of the ratios of the turns.
func BenchmarkWindow(b *testing.B) {
	const heads, kvHeads, dim, window = 32, 8, 128, 1024
	for _, kv := range []tensor.Dtype{tensor.Float32, la.Float16} {
		b.Run(fmt.Sprint(kv), func(b *testing.B) {
			q := random(tensor.Float32, 1, heads, 1, dim)
			args := func(keys int) la.Args {
				return la.Args{
					Q: q, K: random(kv, 1, kvHeads, keys, dim), V: random(kv, 1, kvHeads, keys, dim),
					Out: tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(q.Shape()...)),
				}
			}
			calls := [2]la.Args{args(window), args(64 * window)}
			var ratios []float64
			for b.Loop() {
				var took [2]time.Duration
				for i, a := range calls {
					begin := time.Now()
					for range 50 {
						if err := la.Attend(a, la.WithCausal(), la.WithWindow(window)); err != nil {
							b.Fatal(err)
						}
					}
					took[i] = time.Since(begin)
				}
				ratios = append(ratios, took[1].Seconds()/took[0].Seconds())
			}
			slices.Sort(ratios)
			b.ReportMetric(ratios[len(ratios)/2], "x/window")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkFuse runs graphs as they were written and as Fuse made them, and
// measures Fuse itself on a graph of 48 layers.
func BenchmarkFuse(b *testing.B) {
	for _, c := range []struct {
		name          string
		queries, keys int
		causal        bool
	}{
		{"decode 1024", 1, 1024, false},
		{"prefill 128", 128, 128, true},
		{"prefill 512", 512, 512, true},
	} {
		w := graphtest.NewWriter(b, rand.New(rand.NewPCG(1, 2)), tensor.Float32)
		x := w.Stack(1, c.queries, c.keys, c.causal)
		f, err := rewrite.Fuse(x)
		if err != nil || len(f.Matches) != 1 {
			b.Fatal(f, err)
		}
		for name, g := range map[string]*G.ExprGraph{"written": w.G, "fused": f.Graph} {
			b.Run(c.name+"/"+name, func(b *testing.B) {
				vm := G.NewTapeMachine(g)
				defer vm.Close()
				b.ReportAllocs()
				for b.Loop() {
					graphtest.Again(b, vm)
				}
			})
		}
	}
	w := graphtest.NewWriter(b, rand.New(rand.NewPCG(1, 2)), tensor.Float32)
	x := w.Stack(48, 8, 8, true)
	b.Run("rewrite.Fuse", func(b *testing.B) {
		for b.Loop() {
			if f, err := rewrite.Fuse(x); err != nil || len(f.Matches) != 48 {
				b.Fatal(f, err)
			}
		}
	})
}
