//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

func batchShape(rows int) stackShape {
	sh := stackShape{rows: rows, blocks: 2, heads: 4, kvHeads: 4, dim: 64, inner: 512, vocabulary: 777, pageTokens: 16, kv: attn.Float16}
	for i := range rows {
		sh.keys = append(sh.keys, 3*i)
	}
	return sh
}

// The launch that makes new keys and values is told where they go in the cache, and the
// others that there is none; there are no launches for the storing.
func TestProjectionLaunches(t *testing.T) {
	const inTiles = 49
	for _, rows := range []int{5, 8, 9, 16, 32, inTiles, 50} { // each has a driver of its own
		t.Run(fmt.Sprint(rows), func(t *testing.T) {
			m, lib, d := fakeDecoder(t, 90, 132, 232448)
			if d.slower = math.Inf(1); rows == inTiles {
				d.slower = 0
			}
			shape := batchShape(rows)
			shape.round = true // more rows have kernels that do
			s := newStack(t, m, d, nil, shape)
			lib.Forget()
			noError(t, s.projected(t))
			name := map[int]string{5: "batch_f16_8", 8: "batch_f16_8", 9: "batch_f16_16", 16: "batch_f16_16", 32: "batch_f16_32_rounded", inTiles: "matrix_f16_64_rounded", 50: "batch_f16_32_rounded"}[rows]
			all, operands := enginetest.Launches(lib.Log()), 0
			all = slices.DeleteFunc(all, func(l enginetest.Launch) bool {
				made := l.Kernel == "matrix_operands_f16_few"
				if made {
					operands++
				}
				return made
			})
			if want := map[int]int{inTiles: 9}[rows]; operands != want {
				t.Fatalf("%d launches for operands, want %d", operands, want)
			}
			if len(all) != 11 {
				t.Fatalf("%d launches, want 11", len(all))
			}
			var plan attention.Appending
			s.plan.FuseAppend(attn.InPlanes(s.cache[0], s.cache[1]), func(a *attention.Appending) bool { plan = *a; return false })
			for i, l := range all {
				if i%5 == 1 && i < 10 {
					want := "lean_f16_64_paged"
					if rows == 5 { // a page each, and no block table
						want = "lean_f16_64"
					}
					if l.Kernel != want {
						t.Errorf("launch %d is %s, want %s", i, l.Kernel, want)
					}
					continue
				}
				if l.Kernel != name {
					t.Fatalf("launch %d is %s, want %s", i, l.Kernel, name)
				}
				want := fusedAppend{}
				if i%5 == 0 && i < 10 {
					want = fusedAppend{cache: [mostParts]uint64{0, s.cache[i/5*2].Address(), s.cache[i/5*2+1].Address()}, slots: plan.Slots, ahead: plan.Ahead, headRows: 16, dim: 64, pageBytes: 16 * 4 * 64 * 2}
				}
				var keep fusedAppend
				if rows == inTiles {
					keep = (*gemmParams)(unsafe.Pointer(&l.Arg[0])).keep
				} else {
					keep = (*skinnyParams)(unsafe.Pointer(&l.Arg[0])).keep
				}
				if keep != want {
					t.Errorf("launch %d keeps %+v, want %+v", i, keep, want)
				}
			}
			s.close(t)
		})
	}
}

// What is no projection is not one, and what one can't store it leaves to a launch.
func TestProjectionRefuses(t *testing.T) {
	m, _, d := fakeDecoder(t, 90, 132, 232448)
	s := newStack(t, m, d, nil, batchShape(6))
	defer s.close(t)
	for name, change := range map[string]func(o *Linear){
		"many rows":   func(o *Linear) { o.Rows = 17 },
		"few rows":    func(o *Linear) { o.Rows = 2 },
		"one part":    func(o *Linear) { o.Parts = o.Parts[:1] },
		"no operands": func(o *Linear) { o.X = gpu.Memory{} },
	} {
		o := *s.ops[0].linear
		if change(&o); d.NewProjection(&o) != nil {
			t.Errorf("%s: was taken", name)
		}
	}
	other := m.memory(t, attn.Float32, 6*256)
	s.all = append(s.all, other.Buffer)
	for name, change := range map[string]func(p **attention.Plan, k, v, newK, newV *gpu.Memory){
		"k from elsewhere":         func(_ **attention.Plan, _, _, newK, _ *gpu.Memory) { *newK = other },
		"v from elsewhere":         func(_ **attention.Plan, _, _, _, newV *gpu.Memory) { *newV = other },
		"v that is k":              func(_ **attention.Plan, _, _, newK, newV *gpu.Memory) { *newV = *newK },
		"another type":             func(_ **attention.Plan, k, v, _, _ *gpu.Memory) { k.DType, v.DType = attn.BFloat16, attn.BFloat16 },
		"a plan that is not there": func(p **attention.Plan, _, _, _, _ *gpu.Memory) { *p = m.engine.NewPlan() },
		"no operands":              func(_ **attention.Plan, _, _, newK, newV *gpu.Memory) { *newK, *newV = gpu.Memory{}, gpu.Memory{} },
		"a cache that it reads": func(_ **attention.Plan, k, _, _, _ *gpu.Memory) {
			w := s.ops[0].linear.Parts[0].W
			k.Buffer, k.Offset = w.Buffer, w.Offset
		},
	} {
		p, o := d.NewProjection(s.ops[0].linear), &s.ops[1]
		plan, k, v, newK, newV := s.plan, o.operands.Pages[0].Data, o.operands.Pages[1].Data, o.newK, o.newV
		change(&plan, &k, &v, &newK, &newV)
		if p.Append(plan, attn.InPlanes(k, v), newK, newV) || p.keep != (fusedAppend{}) {
			t.Errorf("append, %s: was taken", name)
		}
	}
	p, o := d.NewProjection(s.ops[0].linear), &s.ops[1]
	for i, want := range []bool{true, false} {
		if p.Append(s.plan, o.operands.Pages, o.newK, o.newV) != want {
			t.Errorf("append %d was taken: %v", i, !want)
		}
	}
}

// The kernels are of 9.0 alone.
func TestNoProjections(t *testing.T) {
	m, _, d := fakeDecoder(t, 120, 7, 101376)
	s := newStack(t, m, d, nil, batchShape(6))
	defer s.close(t)
	if d.NewProjection(s.ops[0].linear) != nil {
		t.Error("a projection after 9.0")
	}
}
