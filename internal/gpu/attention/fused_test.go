//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// FuseAppend and FuseAttention offer exactly the work that Append and Run would queue. Only accepted work counts.
func TestFuse(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 13, 232448)
	p := decodeStep(t, m)
	plan := m.engine.NewPlan()
	o := p.operands()
	offers := 0
	offer := func(take bool) (appends, attends bool) {
		appends = plan.FuseAppend(attn.InPlanes(p.k, p.v), func(a *Appending) bool {
			offers++
			if a.Rows != p.rows || *a.Problem != p.geometry || a.PageBytes != 8*16*128*2 || a.Table != plan.memory.table ||
				a.Slots != plan.slots.address(&plan.memory) || a.Ahead != plan.ahead.address(&plan.memory) {
				t.Errorf("the append is offered as %+v", *a)
			}
			return take
		})
		attends = plan.FuseAttention(o, func(a *Attending) bool {
			offers++
			s := m.engine.shape(attn.Float16, 128)
			if a.Rows != p.rows || a.TileRows != 4 || a.QueryLen != o.Q.Len || a.OutLen != o.Out.Len || a.Params.query != o.Q.Address() || a.Chunk.Slot*2 != s.slot ||
				int(a.Params.box) != s.keys/2 || a.Params.tileShift != plan.params.tileShift+1 || a.Maps[0][0] != o.Pages[0].Data.Address() || a.Maps[1][0] != o.Pages[1].Data.Address() {
				t.Errorf("attention is offered as %+v", *a)
			}
			return take
		})
		return appends, attends
	}
	if appends, attends := offer(true); appends || attends || offers > 0 {
		t.Error("a plan of nothing was offered")
	}
	noError(t, plan.Build(p.geometry, p.seqs, p.rows))
	if appends, attends := offer(true); appends || attends || offers > 0 {
		t.Error("a plan that is not uploaded was offered")
	}
	noError(t, plan.Upload(m.Stream))
	for _, take := range []bool{false, true} {
		appends, attends := offer(take)
		if appends != take || attends != take || plan.anyAppend != take || plan.fused != take {
			t.Errorf("taken: %v, appends: %v, attends: %v, the plan takes it for appended: %v, for fused: %v", take, appends, attends, plan.anyAppend, plan.fused)
		}
	}
	if offers != 4 {
		t.Errorf("%d offers", offers)
	}
	short := *o
	short.Out.Len--
	if plan.FuseAttention(&short, func(*Attending) bool { return true }) {
		t.Error("attention that Run refuses was offered")
	}
	short.Pages[0].Data.Len = 100
	if plan.FuseAppend(short.Pages, func(*Appending) bool { return true }) {
		t.Error("an append that Append refuses was offered")
	}
	lib.Forget()
}

// Upload copies the list of pages to bring into the L2 cache.
func TestAheadUploaded(t *testing.T) {
	m, lib, _ := fakeGPU(t, 90, 132, 232448)
	m.engine.info.L2Bytes = 1 << 20
	g := paged(4, 4, 64)
	var seqs []attn.Sequence
	first := 0
	for row, pages := range []int{5, 4, 3, 2, 1} {
		seqs = append(seqs, sequenceOf(row, 1, 16*pages, first))
		first += pages
	}
	plan := m.engine.NewPlan()
	noError(t, plan.Build(g, seqs, 6))
	noError(t, plan.Upload(m.Stream))
	table := make([]byte, 4*(1+mostAhead))
	noError(t, plan.memory.table.Download(table, plan.ahead.at))
	ahead := unsafe.Slice((*int32)(unsafe.Pointer(&table[0])), 1+mostAhead)
	if want := []int32{3, 2, 7, 12}; !slices.Equal(ahead[:4], want) { // of 15 pages
		t.Errorf("%v, want %v", ahead[:4], want)
	}
	lib.Forget()
}
