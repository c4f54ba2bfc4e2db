//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"fmt"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
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
	for _, rows := range []int{5, 8, 9, 16} { // each has a driver of its own
		t.Run(fmt.Sprint(rows), func(t *testing.T) {
			m, lib, d := fakeDecoder(t, 90, 132, 232448)
			s := newStack(t, m, d, nil, batchShape(rows))
			lib.Forget()
			noError(t, s.projected(t))
			name := map[bool]string{false: "batch_f16_16", true: "batch_f16_8"}[rows <= 8]
			all := launches(lib.Log())
			if len(all) != 11 {
				t.Fatalf("%d launches, want 11", len(all))
			}
			for i, l := range all {
				if i%5 == 1 && i < 10 {
					want := "lean_f16_64_paged"
					if rows == 5 { // a page each, and no block table
						want = "lean_f16_64"
					}
					if l.kernel != want {
						t.Errorf("launch %d is %s, want %s", i, l.kernel, want)
					}
					continue
				}
				if l.kernel != name {
					t.Fatalf("launch %d is %s, want %s", i, l.kernel, name)
				}
				want := batchKeep{}
				if i%5 == 0 && i < 10 {
					want = batchKeep{cache: [mostParts]uint64{0, s.cache[i/5*2].address(), s.cache[i/5*2+1].address()}, slots: s.plan.appending().Slots, ahead: s.plan.appending().Ahead, headRows: 16, dim: 64, pageBytes: 16 * 4 * 64 * 2}
				}
				if keep := (*batchParams)(unsafe.Pointer(&l.arg[0])).keep; keep != want {
					t.Errorf("launch %d keeps %+v, want %+v", i, keep, want)
				}
			}
			s.close(t)
		})
	}
}

// A step's pages that are brought into the L2 cache ahead go up with its plan.
func TestProjectionAhead(t *testing.T) {
	m, _, d := fakeDecoder(t, 90, 132, 232448)
	m.engine.info.L2Bytes = 1 << 20
	sh := batchShape(6)
	for i := range sh.keys {
		sh.keys[i] = 16 * (5 - i)
	}
	s := newStack(t, m, d, nil, sh)
	defer s.close(t)
	m.settle(t)
	table := make([]byte, 4*(1+mostAhead))
	noError(t, s.plan.memory.table.Download(table, s.plan.memory.sections.ahead))
	ahead := unsafe.Slice((*int32)(unsafe.Pointer(&table[0])), 1+mostAhead)
	if want := []int32{3, 2, 7, 12}; !slices.Equal(ahead[:4], want) { // of 15 pages
		t.Errorf("%v, want %v", ahead[:4], want)
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
		"no operands": func(o *Linear) { o.X = Memory{} },
	} {
		o := *s.ops[0].linear
		if change(&o); d.NewProjection(&o) != nil {
			t.Errorf("%s: was taken", name)
		}
	}
	other := m.memory(t, attn.Float32, 6*256)
	s.all = append(s.all, other.Buffer)
	for name, change := range map[string]func(p **Plan, k, v, newK, newV *Memory){
		"k from elsewhere":         func(_ **Plan, _, _, newK, _ *Memory) { *newK = other },
		"v from elsewhere":         func(_ **Plan, _, _, _, newV *Memory) { *newV = other },
		"v that is k":              func(_ **Plan, _, _, newK, newV *Memory) { *newV = *newK },
		"another type":             func(_ **Plan, k, v, _, _ *Memory) { k.DType, v.DType = attn.BFloat16, attn.BFloat16 },
		"a plan that is not there": func(p **Plan, _, _, _, _ *Memory) { *p = m.engine.NewPlan() },
		"no operands":              func(_ **Plan, _, _, newK, newV *Memory) { *newK, *newV = Memory{}, Memory{} },
		"a cache that it reads": func(_ **Plan, k, _, _, _ *Memory) {
			w := s.ops[0].linear.Parts[0].W
			k.Buffer, k.Offset = w.Buffer, w.Offset
		},
	} {
		p, o := d.NewProjection(s.ops[0].linear), &s.ops[1]
		plan, k, v, newK, newV := s.plan, o.operands.K, o.operands.V, o.newK, o.newV
		change(&plan, &k, &v, &newK, &newV)
		if p.Append(plan, k, v, newK, newV) || p.keep != (batchKeep{}) {
			t.Errorf("append, %s: was taken", name)
		}
	}
	p, o := d.NewProjection(s.ops[0].linear), &s.ops[1]
	for i, want := range []bool{true, false} {
		if p.Append(s.plan, o.operands.K, o.operands.V, o.newK, o.newV) != want {
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
