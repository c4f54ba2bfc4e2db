//go:build cuda

package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"gorgonia.org/leanattention/rewrite"

	"gorgonia.org/leanattention/rope"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// The tests below run Gorgonia's own CUDA machine, and need a GPU, or the driver
// without one that .ci/run builds: else gorgonia.org/cu ends the process before
// any of them could skip. docs/cuda.md says how they are built and run. Run them
// by their name, -run '^TestMachine': most other tests look at the machine of the
// default build.

// onMachine is the place of caches on the machine.
func onMachine() graphtest.Place { return graphtest.Place{GPU: la.MachineGPU(), Real: true} }

func isOnMachine(n *G.Node) bool {
	_, ok := n.Op().(G.CUDADoer)
	return ok
}

// Attention: every acceptance case that there is a kernel for, with all types of
// keys, schedules and inputs, against the reference.
func TestMachineAttention(t *testing.T) {
	rng := reftest.Rand(t)
	kvs := []tensor.Dtype{tensor.Float32, la.Float16, la.BFloat16}
	at := onMachine()
	turn := 0
	for _, c := range acceptanceCases() {
		if !at.HasKernel(c.shape) || work(c.shape) > 3_000_000 {
			continue
		}
		turn++
		x := graphtest.Spec{Inputs: reftest.AllInputs[turn%len(reftest.AllInputs)], Capacity: c.capacity, KVType: kvs[turn%3]}
		opts := append([]la.Option{la.WithSchedule(graphtest.Schedules[turn/3%3])}, c.opts...)
		t.Run(fmt.Sprintf("%s %v %v", c.name, x.Inputs, x.KVType), func(t *testing.T) {
			p := graphtest.NewProblem(rng, c.shape, x)
			g := p.Attention(t, opts...)
			if !isOnMachine(g.Out) || !isOnMachine(g.LSE) {
				t.Fatal("not on the machine")
			}
			vm := graphtest.NewTapeMachine(g.G)
			defer vm.Close()
			graphtest.Again(t, vm)
			p.Check(t, p.ReferenceThere(at), g.OutValue, g.LSEValue)
			first := graphtest.Bits(t, g.OutValue)
			graphtest.Again(t, vm)
			if !slices.Equal(graphtest.Bits(t, g.OutValue), first) {
				t.Error("other bits in a second run")
			}
			if p.Ragged() { // lengths are data
				graphtest.Let(t, g.Lengths, graphtest.LengthsOf(tensor.Int, make([]int, len(p.Keys))))
				graphtest.Again(t, vm)
				if slices.ContainsFunc(graphtest.Floats(t, g.OutValue), func(f float64) bool { return f != 0 }) {
					t.Error("output for no keys is not 0")
				}
			}
		})
	}
	if turn < 5 {
		t.Errorf("only %d cases", turn)
	}
}

// What there is no kernel for stays on the CPU, with the same results.
func TestMachineLeavesOnCPU(t *testing.T) {
	rng := reftest.Rand(t)
	for name, p := range map[string]*graphtest.Problem{
		"head dim 20":     graphtest.NewProblem(rng, dense(2, 1, 20, 20, 1, 9), graphtest.Spec{}),
		"float64":         graphtest.NewProblem(rng, dense(2, 1, 64, 64, 1, 9), graphtest.Spec{QueryType: tensor.Float64}),
		"a large value":   graphtest.NewProblem(rng, dense(2, 1, 64, 264, 1, 9), graphtest.Spec{}),
		"keys in float64": graphtest.NewProblem(rng, dense(2, 1, 64, 64, 1, 9), graphtest.Spec{KVType: tensor.Float64}),
		"a window":        graphtest.NewProblem(rng, graphtest.WithScoreMods(dense(2, 1, 64, 64, 1, 9), 3, 0), graphtest.Spec{}),
		"a soft cap":      graphtest.NewProblem(rng, graphtest.WithScoreMods(dense(2, 1, 64, 64, 1, 9), 0, 2), graphtest.Spec{}),
		"a bias":          graphtest.NewProblem(rng, reftest.RandomBias(rng, dense(2, 1, 64, 64, 1, 9), 9), graphtest.Spec{}),
		"dropout":         graphtest.NewProblem(rng, reftest.RandomDropout(rng, dense(2, 1, 64, 64, 1, 9)), graphtest.Spec{}),
		"sinks":           graphtest.NewProblem(rng, withSinks(dense(2, 1, 64, 64, 1, 9), 1, 0.5), graphtest.Spec{}),
		"ALiBi":           graphtest.NewProblem(rng, graphtest.WithScoreMods(dense(2, 1, 64, 64, 1, 9), 0, 0, 1, 0.5), graphtest.Spec{}),
	} {
		g := p.Build(t)
		if isOnMachine(g.Out) || isOnMachine(g.LSE) {
			t.Fatalf("%s: on the machine", name)
		}
		vm := graphtest.NewTapeMachine(g.G) // without Read, see below
		if err := vm.RunAll(); err != nil {
			t.Fatal(err)
		}
		p.Check(t, p.Reference(p.Precision(0)), g.Out.Value(), g.LSE.Value())
		vm.Close()
		if err := rewrite.Check(g.G); err != nil {
			t.Error(err)
		}
		G.Read(g.Out, &g.OutValue)
		if err := rewrite.Check(g.G); !errors.Is(err, la.ErrGraph) || !strings.Contains(err.Error(), "no node on Gorgonia's CUDA machine") {
			t.Errorf("a Read, where Gorgonia panics: %v", err)
		}
	}
}

// CachedAttention, with prompts and single tokens beside each other.
func TestMachineCachedAttention(t *testing.T) {
	geometries := [][3]int{{2, 2, 64}, {6, 2, 80}, {7, 1, 96}, {12, 3, 128}, {5, 1, 256}}
	pageSizes := []int{1, 3, 16, 64}
	const long = 60
	rng := reftest.Rand(t)
	at, turn := onMachine(), 0
	for _, storage := range cacheTypes {
		for _, query := range at.Queries() {
			g := geometries[turn%len(geometries)]
			pageSize := pageSizes[turn%len(pageSizes)]
			schedule, causal := graphtest.Schedules[turn%3], turn%4 != 0
			turn++
			t.Run(fmt.Sprintf("page %d %v in %v h%d/%d d%d %v causal %v", pageSize, query, storage, g[0], g[1], g[2], schedule, causal), func(t *testing.T) {
				cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: g[1], HeadDim: g[2], DType: storage, PageSize: pageSize, Pages: 8*long/pageSize + 24, Device: at.GPU})
				d := graphtest.NewDecoderAt(t, at, cache, long+50, g[0], query, causal, la.WithSchedule(schedule))
				decodeMix(t, rng, cache, d, d, long) // one graph: each machine has memory of its own
				closeCache(t, cache)
			})
		}
	}
	t.Run("Rerun", func(t *testing.T) { testCachedAttentionRerun(t, at, 20) })
	t.Run("Poison", func(t *testing.T) { testCachedAttentionPoison(t, at) })
}

// Several machines, by turns: each has its own context.
func TestMachineSeveral(t *testing.T) {
	rng := reftest.Rand(t)
	at := onMachine()
	type user struct {
		d *graphtest.Decoder
		s *graphtest.Stored
	}
	var users []user
	for range 3 {
		cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 64, DType: la.Float16, PageSize: 8, Pages: 30, Device: at.GPU})
		users = append(users, user{graphtest.NewDecoderAt(t, at, cache, 5, 4, tensor.Float32, true), graphtest.NewStored(t, cache)})
	}
	for i := range 30 {
		u := users[rng.IntN(len(users))]
		u.d.Do(t, rng, reftest.Normal, graphtest.Appended{To: u.s, Tokens: 1 + i%5})
	}
	for _, u := range users {
		closeCache(t, u.d.Cache)
	}
}

// Sequences are saved and loaded where a layer has run.
func TestMachineSequenceIO(t *testing.T) {
	at := onMachine()
	testSequenceIODecodes(t, at)

	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, PageSize: 4, Pages: 30, Device: at.GPU})
	rng := reftest.Rand(t)
	d := graphtest.NewDecoderAt(t, at, cache, 2, 1, tensor.Float32, true)
	var file bytes.Buffer
	empty := graphtest.NewStored(t, cache)
	if _, err := empty.Seq.WriteTo(&file); err != nil {
		t.Errorf("an empty sequence: %v", err)
	}
	if _, err := cache.ReadSequence(&file); err != nil {
		t.Errorf("an empty sequence: %v", err)
	}
	s := graphtest.NewStored(t, cache)
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 2})
	if _, err := s.Seq.WriteTo(&file); err != nil {
		t.Error(err)
	}
	saved := file.Bytes()

	fresh := graphtest.NewCache(t, cache.Config())
	if _, err := fresh.ReadSequence(bytes.NewReader(saved)); !errors.Is(err, la.ErrUnsupported) {
		t.Errorf("before a layer has run: %v", err)
	}
	if st := fresh.Stats(); st.FreePages != fresh.Config().Pages || st.Sequences != 0 {
		t.Errorf("%+v", st)
	}
	d.VM.Close()
	if n, err := s.Seq.WriteTo(io.Discard); n != 0 || !errors.Is(err, la.ErrClosed) {
		t.Errorf("behind its machine: %d bytes, %v", n, err)
	}
	if _, err := cache.ReadSequence(bytes.NewReader(saved)); !errors.Is(err, la.ErrClosed) {
		t.Errorf("behind its machine: %v", err)
	}
	closeCache(t, cache)
	closeCache(t, fresh)
}

// The gradient is computed on the CPU, of what the machine left.
func TestMachineGradient(t *testing.T) {
	cudagen(t)
	rng := reftest.Rand(t)
	for _, of := range costs {
		p := graphtest.NewProblem(rng, causal(dense(4, 2, 64, 64, 3, 20, 11)), graphtest.Spec{Capacity: 20})
		g := differentiate(t, p, rng, of)
		vm := graphtest.NewTapeMachine(g.G)
		for range 2 {
			graphtest.Again(t, vm)
		}
		if err := g.compareGrads(t, g.want()); err != nil {
			t.Errorf("%v: %v", of, err)
		}
		vm.Close()
	}
}

// A cache there takes neither sinks nor a rotary embedding, which have not been tried.
func TestMachineCachedRefuses(t *testing.T) {
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, Pages: 2, Device: la.MachineGPU()})
	step, err := cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	_, err = la.CachedAttention(f32(1, 128).node(g, "q"), f32(1, 64).node(g, "k"), f32(1, 64).node(g, "v"), step.Layer(0), la.WithSinks(f32(2).node(g, "sinks")))
	wantError(t, err, la.ErrUnsupported, "CachedAttention", "attention sinks")
	g = G.NewGraph()
	_, err = la.CachedAttention(f32(1, 128).node(g, "q"), f32(1, 64).node(g, "k"), f32(1, 64).node(g, "v"), step.Layer(0), la.WithRotary(rope.Config{}))
	wantError(t, err, la.ErrUnsupported, "CachedAttention", "a rotary embedding")
	closeCache(t, cache)
}

func TestMachineErrors(t *testing.T) {
	rng := reftest.Rand(t)
	at := onMachine()
	config := la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, PageSize: 4, Pages: 30, Device: at.GPU}
	check := func(t *testing.T, err, want error, text string) {
		t.Helper()
		if err = la.Cause(err); !errors.Is(err, want) || !strings.Contains(err.Error(), text) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v; want %v with %q", err, want, text)
		}
	}
	t.Run("No kernel", func(t *testing.T) {
		c := config
		c.HeadDim = 20
		_, err := la.NewCache(c)
		check(t, err, la.ErrUnsupported, "NewCache: on the GPU of Gorgonia's machine: ")
		c = config
		c.HeadDim, c.ValueDim = 64, 264
		_, err = la.NewCache(c)
		check(t, err, la.ErrUnsupported, "values of 264")
	})
	t.Run("No GPU of its own", func(t *testing.T) {
		_, err := at.GPU.Memory()
		check(t, err, la.ErrState, "not made by device.Open")
		_, err = at.GPU.Upload(graphtest.TensorOf(tensor.Float32, []float64{1}, 1))
		check(t, err, la.ErrState, "not made by device.Open")
	})
	t.Run("Step not set", func(t *testing.T) {
		cache := graphtest.NewCache(t, config)
		d := graphtest.NewDecoderAt(t, at, cache, 2, 1, tensor.Float32, true)
		d.Draw(t, rng, reftest.Normal)
		err := d.VM.RunAll()
		d.VM.Reset()
		check(t, err, la.ErrState, "CachedAttention: layer 0: step is not open")
		d.Do(t, rng, reftest.Normal, graphtest.Appended{To: graphtest.NewStored(t, cache), Tokens: 2}) // the machine is as good as before
		closeCache(t, cache)
		d.Draw(t, rng, reftest.Normal)
		check(t, d.VM.RunAll(), la.ErrClosed, "cache")
	})
	t.Run("Another machine", func(t *testing.T) {
		cache := graphtest.NewCache(t, config)
		a := graphtest.NewDecoderAt(t, at, cache, 2, 1, tensor.Float32, true)
		b := graphtest.NewDecoderAt(t, at, cache, 2, 1, tensor.Float32, true)
		s := graphtest.NewStored(t, cache)
		a.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 2})
		fails := func(want error, text string) {
			t.Helper()
			b.Set(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 1})
			err := b.VM.RunAll()
			b.VM.Reset()
			check(t, err, want, text)
			if err := b.Step.Rollback(); err != nil {
				t.Fatal(err)
			}
		}
		fails(la.ErrUnsupported, "the cache's 2 tokens are on another machine")
		a.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 1})
		a.VM.Close()
		fails(la.ErrClosed, "the machine that the cache's 3 tokens were on")
		if err := s.Seq.Release(); err != nil {
			t.Fatal(err)
		}
		b.Do(t, rng, reftest.Normal, graphtest.Appended{To: graphtest.NewStored(t, cache), Tokens: 2}) // an empty cache goes along
		b.VM.Close()
		closeCache(t, cache) // after its machine
	})
	t.Run("Memory", func(t *testing.T) {
		c := config
		c.KVHeads, c.HeadDim, c.PageSize, c.Pages = 64, 256, 4096, 100_000 // 53 TB
		cache := graphtest.NewCache(t, c)
		d := graphtest.NewDecoderAt(t, at, cache, 2, 64, tensor.Float32, true)
		d.Set(t, rng, reftest.Normal, graphtest.Appended{To: graphtest.NewStored(t, cache), Tokens: 1})
		check(t, d.VM.RunAll(), la.ErrOutOfMemory, "bytes asked for on GPU 0")
		closeCache(t, cache)
	})
	t.Run("Tensor of an opened GPU", func(t *testing.T) {
		gpu := devicetest.Open(t)
		p := graphtest.NewProblem(rng, dense(1, 1, 64, 64, 1, 9), graphtest.Spec{})
		g := p.Graph()
		out, err := la.Attention(g.Q, g.K, g.V)
		if err != nil {
			t.Fatal(err)
		}
		G.Read(out, &g.OutValue)
		vm := graphtest.NewTapeMachine(g.G)
		defer vm.Close()
		graphtest.Let(t, g.Q, graphtest.Upload(t, gpu, p.InQ))
		if err := vm.RunAll(); err == nil {
			t.Error("a DeviceTensor was taken for a tensor of the host")
		} else {
			t.Log(la.Cause(err))
		}
		vm.Reset()
		graphtest.Let(t, g.Q, p.InQ)
		graphtest.Again(t, vm)
		p.Check(t, p.ReferenceThere(at), g.OutValue, nil)
	})
}

// The tests below put attention among Gorgonia's own ops on its CUDA machine. See
// the top for how they are run.

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

func (m matrix) tensor() *tensor.Dense {
	return graphtest.TensorOf(tensor.Float32, m.x, m.rows, m.columns)
}

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
	x := graphtest.Floats(t, got)
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
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: layers, KVHeads: kvHeads, HeadDim: dim, PageSize: 4, Pages: 40, Device: la.MachineGPU()})
	step, err := cache.NewStep(rows)
	if err != nil {
		t.Fatal(err)
	}
	type layer struct{ q, k, v, o matrix }
	var weights []layer
	g := G.NewGraph()
	weight := func(name string, rows, columns int) (matrix, *G.Node) {
		m := randomMatrix(rng, rows, columns, 1/math.Sqrt(float64(rows)))
		return m, graphtest.Input(g, name, m.tensor())
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
	if err := rewrite.Check(g); err != nil {
		t.Fatal(err)
	}
	vm := graphtest.NewTapeMachine(g)
	defer vm.Close()
	seq := graphtest.NewStored(t, cache).Seq
	var keys, values [layers]matrix
	for turn := range 12 {
		in := randomMatrix(rng, rows, width, 1)
		graphtest.Let(t, x, in.tensor())
		if err := step.Set([]la.Append{{Seq: seq, Tokens: rows}}); err != nil {
			t.Fatal(err)
		}
		for range 1 + turn%2 { // a run may be repeated
			graphtest.Again(t, vm)
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
	p := graphtest.NewProblem(rng, dense(2, 1, 64, 64, 3, 50), graphtest.Spec{Rank: 3})
	g := p.Graph()
	q := G.Must(G.Tanh(g.Q))
	out, err := la.Attention(q, G.Must(G.Add(g.K, g.K)), g.V, p.Options()...)
	if err != nil {
		t.Fatal(err)
	}
	g.Out = G.Must(G.HadamardProd(out, g.Q))
	g.Read(t)
	vm := graphtest.NewTapeMachine(g.G)
	defer vm.Close()
	for range 3 {
		graphtest.Again(t, vm)
	}
	// The heads of a query are rows here, of one KV head.
	n := 2 * 3
	qs, ks, vs := matrix{n, 64, graphtest.Floats(t, p.InQ)}, matrix{50, 64, graphtest.Floats(t, p.InK)}, matrix{50, 64, graphtest.Floats(t, p.InV)}
	tanh := qs.each(func(i int) float64 { return math.Tanh(qs.x[i]) })
	want := matrix{n, 64, nil}
	for i := range n {
		row := matrix{1, 64, tanh.x[i*64 : (i+1)*64]}
		scale := p.Scale * 8 // of attention below: 1/sqrt(64)
		row = row.each(func(j int) float64 { return 2 * scale * row.x[j] })
		want.x = append(want.x, row.attention(ks, vs, 1, 1).x...)
	}
	nearTo(t, "output", g.OutValue, want.each(func(i int) float64 { return want.x[i] * qs.x[i] }))
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
		p := graphtest.NewProblem(rng, dense(2, 1, 64, 64, 3, 50), graphtest.Spec{})
		g := p.Attention(t)
		var twice G.Value
		G.Read(G.Must(G.Add(g.Out, g.Out)), &twice)
		vm := graphtest.NewTapeMachine(g.G)
		graphtest.Again(t, vm)
		p.Check(t, p.ReferenceThere(onMachine()), g.OutValue, g.LSEValue)
		for i, x := range graphtest.Floats(t, twice) {
			if once := graphtest.Floats(t, g.OutValue)[i]; x != 2*once {
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
		x := graphtest.Input(g, "x", in.tensor())
		var nodes [3]*G.Node
		var qkv [3]matrix
		for i := range nodes {
			w := randomMatrix(rng, 64, 64, 0.125)
			qkv[i] = in.times(w)
			nodes[i] = G.Must(G.Reshape(G.Must(G.Mul(x, graphtest.Input(g, "w"+"qkv"[i:i+1], w.tensor()))), tensor.Shape{1, n, 64}))
		}
		out, err := la.Attention(nodes[0], nodes[1], nodes[2], la.WithCausal())
		if err != nil {
			t.Fatal(err)
		}
		var got G.Value
		G.Read(out, &got)
		vm := graphtest.NewTapeMachine(g)
		defer vm.Close()
		for range 3 {
			graphtest.Again(t, vm)
			nearTo(t, "output", got, qkv[0].attention(qkv[1], qkv[2], 1, 1))
		}
	})
	t.Run("Transpose", func(t *testing.T) {
		p := graphtest.NewProblem(rng, dense(4, 2, 64, 64, 3, 20), graphtest.Spec{})
		g := p.Graph()
		twice := func(n *G.Node) *G.Node { return G.Must(G.Transpose(G.Must(G.Transpose(n, 0, 2, 1, 3)), 0, 2, 1, 3)) }
		var err error
		if g.Out, err = la.Attention(twice(g.Q), twice(g.K), twice(g.V), p.Options()...); err != nil {
			t.Fatal(err)
		}
		g.Read(t)
		vm := graphtest.NewTapeMachine(g.G)
		defer vm.Close()
		graphtest.Again(t, vm)
		p.Check(t, p.ReferenceThere(onMachine()), g.OutValue, nil)
	})
}
