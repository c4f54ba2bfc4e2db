package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/rope"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// latents are the heads, KV heads, elements of a key and of a value, and rotated elements of latent attention: one of them DeepSeek's.
var latents = [][5]int{{16, 1, 576, 512, 64}, {5, 1, 24, 16, 8}, {6, 2, 40, 33, 6}, {3, 3, 16, 16, 4}, {7, 1, 12, 1, 10}}

// TestLatent: values that are parts of their keys, with the last elements of keys rotated, of sequences of all lengths, forked
// and truncated, with all page sizes and element types.
func TestLatent(t *testing.T) {
	rng := reftest.Rand(t)
	long := 70
	if reftest.RaceEnabled {
		long = 12
	}
	for turn, pageSize := range []int{1, 3, 16, 64} {
		for i, storage := range cacheTypes {
			one := rng.IntN(2)
			for j, query := range []tensor.Dtype{tensor.Float32, tensor.Float64} {
				if j != one && !reftest.Every(t) {
					continue
				}
				turn := turn + 2*i + j
				g := latents[turn%len(latents)]
				long := long
				if turn%len(latents) == 0 && !reftest.Every(t) { // a token takes the time of a hundred of another shape
					long = min(long, 40)
				}
				var mods reftest.Shape
				if turn%3 == 1 {
					mods.Window = 1 + rng.IntN(2*long)
				}
				at := graphtest.Place{Used: turn%2 == 0, ScoreMods: mods}
				if turn%4 > 0 {
					at.Rotary = &rope.Config{HeadDim: g[2], Dim: g[4], Last: true, Interleaved: turn%2 == 0}
				}
				t.Run(fmt.Sprintf("page %d %v in %v %v", pageSize, query, storage, g), func(t *testing.T) {
					cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: g[1], HeadDim: g[2], ValueDim: g[3], ValuesInKeys: true, DType: storage, PageSize: pageSize, Pages: 8*long/pageSize + 24})
					la.PoisonFree(cache)
					opts := []la.Option{la.WithSchedule(graphtest.Schedules[turn%3]), la.WithWorkers(turn % 5), la.WithTileTokens(32)}
					prefill := graphtest.NewDecoderAt(t, at, cache, long+50, g[0], query, true, opts...)
					decode := graphtest.NewDecoderAt(t, at, cache, 4, g[0], query, true, opts...)
					decodeMix(t, rng, cache, prefill, decode, long)
					closeCache(t, cache)
				})
			}
		}
	}
}

// TestGPULatent: the same of DeepSeek's shape on a GPU, with operands on the host and there.
func TestGPULatent(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	for turn, pageSize := range []int{16, 64, 3} {
		storage, query, heads := la.Float16, tensor.Float32, []int{5, 16, 40}[turn]
		if turn == 1 {
			storage, query = la.BFloat16, la.BFloat16
		}
		at := graphtest.Place{GPU: gpu, Real: true, There: turn == 0}
		if turn < 2 {
			at.Rotary = &rope.Config{HeadDim: 576, Dim: 64, Last: true, Interleaved: turn == 1}
		}
		t.Run(fmt.Sprintf("page %d %v in %v", pageSize, query, storage), func(t *testing.T) {
			cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 576, ValueDim: 512, ValuesInKeys: true, DType: storage, PageSize: pageSize, Pages: 150/pageSize + 8, Device: gpu})
			la.PoisonFree(cache)
			d := graphtest.NewDecoderAt(t, at, cache, 70, heads, query, true)
			one, two := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: one, Tokens: 66}, graphtest.Appended{To: two, Tokens: 3})
			fork := one.Fork(t)
			d.Do(t, rng, reftest.Peaked, graphtest.Appended{To: one, Tokens: 1}, graphtest.Appended{To: two, Tokens: 4}, graphtest.Appended{To: fork, Tokens: 2})
			closeCache(t, cache)
		})
	}
}

// TestGPULatentAny: all types of latents, other widths, windows, sink tokens and trees on a GPU.
func TestGPULatentAny(t *testing.T) { testGPULatentAny(t, devicetest.Open(t), la.ShardAuto, 5) }

// TestGPUsLatent: two GPUs have parts of the context, or all of it and parts of the heads.
func TestGPUsLatent(t *testing.T) {
	gpu := devicetest.OpenSome(t, 2)
	t.Run("context", func(t *testing.T) { testGPULatentAny(t, gpu, la.ShardContext, 2) })
	t.Run("heads", func(t *testing.T) { testGPULatentAny(t, gpu, la.ShardHeads, 4) })
	t.Run("heads of each", func(t *testing.T) { testGPUsLatentHeads(t, gpu) })
}

// testGPUsLatentHeads: each GPU has the queries of some heads and all latents, and leaves its outputs where they are. Saved sequences are
// those of the CPU, and each GPU goes on with what was read.
func testGPUsLatentHeads(t *testing.T, gpu *device.GPU) {
	const heads, dim, value, rows, steps = 6, 40, 32, 5, 3
	rng := reftest.Rand(t)
	config := la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: dim, ValueDim: value, ValuesInKeys: true, PageSize: 4, Pages: 12, Window: 9, SinkTokens: 2, Rewind: 20, Shard: la.ShardHeads}
	var inputs [2 * steps]*tensor.Dense
	for i := range inputs {
		x := make([]float32, rows*dim*[]int{heads, 1}[i%2])
		for j := range x {
			x[j] = float32(rng.NormFloat64())
		}
		inputs[i] = tensor.New(tensor.WithShape(rows, len(x)/rows), tensor.WithBacking(x))
	}
	type texts struct {
		out   [][]float32
		saved []byte
	}
	run := func(on *device.GPU, file []byte, first int) (all texts) {
		t.Helper()
		config.Device = on
		cache := graphtest.NewCache(t, config)
		la.PoisonFree(cache)
		step, err := cache.NewStep(rows)
		g := G.NewGraph()
		q := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, heads*dim), G.WithName("q"))
		k := G.NewMatrix(g, tensor.Float32, G.WithShape(rows, dim), G.WithName("k"))
		seq := newSequence(t, cache)
		if err == nil && file != nil {
			seq, err = cache.ReadSequence(bytes.NewReader(file))
		}
		var out *G.Node
		if err == nil {
			out, err = la.CachedAttention(q, k, nil, step.Layer(0), la.WithCausal(), la.WithWindow(9), la.WithSinkTokens(2), la.WithSoftCap(8))
		}
		if err != nil {
			t.Fatal(err)
		}
		vm := G.NewTapeMachine(g)
		defer vm.Close()
		for i := first; i < steps; i++ {
			values := []G.Value{inputs[2*i], inputs[2*i+1]}
			if on != nil {
				if values[0], err = on.UploadSharded(inputs[2*i], 1); err == nil {
					values[1], err = on.UploadReplicated(inputs[2*i+1])
				}
			}
			if err == nil {
				err = errors.Join(G.Let(q, values[0]), G.Let(k, values[1]))
			}
			if err == nil {
				err = step.Run([]la.Append{{Seq: seq, Tokens: rows - i}}, func() error {
					defer vm.Reset()
					return la.Cause(vm.RunAll())
				})
			}
			if err != nil {
				t.Fatal(err)
			}
			y, _ := out.Value().(*tensor.Dense)
			if d, ok := out.Value().(*device.Tensor); ok {
				if d.Internal().Shards == nil {
					t.Fatal("the outputs of all heads are on one GPU")
				}
				if y, err = d.Download(); err != nil {
					t.Fatal(err)
				}
			}
			all.out = append(all.out, append([]float32{}, y.Float32s()...))
			if i == 0 {
				all.saved = savedBytes(t, seq)
			}
		}
		closeCache(t, cache)
		return all
	}
	want := run(nil, nil, 0)
	all := [][][]float32{}
	for i, file := range [][]byte{nil, want.saved} {
		got := run(gpu, file, i)
		if i == 0 && !bytes.Equal(got.saved, want.saved) {
			t.Error("a saved sequence is not the CPU's")
		}
		all = append(all, got.out)
	}
	for i, out := range all {
		for j, x := range out {
			for k, y := range x {
				if w := want.out[i+j][k]; !(math.Abs(float64(y-w)) <= 1e-4) {
					t.Fatalf("run %d, step %d, element %d: %v, want %v", i, j, k, y, w)
				}
			}
		}
	}
}

func testGPULatentAny(t *testing.T, gpu *device.GPU, shard la.Shard, cases int) {
	rng := reftest.Rand(t)
	for i, c := range []struct {
		storage, query tensor.Dtype
		dim, value     int
		mods           reftest.Shape
		tree           bool
	}{
		{tensor.Float32, tensor.Float32, 72, 64, reftest.Shape{}, true},
		{la.E4M3, la.BFloat16, 144, 128, reftest.Shape{}, true},
		{la.BFloat16, la.BFloat16, 320, 256, reftest.Shape{SoftCap: 20}, false},
		{la.Float16, tensor.Float32, 40, 32, reftest.Shape{Mask: attn.Mask{Window: 9, SinkTokens: 3}}, false},
		{la.E4M3, tensor.Float32, 128, 128, reftest.Shape{Mask: attn.Mask{Window: 20}}, false},
	}[:cases] {
		at := graphtest.Place{GPU: gpu, Real: true, There: i%2 == 0, ScoreMods: c.mods}
		if c.dim > c.value && i != 3 {
			at.Rotary = &rope.Config{HeadDim: c.dim, Dim: c.dim - c.value, Last: true, Interleaved: i%2 == 1}
		}
		t.Run(fmt.Sprintf("%v in %v %d %d", c.query, c.storage, c.dim, c.value), func(t *testing.T) {
			cache := graphtest.NewCache(t, la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: c.dim, ValueDim: c.value, ValuesInKeys: true, DType: c.storage, PageSize: 5, Pages: 40, Device: gpu, Shard: shard})
			la.PoisonFree(cache)
			d := graphtest.NewDecoderAt(t, at, cache, 50, 5+12*(i%2), c.query, true)
			one, two := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: one, Tokens: 43}, graphtest.Appended{To: two, Tokens: 3})
			fork := one.Fork(t)
			last := graphtest.Appended{To: fork, Tokens: 4}
			if c.tree {
				last.Tree = reftest.RandomTree(rng, 4)
			}
			d.Do(t, rng, reftest.Peaked, graphtest.Appended{To: one, Tokens: 1}, graphtest.Appended{To: two, Tokens: 4}, last)
			closeCache(t, cache)
		})
	}
}

// TestGPULatentBits: a GPU stores the bits of E4M3 that the CPU stores, and reads what the CPU saved.
func TestGPULatentBits(t *testing.T) {
	gpu, rng := devicetest.Open(t), reftest.Rand(t)
	const tokens = 30
	config := la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 272, ValueDim: 256, ValuesInKeys: true, DType: la.E4M3, PageSize: 4, Pages: 40}
	x := newEightText(rng, config, tokens)
	var saved [2][]byte
	for i, on := range []*device.GPU{nil, gpu} {
		config.Device = on
		cache := graphtest.NewCache(t, config)
		d := graphtest.NewDecoderAt(t, graphtest.Place{GPU: on, Real: on != nil}, cache, tokens, eightHeads, tensor.Float32, true)
		s := newSequence(t, cache)
		appendText(t, rng, d, s, x, rowsFrom(0, 17), nil)
		appendText(t, rng, d, s, x, rowsFrom(17, tokens-17), nil)
		saved[i] = savedBytes(t, s)
		if i == 1 {
			read, err := cache.ReadSequence(bytes.NewReader(saved[0]))
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(savedBytes(t, read), saved[0]) {
				t.Errorf("a file of the CPU has other bits on %v", gpu)
			}
		}
		closeCache(t, cache)
	}
	if !bytes.Equal(saved[0], saved[1]) {
		t.Errorf("%v stores other bits than the CPU", gpu)
	}
}

// TestLatentBytes: a cache whose values are parts of keys has the memory of the keys.
func TestLatentBytes(t *testing.T) {
	c := la.CacheConfig{Layers: 3, KVHeads: 1, HeadDim: 576, ValueDim: 512, ValuesInKeys: true, DType: la.BFloat16, PageSize: 64, Pages: 10}
	if n, err := c.Bytes(); err != nil || n != 3*10*64*576*2 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestLatentSaved: a saved sequence of latents continues as the first one, and only in a cache of its kind.
func TestLatentSaved(t *testing.T) {
	rng := reftest.Rand(t)
	config := la.CacheConfig{Layers: 2, KVHeads: 1, HeadDim: 24, ValueDim: 16, ValuesInKeys: true, DType: la.Float16, PageSize: 4, Pages: 40}
	at := graphtest.Place{Rotary: &rope.Config{HeadDim: 24, Dim: 8, Last: true}}
	first := graphtest.NewCache(t, config)
	d := graphtest.NewDecoderAt(t, at, first, 30, 5, tensor.Float32, true)
	s := graphtest.NewStored(t, first)
	d.Do(t, rng, reftest.AllInputs[0], graphtest.Appended{To: s, Tokens: 21})
	var file bytes.Buffer
	if n, err := s.Seq.WriteTo(&file); err != nil || n > 2*21*24*2+100 {
		t.Fatalf("%d bytes, %v", n, err)
	}
	config.PageSize, config.Pages = 16, 9
	second := graphtest.NewCache(t, config)
	seq, err := second.ReadSequence(bytes.NewReader(file.Bytes()))
	if err != nil {
		t.Fatal(err)
	}
	loaded := graphtest.NewStored(t, second)
	loaded.Seq, loaded.K, loaded.V = seq, s.K, s.V
	other := graphtest.NewDecoderAt(t, at, second, 9, 5, tensor.Float32, true)
	other.Do(t, rng, reftest.AllInputs[0], graphtest.Appended{To: loaded, Tokens: 9})

	config.ValuesInKeys = false
	apart := graphtest.NewCache(t, config)
	if _, err := apart.ReadSequence(bytes.NewReader(file.Bytes())); !errors.Is(err, la.ErrShape) || !strings.Contains(err.Error(), "ValuesInKeys is true in the saved sequence and false in the cache") {
		t.Error(err)
	}
}

// TestLatentRefused: what a cache of latents cannot do is refused.
func TestLatentRefused(t *testing.T) {
	refused := func(name string, err, kind error, text string) {
		t.Helper()
		if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", name, err)
		}
	}
	config := la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, ValueDim: 80, ValuesInKeys: true, Pages: 4}
	_, err := la.NewCache(config)
	refused("values wider than keys", err, la.ErrShape, "ValueDim is 80")
	config.ValueDim = 64
	cache := graphtest.NewCache(t, config)
	step, err := cache.NewStep(2)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	node := func(name string) *G.Node { return G.NewMatrix(g, tensor.Float32, G.WithShape(2, 64), G.WithName(name)) }
	q, k := node("q"), node("k")
	_, err = la.CachedAttention(q, k, k, step.Layer(0))
	refused("values", err, la.ErrShape, "pass nil")
	plain := graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, Pages: 4})
	if step, err = plain.NewStep(2); err != nil {
		t.Fatal(err)
	}
	_, err = la.CachedAttention(q, k, nil, step.Layer(0))
	refused("no values", err, la.ErrGraph, "v is nil")

	gpu, _ := la.FakeGPU(t)
	config.Device = gpu
	config.HeadDim = 68
	_, err = la.NewCache(config)
	refused("another width on a GPU", err, la.ErrUnsupported, "keys of 68 elements with values of 64 in them: kernels have multiples of 8, up to 576 and 512")
}
