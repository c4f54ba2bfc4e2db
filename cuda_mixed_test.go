//go:build cuda

package leanattention_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The tests below put attention among Gorgonia's own ops on its CUDA machine. See
// cuda_op_test.go for how they are run.

// cudagen has the machine load Gorgonia's own kernels, which its command cudagen
// makes of its sources. Here they come as files NAME.ptx from a directory.
func cudagen(t testing.TB) {
	t.Helper()
	if err := loadCudagen(); err != nil {
		t.Skipf("no kernels for Gorgonia's own ops: %v", err)
	}
}

var loadCudagen = sync.OnceValue(func() error {
	dir := os.Getenv("LEANATTENTION_CUDAGEN")
	if dir == "" {
		return errors.New("LEANATTENTION_CUDAGEN names no directory of PTX")
	}
	entry := regexp.MustCompile(`(?m)^\.visible \.entry (\w+)`)
	for _, module := range []string{"elembinop", "elemunaryop"} {
		ptx, err := os.ReadFile(filepath.Join(dir, module+".ptx"))
		if err != nil {
			return err
		}
		var names []string
		for _, m := range entry.FindAllSubmatch(ptx, -1) {
			names = append(names, string(m[1]))
		}
		G.AddToStdLib(module, string(ptx), names)
	}
	return nil
})

// matrix is rows by columns, for the reference in float64.
type matrix struct {
	rows, columns int
	x             []float64
}

func randomMatrix(rng *rand.Rand, rows, columns int, scale float64) matrix {
	m := matrix{rows, columns, make([]float64, rows*columns)}
	for i := range m.x {
		m.x[i] = float64(float32(scale * rng.NormFloat64()))
	}
	return m
}

func (m matrix) tensor() *tensor.Dense { return tensorOf(tensor.Float32, m.x, m.rows, m.columns) }

func (m matrix) times(b matrix) matrix {
	c := matrix{m.rows, b.columns, make([]float64, m.rows*b.columns)}
	for i := range m.rows {
		for k, a := range m.x[i*m.columns : (i+1)*m.columns] {
			for j, y := range b.x[k*b.columns : (k+1)*b.columns] {
				c.x[i*b.columns+j] += a * y
			}
		}
	}
	return c
}

func (m matrix) each(f func(i int) float64) matrix {
	c := matrix{m.rows, m.columns, make([]float64, len(m.x))}
	for i := range c.x {
		c.x[i] = f(i)
	}
	return c
}

// attention is causal attention of the rows of q, the last tokens of those of k
// and v, with heads of columns.
func (m matrix) attention(k, v matrix, heads, kvHeads int) matrix {
	d := m.columns / heads
	out := matrix{m.rows, m.columns, make([]float64, len(m.x))}
	for i := range m.rows {
		for h := range heads {
			at := h / (heads / kvHeads) * d
			n := k.rows - m.rows + i + 1
			p, sum, most := make([]float64, n), 0.0, math.Inf(-1)
			for j := range p {
				for c := range d {
					p[j] += m.x[i*m.columns+h*d+c] * k.x[j*k.columns+at+c] / math.Sqrt(float64(d))
				}
				most = max(most, p[j])
			}
			for j := range p {
				p[j] = math.Exp(p[j] - most)
				sum += p[j]
			}
			for j := range p {
				for c := range d {
					out.x[i*m.columns+h*d+c] += p[j] / sum * v.x[j*v.columns+at+c]
				}
			}
		}
	}
	return out
}

// nearTo reports the first element that is not that of the reference, but for
// rounding in float32 of a few hundred terms.
func nearTo(t testing.TB, what string, got G.Value, want matrix) {
	t.Helper()
	x := floats(t, got)
	if len(x) != len(want.x) {
		t.Fatalf("%s: %d elements, want %d", what, len(x), len(want.x))
	}
	for i := range x {
		if d := math.Abs(x[i] - want.x[i]); !(d <= 2e-4*(1+math.Abs(want.x[i]))) {
			t.Fatalf("%s: element %d is %v, want %v", what, i, x[i], want.x[i])
		}
	}
}

// A decoder of two layers between Gorgonia's own ops: products by cuBLAS, sums
// and tanh by its kernels. Its steps give what the same in float64 gives.
func TestMachineMixed(t *testing.T) {
	cudagen(t)
	rng := reftest.Rand(t)
	const rows, width, heads, kvHeads, dim, layers = 3, 96, 4, 2, 64, 2
	must := func(n *G.Node, err error) *G.Node {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	cache := newCache(t, la.CacheConfig{Layers: layers, KVHeads: kvHeads, HeadDim: dim, PageSize: 4, Pages: 40, Device: la.MachineGPU()})
	step, err := cache.NewStep(rows)
	if err != nil {
		t.Fatal(err)
	}
	type layer struct{ q, k, v, o matrix }
	var weights []layer
	g := G.NewGraph()
	weight := func(name string, rows, columns int) (matrix, *G.Node) {
		m := randomMatrix(rng, rows, columns, 1/math.Sqrt(float64(rows)))
		return m, input(g, name, m.tensor())
	}
	x := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("x"))
	y := x
	for l := range layers {
		var w layer
		var q, k, v, o *G.Node
		w.q, q = weight(fmt.Sprint("q", l), width, heads*dim)
		w.k, k = weight(fmt.Sprint("k", l), width, kvHeads*dim)
		w.v, v = weight(fmt.Sprint("v", l), width, kvHeads*dim)
		w.o, o = weight(fmt.Sprint("o", l), heads*dim, width)
		a := must(la.CachedAttention(must(G.Mul(y, q)), must(G.Mul(y, k)), must(G.Mul(y, v)), step.Layer(l), la.WithCausal()))
		if !isOnMachine(a) {
			t.Fatal("not on the machine")
		}
		y = must(G.Tanh(must(G.Add(y, must(G.Mul(a, o))))))
		weights = append(weights, w)
	}
	var got G.Value
	G.Read(y, &got)
	if err := la.CheckGraph(g); err != nil {
		t.Fatal(err)
	}
	vm := newTapeMachine(g)
	defer vm.Close()
	seq := newStored(t, cache).seq
	var keys, values [layers]matrix
	for turn := range 12 {
		in := randomMatrix(rng, rows, width, 1)
		let(t, x, in.tensor())
		if err := step.Set([]la.Append{{Seq: seq, Tokens: rows}}); err != nil {
			t.Fatal(err)
		}
		for range 1 + turn%2 { // a run may be repeated
			again(t, vm)
		}
		if err := step.Commit(); err != nil {
			t.Fatal(err)
		}
		for l, w := range weights {
			k, v := in.times(w.k), in.times(w.v)
			keys[l] = matrix{keys[l].rows + rows, k.columns, append(keys[l].x, k.x...)}
			values[l] = matrix{values[l].rows + rows, v.columns, append(values[l].x, v.x...)}
			o := in.times(w.q).attention(keys[l], values[l], heads, kvHeads).times(w.o)
			before := in
			in = o.each(func(i int) float64 { return math.Tanh(before.x[i] + o.x[i]) })
		}
		nearTo(t, fmt.Sprintf("step %d", turn), got, in)
	}
	closeCache(t, cache)
}

// Attention between Gorgonia's own ops on tensors of rank 3.
func TestMachineMixedTensors(t *testing.T) {
	cudagen(t)
	rng := reftest.Rand(t)
	p := newProblem(rng, dense(2, 1, 64, 64, 3, 50), spec{rank: 3})
	g := p.graph()
	q := G.Must(G.Tanh(g.q))
	out, err := la.Attention(q, G.Must(G.Add(g.k, g.k)), g.v, p.options()...)
	if err != nil {
		t.Fatal(err)
	}
	g.out = G.Must(G.HadamardProd(out, g.q))
	g.read(t)
	vm := newTapeMachine(g.g)
	defer vm.Close()
	for range 3 {
		again(t, vm)
	}
	// The heads of a query are rows here, of one KV head.
	n := 2 * 3
	qs, ks, vs := matrix{n, 64, floats(t, p.q)}, matrix{50, 64, floats(t, p.k)}, matrix{50, 64, floats(t, p.v)}
	tanh := qs.each(func(i int) float64 { return math.Tanh(qs.x[i]) })
	want := matrix{n, 64, nil}
	for i := range n {
		row := matrix{1, 64, tanh.x[i*64 : (i+1)*64]}
		scale := p.Scale * 8 // of attention below: 1/sqrt(64)
		row = row.each(func(j int) float64 { return 2 * scale * row.x[j] })
		want.x = append(want.x, row.attention(ks, vs, 1, 1).x...)
	}
	nearTo(t, "output", g.outV, want.each(func(i int) float64 { return want.x[i] * qs.x[i] }))
}

// Machines come and go while every processor has other work: a goroutine that is
// not locked to its thread then often leaves a call of the driver on another one,
// without the context of the machine.
func TestMachineBusy(t *testing.T) {
	cudagen(t)
	var stop atomic.Bool
	var busy sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		busy.Go(func() {
			for !stop.Load() {
			}
		})
	}
	defer busy.Wait()
	defer stop.Store(true)
	rng := reftest.Rand(t)
	for range 5 {
		p := newProblem(rng, dense(2, 1, 64, 64, 3, 50), spec{})
		g := p.attention(t)
		var twice G.Value
		G.Read(G.Must(G.Add(g.out, g.out)), &twice)
		vm := newTapeMachine(g.g)
		again(t, vm)
		p.check(t, p.referenceThere(onMachine()), g.outV, g.lseV)
		for i, x := range floats(t, twice) {
			if once := floats(t, g.outV)[i]; x != 2*once {
				t.Fatalf("element %d: twice %v is %v", i, once, x)
			}
		}
		if err := vm.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Attention behind products that cuBLAS made and Reshape gave another shape, and
// behind copies that Transpose made on the CPU.
func TestMachineMixedShapes(t *testing.T) {
	rng := reftest.Rand(t)
	t.Run("Reshape", func(t *testing.T) {
		const n = 5
		g := G.NewGraph()
		in := randomMatrix(rng, n, 64, 1)
		x := input(g, "x", in.tensor())
		var nodes [3]*G.Node
		var qkv [3]matrix
		for i := range nodes {
			w := randomMatrix(rng, 64, 64, 0.125)
			qkv[i] = in.times(w)
			nodes[i] = G.Must(G.Reshape(G.Must(G.Mul(x, input(g, "w"+"qkv"[i:i+1], w.tensor()))), tensor.Shape{1, n, 64}))
		}
		out, err := la.Attention(nodes[0], nodes[1], nodes[2], la.WithCausal())
		if err != nil {
			t.Fatal(err)
		}
		var got G.Value
		G.Read(out, &got)
		vm := newTapeMachine(g)
		defer vm.Close()
		for range 3 {
			again(t, vm)
			nearTo(t, "output", got, qkv[0].attention(qkv[1], qkv[2], 1, 1))
		}
	})
	t.Run("Transpose", func(t *testing.T) {
		p := newProblem(rng, dense(4, 2, 64, 64, 3, 20), spec{})
		g := p.graph()
		twice := func(n *G.Node) *G.Node { return G.Must(G.Transpose(G.Must(G.Transpose(n, 0, 2, 1, 3)), 0, 2, 1, 3)) }
		var err error
		if g.out, err = la.Attention(twice(g.q), twice(g.k), twice(g.v), p.options()...); err != nil {
			t.Fatal(err)
		}
		g.read(t)
		vm := newTapeMachine(g.g)
		defer vm.Close()
		again(t, vm)
		p.check(t, p.referenceThere(onMachine()), g.outV, nil)
	})
}
