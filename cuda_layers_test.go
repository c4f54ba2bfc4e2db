//go:build cuda

package leanattention_test

import (
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/devicetest"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// TestMachineManyLayers: hundreds of layers, thousands of steps, machine after
// machine: the results are those of the default build, bit for bit those of its
// GPUs, and no memory is lost.
func TestMachineManyLayers(t *testing.T) {
	layers, steps := 400, 200
	if testing.Short() {
		layers, steps = 40, 20
	}
	const heads, kvHeads, dim, rows = 4, 2, 64, 2
	gpu := devicetest.Open(t)
	rng := reftest.Rand(t)
	q := randomMatrix(rng, steps*rows, heads*dim, 1)
	k, v := randomMatrix(rng, steps*rows, kvHeads*dim, 1), randomMatrix(rng, steps*rows, kvHeads*dim, 1)
	look := []int{0, layers / 2, layers - 1} // layers whose output is compared

	// chain runs all layers, each on the output of the one before, and hands over
	// the outputs of some.
	chain := func(device *device.GPU, each func(step int, outs []G.Value)) {
		cache := graphtest.NewCache(t, la.CacheConfig{Layers: layers, KVHeads: kvHeads, HeadDim: dim, DType: la.Float16, PageSize: 16, Pages: 2 * (steps/16 + 2), Device: device})
		defer closeCache(t, cache)
		step, err := cache.NewStep(rows)
		if err != nil {
			t.Fatal(err)
		}
		g := G.NewGraph()
		in := [3]*G.Node{}
		for i, width := range []int{heads * dim, kvHeads * dim, kvHeads * dim} {
			in[i] = G.NewMatrix(g, tensor.Float32, G.WithShape(rows, width), G.WithName("qkv"[i:i+1]))
		}
		outs := make([]G.Value, len(look))
		nodes := make([]*G.Node, 0, layers)
		x := in[0]
		for l := range layers {
			if x, err = la.CachedAttention(x, in[1], in[2], step.Layer(l), la.WithCausal()); err != nil {
				t.Fatal(err)
			}
			nodes = append(nodes, x)
		}
		if isOnMachine(x) {
			for i, l := range look {
				G.Read(nodes[l], &outs[i])
			}
		}
		vm := graphtest.NewTapeMachine(g)
		defer vm.Close()
		seqs := []*graphtest.Stored{graphtest.NewStored(t, cache), graphtest.NewStored(t, cache)}
		var spent time.Duration
		defer func() { t.Logf("%v: %v a step", device, spent/time.Duration(steps)) }()
		for s := range steps {
			for i, m := range []matrix{q, k, v} {
				graphtest.Let(t, in[i], graphtest.TensorOf(tensor.Float32, m.x[s*rows*m.columns:(s+1)*rows*m.columns], rows, m.columns))
			}
			if err := step.Set([]la.Append{{Seq: seqs[0].Seq, Tokens: 1}, {Seq: seqs[1].Seq, Tokens: 1}}); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			if err := vm.RunAll(); err != nil {
				t.Fatalf("step %d: %v", s, err)
			}
			spent += time.Since(begin)
			if !isOnMachine(x) { // see TestMachineLeavesOnCPU
				for i, l := range look {
					outs[i] = nodes[l].Value()
				}
			}
			each(s, outs)
			if err := step.Commit(); err != nil {
				t.Fatal(err)
			}
			vm.Reset()
		}
	}

	var want [][]uint64 // of the default build's GPU
	chain(gpu, func(_ int, outs []G.Value) {
		for _, o := range outs {
			want = append(want, graphtest.Bits(t, o))
		}
	})
	chain(nil, func(s int, outs []G.Value) { // and they are near the CPU's
		for i, o := range outs {
			x := graphtest.Floats(t, o)
			for j, w := range want[s*len(look)+i] {
				if d := math.Abs(x[j] - math.Float64frombits(w)); !(d < 1e-4) {
					t.Fatalf("step %d, layer %d: element %d is %v on a GPU, %v on the CPU", s, look[i], j, math.Float64frombits(w), x[j])
				}
			}
		}
	})

	free := func() int64 {
		t.Helper()
		m, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		return m.Free
	}
	const slack = 8 << 20 // what a driver may keep
	var afterFirst, early int64
	var resident [2]int64
	for machine := range 3 {
		chain(la.MachineGPU(), func(s int, outs []G.Value) {
			for i, o := range outs {
				if !slices.Equal(graphtest.Bits(t, o), want[s*len(look)+i]) {
					t.Fatalf("machine %d, step %d, layer %d: other bits than the default build's", machine, s, look[i])
				}
			}
			switch s {
			case steps / 10:
				early, resident[0] = free(), residentBytes()
			case steps - 1:
				resident[1] = residentBytes()
				if lost := early - free(); lost > slack {
					t.Errorf("machine %d: %d bytes of the GPU lost in %d steps", machine, lost, s)
				}
				if grown := resident[1] - resident[0]; grown > 64<<20 {
					t.Errorf("machine %d: %d bytes of the host lost in %d steps", machine, grown, s)
				}
				t.Logf("machine %d: GPU memory free after step %d: %d, after step %d: %d; resident %d, %d", machine, steps/10, early, s, free(), resident[0], resident[1])
			}
		})
		runtime.GC()
		now := free()
		t.Logf("machine %d closed: GPU memory free %d, resident %d", machine, now, residentBytes())
		if machine == 0 {
			afterFirst = now
		} else if lost := afterFirst - now; lost > slack {
			t.Errorf("machine %d: %d bytes of the GPU lost since the first", machine, lost)
		}
	}
}

// residentBytes is the process's memory, 0 where it can't be told.
func residentBytes() int64 {
	var size, resident int64
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	if _, err := fmt.Sscan(string(text), &size, &resident); err != nil {
		return 0
	}
	return resident * int64(os.Getpagesize())
}
