package leanattention_test

import (
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/cuda/nvrtc"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// forGPU returns t as GPUs have tensors of variants: ints have 32 bits there.
func forGPU(t *tensor.Dense) *tensor.Dense {
	ints, ok := t.Data().([]int)
	if !ok {
		return t
	}
	narrow := make([]int32, len(ints))
	for i, x := range ints {
		narrow[i] = int32(x)
	}
	return tensor.New(tensor.WithShape(t.Shape()...), tensor.WithBacking(narrow))
}

// testVariantThere checks Attend and Attention with a variant of the gallery on a GPU.
func testVariantThere(t *testing.T, gpu *device.GPU, c *variantCase) {
	args := la.Args{Q: graphtest.Upload(t, gpu, c.q), K: graphtest.Upload(t, gpu, c.k), V: graphtest.Upload(t, gpu, c.v), Tensors: map[string]G.Value{}}
	out, err := gpu.NewTensor(tensor.Float32, c.batch, c.Heads, c.queries, c.ValueDim)
	if err != nil {
		t.Fatal(err)
	}
	args.Out = out
	g := G.NewGraph()
	node := func(name string, x *tensor.Dense) *G.Node {
		d := graphtest.Upload(t, gpu, forGPU(x))
		return G.NewTensor(g, d.Dtype(), len(d.Shape()), G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
	}
	nodes := map[string]*G.Node{}
	for name, x := range c.tensors {
		args.Tensors[name] = graphtest.Upload(t, gpu, forGPU(x))
		nodes[name] = node(name, x)
	}
	if err := la.Attend(args, c.option(nil)); err != nil {
		t.Fatal(err)
	}
	if err := c.check(graphtest.Download(t, out), false); err != nil {
		t.Fatalf("Attend: %v", err)
	}
	args.Mass = args.Out
	wantError(t, la.Attend(args, c.option(nil)), la.ErrOption, "Attend", "Args.Mass without WithTileTokens")
	args.Mass = nil
	result, err := la.Attention(node("q", c.q), node("k", c.k), node("v", c.v), c.option(nodes))
	if err != nil {
		t.Fatal(err)
	}
	m := G.NewTapeMachine(g)
	defer m.Close()
	if err := m.RunAll(); err != nil {
		t.Fatal(la.Cause(err))
	}
	if err := c.check(graphtest.Download(t, result.Value()), false); err != nil {
		t.Fatalf("Attention: %v", err)
	}
	if c.Variant.Unnormalised {
		if args.LSE, err = gpu.NewTensor(tensor.Float32, c.batch, c.Heads, c.queries); err != nil {
			t.Fatal(err)
		}
		wantError(t, la.Attend(args, c.option(nil)), la.ErrUnsupported, "Attend", "Args.LSE", "Unnormalised")
	}
	for name, x := range args.Tensors { // one in host memory
		args.Tensors[name] = c.tensors[name]
		wantError(t, la.Attend(args, c.option(nil)), la.ErrUnsupported, "Attend", name+" in host memory")
		args.Tensors[name] = x
	}
}

// Without NVRTC, the error names the library and the places that were searched.
func TestGPUVariantWithoutNVRTC(t *testing.T) {
	gpu := devicetest.Open(t)
	t.Setenv(nvrtc.Variable, t.TempDir()+"/libnvrtc.so")
	if c, err := nvrtc.Load(); err == nil {
		t.Skipf("%s was loaded before", c.Path())
	}
	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 2, HeadDim: 64, Pages: 4, DType: la.Float16, Device: gpu})
	if err != nil {
		t.Fatal(err)
	}
	defer cache.Close()
	step, err := cache.NewStep(1)
	if err != nil {
		t.Fatal(err)
	}
	g := G.NewGraph()
	node := func(name string) *G.Node {
		return G.NewMatrix(g, tensor.Float32, G.WithShape(1, 128), G.WithName(name))
	}
	_, err = la.CachedAttention(node("q"), node("k"), node("v"), step.Layer(0), la.WithVariant(la.Variant{Score: "score*0.5"}))
	wantError(t, err, la.ErrUnsupported, "CachedAttention", "no NVRTC", nvrtc.Variable, "pip install")
	if strings.Count(err.Error(), "no NVRTC") != 1 {
		t.Error(err)
	}
}

// TestGPUVariants: variants of the gallery on a GPU, of dense batches and of caches.
func TestGPUVariants(t *testing.T) {
	gpu := devicetest.Open(t)
	nvrtc.ForTest(t)
	rng := reftest.Rand(t)
	order := rng.Perm(len(reftest.Gallery))
	for _, i := range order[:reftest.Cases(t, 1, len(order))] {
		c := newVariantCaseOf(rng, i, 64, 64)
		name := reftest.Gallery[i].Name
		t.Run(name, func(t *testing.T) {
			testVariantThere(t, gpu, c)
			for c.queries > c.keys {
				c = newVariantCaseOf(rng, i, 64, 64)
			}
			for _, there := range []*device.GPU{nil, gpu} {
				testVariantCached(t, rng, c, la.CacheConfig{DType: tensor.Float32, Device: gpu}, there)
			}
		})
	}
}
