package leanattention_test

import (
	"math"
	"testing"
	"unsafe"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// reserve is a float16 tensor in address space that takes memory only where it
// is written.
func reserve(t *testing.T, shape ...int) *tensor.Dense {
	t.Helper()
	n := tensor.Shape(shape).TotalSize()
	m := reftest.Reserve(t, 2*n)
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(unsafe.Slice((*la.F16)(unsafe.Pointer(&m[0])), n)))
}

// TestAttentionHugeIndex (row 4): keys and values beyond element 2^31 and byte
// 2^32, of which the lengths leave only a few alive.
func TestAttentionHugeIndex(t *testing.T) {
	const heads, capacity, dim, live = 3, 1 << 25, 32, 600
	rng := reftest.Rand(t)
	p := &problem{
		Case: reftest.New(rng, dense(2*heads, heads, dim, dim, 1, live), reftest.Peaked, reftest.Float32, reftest.Float16),
		spec: spec{query: tensor.Float32, kv: la.Float16, rank: 4, capacity: capacity},
	}
	p.q = tensorOf(tensor.Float32, p.DenseQ(1), 1, 2*heads, 1, dim)
	p.k, p.v = reserve(t, 1, heads, capacity, dim), reserve(t, 1, heads, capacity, dim)
	for h := range heads {
		for _, x := range []struct {
			to   []la.F16
			from func(seq, pos, head int) []float64
		}{{p.k.Data().([]la.F16), p.Key}, {p.v.Data().([]la.F16), p.Value}} {
			to := x.to[h*capacity*dim:]
			for pos := range live {
				for i, f := range x.from(0, pos, h) {
					to[pos*dim+i] = half.FromFloat64(f)
				}
			}
			for i := range 300 * dim { // past the end
				to[live*dim+i] = half.FromFloat64(math.NaN())
			}
		}
	}
	want := p.Reference(p.precision(0))
	g := p.attention(t, la.WithTileTokens(64), la.WithWorkers(5))
	vm := G.NewTapeMachine(g.g)
	defer vm.Close()
	again(t, vm)
	p.check(t, want, g.outV, g.lseV)

	a := p.args()
	if err := la.Attend(a, p.options()...); err != nil {
		t.Fatal(err)
	}
	p.check(t, want, a.Out, a.LSE)
}
