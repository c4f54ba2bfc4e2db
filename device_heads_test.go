package leanattention_test

import (
	"fmt"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/rope"

	"gorgonia.org/tensor"
)

// TestGPUHeads: heads of other widths than kernels have, and values of another width than keys, in caches and in Attend.
func TestGPUHeads(t *testing.T) { testGPUHeads(t, devicetest.Open(t), 5) }

// TestGPUsHeads: two GPUs have some of the heads each, and then parts of the context.
func TestGPUsHeads(t *testing.T) { testGPUHeads(t, devicetest.OpenSome(t, 2), 3) }

func testGPUHeads(t *testing.T, gpu *device.GPU, cases int) {
	rng := reftest.Rand(t)
	for i, c := range []struct {
		storage, query tensor.Dtype
		dim, value     int
		shard          la.Shard
		mods           reftest.Shape
		tree           bool
	}{
		{la.Float16, la.Float16, 72, 72, la.ShardHeads, reftest.Shape{}, true},
		{la.BFloat16, tensor.Float32, 112, 112, la.ShardContext, reftest.Shape{}, false},
		{la.Float16, tensor.Float32, 192, 128, la.ShardHeads, reftest.Shape{SoftCap: 20}, false},
		{tensor.Float32, tensor.Float32, 160, 160, la.ShardHeads, reftest.Shape{Mask: attn.Mask{Window: 9, SinkTokens: 3}}, false},
		{la.BFloat16, la.BFloat16, 40, 104, la.ShardHeads, reftest.Shape{Mask: attn.Mask{Window: 20}}, false},
	}[:cases] {
		at := graphtest.Place{GPU: gpu, Real: true, There: i%2 == 0, ScoreMods: c.mods}
		if c.mods.SinkTokens == 0 {
			at.Rotary = &rope.Config{HeadDim: c.dim, Dim: c.dim / 2, Interleaved: i%2 == 1}
		}
		t.Run(fmt.Sprintf("%v in %v %d %d", c.query, c.storage, c.dim, c.value), func(t *testing.T) {
			config := la.CacheConfig{Layers: 2, KVHeads: 2, HeadDim: c.dim, ValueDim: c.value, DType: c.storage, PageSize: 5, Pages: 60, Device: gpu, Shard: c.shard}
			cache := graphtest.NewCache(t, config)
			la.PoisonFree(cache)
			d := graphtest.NewDecoderAt(t, at, cache, 50, 2*(3+i%2), c.query, true)
			one, two := graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)
			d.Do(t, rng, reftest.Normal, graphtest.Appended{To: one, Tokens: 43}, graphtest.Appended{To: two, Tokens: 3})
			fork := one.Fork(t)
			last := graphtest.Appended{To: fork, Tokens: 4}
			if c.tree {
				last.Tree = reftest.RandomTree(rng, 4)
			}
			d.Do(t, rng, reftest.Peaked, graphtest.Appended{To: one, Tokens: 1}, graphtest.Appended{To: two, Tokens: 4}, last)
			closeCache(t, cache)

			if len(gpu.Members()) > 1 || c.query != c.storage {
				return
			}
			s := reftest.Shape{Heads: 6, KVHeads: 2, Dim: c.dim, ValueDim: c.value, Queries: []int{3, 3}, Keys: []int{70, 41}, Mask: attn.Mask{Causal: true}}
			p := graphtest.NewProblem(rng, s, graphtest.Spec{Inputs: reftest.Peaked, QueryType: c.query, KVType: c.storage, Capacity: 72})
			out, lse := p.AttendThere(t, gpu)
			if err := p.Compare(t, p.ReferenceThere(at), out, lse); err != nil {
				t.Error(err)
			}
		})
	}
}
