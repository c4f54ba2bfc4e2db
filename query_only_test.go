package leanattention_test

import (
	"bytes"
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/nn"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestQueryOnly: rows whose keys are not stored see all tokens of their sequences, beside rows that are stored, with rotation at the given
// positions; sequences without tokens give 0 and -Inf; and nothing is stored, whether the step is committed or rolled back.
func TestQueryOnly(t *testing.T) {
	rng := reftest.Rand(t)
	for turn := range 60 {
		shape := latents[turn%len(latents)]
		heads, kvHeads, dim, valueDim, turned := shape[0], shape[1], shape[2], shape[3], shape[4]
		var q, keys, out, lse *G.Node
		const rows = 6
		cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: kvHeads, HeadDim: dim, ValueDim: valueDim, ValuesInKeys: true, PageSize: 1 + rng.IntN(9), Pages: 300})
		la.PoisonFree(cache)
		step, err := cache.NewStep(rows)
		if err != nil {
			t.Fatal(err)
		}
		g := G.NewGraph()
		must := func(n *G.Node, err error) *G.Node {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		of := func(name string, width int) *G.Node {
			x := make([]float64, rows*width)
			for i := range x {
				x[i] = rng.NormFloat64()
			}
			return G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName(name), G.WithValue(graphtest.TensorOf(tensor.Float32, x, rows, width)))
		}
		q, keys = of("q", heads*dim), of("k", kvHeads*dim)
		rotary := rope.Config{HeadDim: dim, Dim: turned, Last: true, Interleaved: turn%2 == 0}
		opts := []la.Option{la.WithCausal(), la.WithScale(0.3), la.WithRotary(rotary), la.WithWorkers(turn % 4)}
		out = must(la.CachedAttention(q, keys, nil, step.Layer(0), opts...))
		lse = must(la.LogSumExp(out))
		at := G.NewVector(g, tensor.Int, G.WithShape(rows), G.WithName("positions"))
		turnedQ, turnedK := must(nn.Rotary(q, at, rotary)), must(nn.Rotary(keys, at, rotary))
		var results [4]G.Value
		for i, n := range []*G.Node{out, lse, turnedQ, turnedK} {
			G.Read(n, &results[i])
		}
		m := G.NewTapeMachine(g)
		defer m.Close()

		seqs, stored := make([]*la.Sequence, 4), make([][][]float64, 4) // of each sequence, the rotated keys
		for i := range seqs {
			if seqs[i], err = cache.NewSequence(); err != nil {
				t.Fatal(err)
			}
		}
		for range 8 {
			var appends []la.Append
			left := rows
			for i, seq := range seqs {
				switch rng.IntN(4) {
				case 0, 1:
					appends = append(appends, la.Append{Seq: seq, Tokens: 1, QueryOnly: true, Positions: []int{rng.IntN(500)}})
					if rng.IntN(2) == 0 {
						appends[len(appends)-1].Positions = nil
					}
					left--
				case 2:
					if n := rng.IntN(max(1, left-len(seqs)+i)) + 1; n <= left-(len(seqs)-1-i) {
						appends = append(appends, la.Append{Seq: seq, Tokens: n})
						left -= n
					}
				}
			}
			if len(appends) == 0 {
				continue
			}
			free := cache.Stats().FreePages
			need, err := cache.Need(appends)
			if err != nil {
				t.Fatal(err)
			}
			if err := step.Set(appends); err != nil {
				t.Fatal(err)
			}
			if got := free - cache.Stats().FreePages; got != need {
				t.Errorf("%d pages were taken, Need is %d", got, need)
			}
			positions := step.Positions()
			if err := G.Let(at, tensor.New(tensor.WithShape(rows), tensor.WithBacking(slices.Clone(positions)))); err != nil {
				t.Fatal(err)
			}
			if err := la.Cause(m.RunAll()); err != nil {
				t.Fatal(err)
			}
			m.Reset()
			qs, ks := graphtest.Floats(t, results[2]), graphtest.Floats(t, results[3])
			got, gotLSE := graphtest.Floats(t, results[0]), graphtest.Floats(t, results[1])
			keep, row := rng.IntN(3) > 0, 0
			for _, a := range appends {
				i := slices.Index(seqs, a.Seq)
				sees := slices.Clone(stored[i])
				for j := range a.Tokens {
					if want := len(sees); a.Positions != nil && positions[row] != a.Positions[j] || a.Positions == nil && positions[row] != want {
						t.Errorf("row %d is at position %d, want %d or %v", row, positions[row], want, a.Positions)
					}
					if !a.QueryOnly {
						sees = append(sees, ks[row*kvHeads*dim:][:kvHeads*dim])
					}
					for h := range heads {
						kv := h / (heads / kvHeads) * dim
						want, total := make([]float64, valueDim), 0.0
						for _, k := range sees {
							score := 0.0
							for e, v := range qs[(row*heads+h)*dim:][:dim] {
								score += v * k[kv+e]
							}
							p := math.Exp(0.3 * score)
							total += p
							for e := range want {
								want[e] += p * k[kv+e]
							}
						}
						if l := math.Log(total); gotLSE[row*heads+h] != l && !(math.Abs(gotLSE[row*heads+h]-l) < 1e-4*(1+math.Abs(l))) {
							t.Fatalf("%v: the log-sum-exp of row %d is %v, want %v", shape, row, gotLSE[row*heads+h], l)
						}
						for e, w := range want {
							if w /= total; len(sees) == 0 {
								w = 0
							}
							if o := got[(row*heads+h)*valueDim+e]; !(math.Abs(o-w) < 1e-4*(1+math.Abs(w))) {
								t.Fatalf("%v: row %d has %v, want %v", shape, row, o, w)
							}
						}
					}
					row++
				}
				if keep {
					stored[i] = sees
				}
			}
			if keep {
				err = step.Commit()
			} else {
				err = step.Rollback()
			}
			if err != nil {
				t.Fatal(err)
			}
			for i, seq := range seqs {
				if seq.Len() != len(stored[i]) {
					t.Fatalf("sequence %d has %d tokens, want %d", i, seq.Len(), len(stored[i]))
				}
			}
		}
		closeCache(t, cache)
	}
}

// TestQueryOnlyStoresNothing: the bytes of a sequence remain.
func TestQueryOnlyStoresNothing(t *testing.T) {
	rng := reftest.Rand(t)
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 8, PageSize: 4, Pages: 9})
	d := graphtest.NewDecoderAt(t, graphtest.Place{}, cache, 7, 4, tensor.Float32, true)
	s := graphtest.NewStored(t, cache)
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 6})
	var before, after bytes.Buffer
	if _, err := s.Seq.WriteTo(&before); err != nil {
		t.Fatal(err)
	}
	if err := d.Step.Run([]la.Append{{Seq: s.Seq, Tokens: 1, QueryOnly: true}}, func() error {
		if err := s.Seq.Truncate(3); !errors.Is(err, la.ErrState) {
			t.Errorf("Truncate in an open step: %v", err)
		}
		defer d.VM.Reset()
		return la.Cause(d.VM.RunAll())
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Seq.WriteTo(&after); err != nil || !bytes.Equal(before.Bytes(), after.Bytes()) {
		t.Errorf("the sequence has changed, %v", err)
	}
	d.Do(t, rng, reftest.Normal, graphtest.Appended{To: s, Tokens: 3})
}

// TestQueryOnlyRefused: what such rows cannot do is refused, and changes nothing.
func TestQueryOnlyRefused(t *testing.T) {
	for _, c := range []struct {
		name   string
		cache  la.CacheConfig
		opts   []la.Option
		append la.Append
		text   string
	}{
		{"two tokens", la.CacheConfig{}, nil, la.Append{Tokens: 2}, "append 0 is QueryOnly, with 2 tokens"},
		{"a tree", la.CacheConfig{}, nil, la.Append{Tokens: 1, Parents: []int{-1}}, "a tree: true"},
		{"a cache's window", la.CacheConfig{Window: 5}, []la.Option{la.WithWindow(5)}, la.Append{Tokens: 1}, "Window of 5 tokens"},
		{"a window", la.CacheConfig{}, []la.Option{la.WithWindow(5)}, la.Append{Tokens: 1}, "window"},
		{"ALiBi", la.CacheConfig{}, []la.Option{la.WithALiBi([]float64{1, 2})}, la.Append{Tokens: 1}, "ALiBi"},
	} {
		for _, late := range []bool{false, true} { // the node is made after Set
			config := c.cache
			config.Layers, config.KVHeads, config.HeadDim, config.Pages = 1, 2, 8, 4
			cache := graphtest.NewCache(t, config)
			step, err := cache.NewStep(3)
			if err != nil {
				t.Fatal(err)
			}
			seq, err := cache.NewSequence()
			if err != nil {
				t.Fatal(err)
			}
			g := G.NewGraph()
			of := func(name string) *G.Node {
				return G.NewMatrix(g, tensor.Float32, G.WithShape(3, 16), G.WithName(name), G.WithValue(tensor.New(tensor.WithShape(3, 16), tensor.Of(tensor.Float32))))
			}
			c.append.Seq, c.append.QueryOnly = seq, true
			node := func() error {
				_, err := la.CachedAttention(of("q"), of("k"), of("v"), step.Layer(0), append(c.opts, la.WithCausal())...)
				return err
			}
			if !late {
				err = node()
			}
			if err != nil {
				t.Fatal(c.name, err)
			}
			if err = step.Set([]la.Append{c.append}); err == nil && late {
				if err = node(); err == nil {
					m := G.NewTapeMachine(g)
					err = la.Cause(m.RunAll())
					_ = m.Close()
				}
			}
			if !errors.Is(err, la.ErrUnsupported) || !strings.Contains(strings.ToLower(err.Error()), strings.ToLower(c.text)) {
				t.Errorf("%s, late %v: %v", c.name, late, err)
			}
			_ = step.Rollback()
			if seq.Len() != 0 || cache.Stats().FreePages != 4 {
				t.Errorf("%s: %d tokens, %+v", c.name, seq.Len(), cache.Stats())
			}
		}
	}
	cache := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 8, ValuesInKeys: true, ValueDim: 6, Pages: 4})
	step, err := cache.NewStep(3)
	if err != nil {
		t.Fatal(err)
	}
	seq, err := cache.NewSequence()
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	of := func(name string, width int) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(3, width), G.WithName(name))
	}
	if _, err := la.PromptAttention(of("q", 10), of("k", 10), of("v", 4), of("latents", 8), 2, step.Layer(0)); err != nil {
		t.Fatal(err)
	}
	if err := step.Set([]la.Append{{Seq: seq, Tokens: 1, QueryOnly: true}}); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), "PromptAttention") {
		t.Error(err)
	}
}

// TestGPUsQueryOnly: caches of GPUs that share a context, and rotations of int8, E4M3 and Q4, refuse such rows.
func TestGPUsQueryOnly(t *testing.T) {
	gpu := devicetest.OpenSome(t, 2)
	for _, c := range []struct {
		config la.CacheConfig
		text   string
	}{
		{la.CacheConfig{KVHeads: 1}, "keep the cache in host memory, or on GPUs that share heads"},
		{la.CacheConfig{KVHeads: 2, DType: la.E4M3}, "E4M3 with WithRotary: use 16 bits"},
		{la.CacheConfig{KVHeads: 2, DType: la.Q4}, "Q4 with WithRotary: use 16 bits"},
	} {
		c.config.Layers, c.config.HeadDim, c.config.Pages, c.config.Device = 1, 64, 4, gpu
		cache := graphtest.NewCache(t, c.config)
		step, err := cache.NewStep(3)
		if err != nil {
			t.Fatal(err)
		}
		g := G.NewGraph()
		q := func(name string) *G.Node {
			return G.NewMatrix(g, tensor.Float32, G.WithShape(3, 64*c.config.KVHeads), G.WithName(name))
		}
		if _, err := la.CachedAttention(q("q"), q("k"), q("v"), step.Layer(0), la.WithCausal(), la.WithRotary(rope.Config{})); err != nil {
			t.Fatal(err)
		}
		seq, err := cache.NewSequence()
		if err != nil {
			t.Fatal(err)
		}
		if err := step.Set([]la.Append{{Seq: seq, Tokens: 1, QueryOnly: true}}); !errors.Is(err, la.ErrUnsupported) || !strings.Contains(err.Error(), c.text) {
			t.Error(err)
		}
	}
}

// TestGPUQueryOnly: on a GPU such rows have the outputs of the CPU, beside rows that are stored, with and without rotation, and store nothing.
func TestGPUQueryOnly(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	for turn, c := range []la.CacheConfig{
		{KVHeads: 2, HeadDim: 64, DType: la.Float16}, {KVHeads: 1, HeadDim: 40, ValueDim: 32, ValuesInKeys: true}, {KVHeads: 1, HeadDim: 136, ValueDim: 128, ValuesInKeys: true, DType: la.E4M3},
	} {
		const rows = 5
		var draws [6][3]*tensor.Dense
		for i := range draws {
			for j, heads := range []int{4 * c.KVHeads, c.KVHeads, c.KVHeads} {
				x := make([]float64, rows*heads*c.HeadDim)
				for k := range x {
					x[k] = rng.NormFloat64()
				}
				draws[i][j] = graphtest.TensorOf(tensor.Float32, x, rows, heads*c.HeadDim)
			}
		}
		seed := rng.Uint64()
		var all [2][][]float32
		var saved [2][]byte
		for at, on := range []*device.GPU{nil, gpu} {
			c.Layers, c.Pages, c.PageSize, c.Device = 1, 60, 3, on
			cache := graphtest.NewCache(t, c)
			la.PoisonFree(cache)
			step, err := cache.NewStep(rows)
			if err != nil {
				t.Fatal(err)
			}
			g := G.NewGraph()
			var in [3]*G.Node
			for j := range in {
				if j == 2 && c.ValuesInKeys {
					continue
				}
				in[j] = G.NewMatrix(g, tensor.Float32, G.WithShape(draws[0][j].Shape()...), G.WithName("x"+string(rune('0'+j))))
			}
			v := in[2] // nil with ValuesInKeys
			opts := []la.Option{la.WithCausal()}
			if turn != 1 {
				opts = append(opts, la.WithRotary(rope.Config{Dim: 8, Last: c.ValuesInKeys}))
			}
			out, err := la.CachedAttention(in[0], in[1], v, step.Layer(0), opts...)
			if err != nil {
				t.Fatal(err)
			}
			vm := G.NewTapeMachine(g)
			seqs := []*la.Sequence{newSequence(t, cache), newSequence(t, cache), newSequence(t, cache)}
			rng := rand.New(rand.NewPCG(seed, 1))
			for i := range draws {
				for j := range in {
					if j == 2 && v == nil {
						continue
					}
					var value G.Value = draws[i][j]
					if on != nil {
						if value, err = on.Upload(draws[i][j]); err != nil {
							t.Fatal(err)
						}
					}
					if err := G.Let(in[j], value); err != nil {
						t.Fatal(err)
					}
				}
				appends := []la.Append{{Seq: seqs[0], Tokens: 1, QueryOnly: i > 0 && rng.IntN(2) == 0}, {Seq: seqs[1], Tokens: 1 + rng.IntN(2)}, {Seq: seqs[2], Tokens: 1, QueryOnly: i != 2, Positions: []int{rng.IntN(50)}}}
				if err := step.Run(appends, func() error { defer vm.Reset(); return la.Cause(vm.RunAll()) }); err != nil {
					t.Fatal(err)
				}
				y, _ := out.Value().(*tensor.Dense)
				if d, ok := out.Value().(*device.Tensor); ok {
					if y, err = d.Download(); err != nil {
						t.Fatal(err)
					}
				}
				all[at] = append(all[at], slices.Clone(y.Float32s()))
			}
			if seqs[2].Len() != 1 {
				t.Errorf("%d tokens are stored", seqs[2].Len())
			}
			if saved[at] = savedBytes(t, seqs[0]); turn == 1 && at == 1 && !bytes.Equal(saved[0], saved[1]) {
				t.Error("other keys are stored")
			}
			if err := vm.Close(); err != nil {
				t.Fatal(err)
			}
			closeCache(t, cache)
		}
		for i, want := range all[0] {
			for j, w := range want {
				if y := all[1][i][j]; !(math.Abs(float64(y-w)) <= 0.01) {
					t.Fatalf("cache %d, step %d, element %d: %v, want %v", turn, i, j, y, w)
				}
			}
		}
	}
}

// TestQueryOnlyStorage: caches of all element types, in both forms. A fork stores a token whose key and value are 0, in the same step: its
// sum of exponentials is that of the row which is QueryOnly plus 1, and its output is smaller by the ratio of the sums.
func TestQueryOnlyStorage(t *testing.T) {
	rng := reftest.Rand(t)
	for _, c := range []struct {
		dtype   tensor.Dtype
		latents bool
	}{{tensor.Float32, false}, {la.Float16, false}, {la.BFloat16, true}, {la.E4M3, false}, {la.E4M3, true}, {tensor.Int8, false}, {la.Q4, false}} {
		const heads, before = 4, 11
		config := la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 32, DType: c.dtype, PageSize: 4, Pages: 30}
		if c.latents {
			config.KVHeads, config.HeadDim, config.ValueDim, config.ValuesInKeys = 1, 128+16, 128, true
		}
		cache := graphtest.NewCache(t, config)
		step, err := cache.NewStep(before)
		if err != nil {
			t.Fatal(err)
		}
		g := G.NewGraph()
		of := func(name string, width int) (*G.Node, []float64) {
			x := make([]float64, before*width)
			for i := range x {
				x[i] = rng.NormFloat64()
			}
			v := graphtest.TensorOf(tensor.Float64, x, before, width)
			return G.NewMatrix(g, tensor.Float64, G.WithShape(before, width), G.WithName(name), G.WithValue(v)), v.Data().([]float64)
		}
		q, qs := of("q", heads*config.HeadDim)
		k, ks := of("k", config.KVHeads*config.HeadDim)
		v, vs := of("v", config.KVHeads*config.HeadDim)
		if c.latents {
			v = nil
		}
		out, err := la.CachedAttention(q, k, v, step.Layer(0), la.WithCausal())
		if err != nil {
			t.Fatal(err)
		}
		lse, err := la.LogSumExp(out)
		if err != nil {
			t.Fatal(err)
		}
		var results [2]G.Value
		G.Read(out, &results[0])
		G.Read(lse, &results[1])
		m := G.NewTapeMachine(g)
		defer m.Close()
		run := func(appends ...la.Append) {
			t.Helper()
			if err := step.Run(appends, func() error {
				defer m.Reset()
				return la.Cause(m.RunAll())
			}); err != nil {
				t.Fatal(c, err)
			}
		}
		seq, err := cache.NewSequence()
		if err != nil {
			t.Fatal(err)
		}
		run(la.Append{Seq: seq, Tokens: before})
		fork, err := seq.Fork()
		if err != nil {
			t.Fatal(err)
		}
		copy(qs[heads*config.HeadDim:], qs[:heads*config.HeadDim])
		clear(ks)
		clear(vs)
		run(la.Append{Seq: seq, Tokens: 1, QueryOnly: true}, la.Append{Seq: fork, Tokens: 1})
		o, l := graphtest.Floats(t, results[0]), graphtest.Floats(t, results[1])
		width := len(o) / before / heads
		for h := range heads {
			if want := math.Log(math.Exp(l[h]) + 1); math.Abs(l[heads+h]-want) > 1e-6 {
				t.Errorf("%v: the log-sum-exp with a key of 0 is %v, want %v", c, l[heads+h], want)
			}
			for e := range width {
				if got, want := o[(heads+h)*width+e], o[h*width+e]*math.Exp(l[h]-l[heads+h]); math.Abs(got-want) > 1e-6 {
					t.Fatalf("%v: the output with a key of 0 is %v, want %v", c, got, want)
				}
			}
		}
		if seq.Len() != before || fork.Len() != before+1 {
			t.Errorf("%v: %d and %d tokens", c, seq.Len(), fork.Len())
		}
	}
}
