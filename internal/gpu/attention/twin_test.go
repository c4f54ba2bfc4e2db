//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/lean"
)

// twin does what kernels do, and complains where a kernel would go wrong. Its
// thread blocks run one after the other, in any order.
type twin struct {
	t       testing.TB
	rng     *rand.Rand
	e       *Engine
	visited map[[4]int]int // seq, head, block, LeanTile
	stored  map[[2]int]int // row, head
	few     *params        // of the last launch, if it was one for few rows
}

func (k *twin) run(l testgpu.Launch) {
	k.t.Helper()
	if l.Overlap != (k.e.info.Capability >= 90) {
		k.t.Errorf("%s: overlaps: %v", l.Kernel, l.Overlap)
	}
	few := k.few
	k.few = nil
	switch {
	case l.Kernel == rotaryEntry:
		k.appendTurned(&l)
	case l.Kernel == "lean_append":
		k.append(&l)
	case l.Kernel == "prefix_gather":
		k.gather(&l)
	case l.Kernel == "prefix_merge":
		k.merge(&l)
	case strings.HasPrefix(l.Kernel, "prefill_"):
		k.prefill(&l, few)
	case strings.HasPrefix(l.Kernel, "unfused_"):
		k.unfused(&l)
	default:
		k.attend(&l)
		few := *(*params)(unsafe.Pointer(&l.Arg[0]))
		k.few = &few
	}
}

func (k *twin) append(l *testgpu.Launch) {
	p := (*appendParams)(unsafe.Pointer(&l.Arg[0]))
	for b := range l.Blocks {
		slot := int(*testgpu.At[int32](p.slots, b))
		if slot < 0 {
			continue
		}
		width, dim := int(p.heads*p.dim), int(p.dim)
		for i := range width {
			to := (slot+i/dim*int(p.headRows))*dim + i%dim
			from := b*int(p.row) + i
			testgpu.Store(p.keys, to, testgpu.TypeOf(p.dtype), testgpu.Load(p.newKeys, from, testgpu.TypeOf(p.newType)))
			testgpu.Store(p.values, to, testgpu.TypeOf(p.dtype), testgpu.Load(p.newValues, from, testgpu.TypeOf(p.newType)))
		}
	}
}

// attention is one launch of the twin.
type attention struct {
	*twin
	*params
	dim   int
	kv    attn.DType
	chunk int
	grid  int
	rows  uint64 // prefillParams.rows
}

func (k *twin) attend(l *testgpu.Launch) {
	t := k.t
	a := attention{twin: k, params: (*params)(unsafe.Pointer(&l.Arg[0])), grid: l.Blocks}
	name := strings.Split(l.Kernel, "_")
	fmt.Sscan(name[2], &a.dim)
	a.kv = map[string]attn.DType{"f16": attn.Float16, "bf16": attn.BFloat16, "f32": attn.Float32}[name[1]]
	size := a.kv.Size()
	a.chunk = 32 / size
	more := 1
	if k.e.info.Capability >= 90 {
		more = 2
	}
	if a.dim*size <= 128 {
		a.chunk *= 2 * more
	} else if a.dim*size <= 256 {
		a.chunk *= more
	}
	k.checkLaunch(l, &a)
	k.visited, k.stored = map[[4]int]int{}, map[[2]int]int{}
	for i := range l.Blocks {
		if n := *testgpu.At[uint32](a.counters, i); n != 0 {
			t.Fatalf("counter %d is %d before the launch", i, n)
		}
	}
	for _, b := range k.rng.Perm(l.Blocks) {
		if strings.HasSuffix(l.Kernel, "_paged") {
			a.checkPrefetch(b)
		}
		a.block(b)
	}
	for i := range l.Blocks {
		if n := *testgpu.At[uint32](a.counters, i); n != 0 {
			t.Fatalf("counter %d is %d after the launch", i, n)
		}
	}
	for at, n := range k.visited {
		if n != 1 {
			t.Fatalf("LeanTile %v (sequence, head, block, number) was visited %d times", at, n)
		}
	}
	for at, n := range k.stored {
		if n != 1 {
			t.Fatalf("row %v (and head) was stored %d times", at, n)
		}
	}
}

// checkPrefetch holds a block's first pages against the block table.
func (a *attention) checkPrefetch(block int) {
	w, tokens := testgpu.At[work](a.Work, block), int(a.pageTokens)
	if tokens&(tokens-1) != 0 || tokens < a.chunk/prefetchedEntries {
		a.t.Fatalf("pages of %d tokens, and a lane for each of a chunk of %d", tokens, a.chunk)
	}
	if w.tiles == 0 {
		return
	}
	first := int(w.tile) << a.tileShift * a.chunk / tokens
	for i := range prefetchedEntries {
		want := int32(-1)
		if (first+i)*tokens < int(w.first.keys) {
			want = *testgpu.At[int32](a.pages, int(w.first.pages)+first+i)
		}
		if got := *testgpu.At[int32](a.prefetched, block*prefetchedEntries+i); got != want {
			a.t.Fatalf("block %d begins in page number %d of %d tokens: entry %d of its first pages is %d, want %d", block, first, tokens, i, got, want)
		}
	}
}

// checkLaunch holds a launch against what the kernels take for granted.
func (k *twin) checkLaunch(l *testgpu.Launch, a *attention) {
	t, hopper := k.t, k.e.info.Capability >= 90
	size := a.kv.Size()
	threads := int(a.warps) * 32
	switch {
	case k.e.info.Capability == 90:
		threads = 3 * 4 * 32 // consumers, producers and the epilogue, four warps each
	case hopper:
		threads += 4 * 32
	}
	row := a.dim * size
	columns := (row + 127) / 128
	slot := 2 * columns * a.chunk * 128
	query := 0
	if row > 256 {
		query = map[int]int{2: a.dim / 16 * 1024, 4: a.dim / 8 * 512}[size]
	}
	if strings.Contains(l.Kernel, "_row") {
		query = rowOperands
		if a.Rows != 1 || a.warps != 4 || a.Slots < rowChunks {
			t.Errorf("%s: %d rows, %d warps, %d slots", l.Kernel, a.Rows, a.warps, a.Slots)
		}
	}
	warps, rows := int(a.warps), int(a.Rows)
	last := int(a.Slots)*slot + query + int(a.buffers)*(warps*rows*(a.dim+8)*4+2*16*16) + (2*int(a.Slots)+4)*8
	switch {
	case l.Threads != threads, l.Blocks != k.e.info.Multiprocessors:
		t.Errorf("%d blocks of %d threads for %d warps", l.Blocks, l.Threads, warps)
	case a.buffers != 1 && a.buffers != 2:
		t.Errorf("%d buffers of states", a.buffers)
	case warps < 1 || warps > 4 || a.Slots < a.warps || a.Slots%a.warps != 0 || hopper && a.Slots%2 != 0:
		t.Errorf("%d slots for %d warps", a.Slots, warps)
	case !hopper && (a.Slots/a.warps < 2 || a.Slots/a.warps > 6):
		t.Errorf("%d slots for %d warps before 9.0", a.Slots, warps)
	case l.Shared < last+8 || l.Shared > k.e.info.SharedPerBlockMost:
		t.Errorf("%d bytes of shared memory, %d are needed, %d there", l.Shared, last+8, k.e.info.SharedPerBlockMost)
	case rows < 1 || rows > 16 || a.parts < 0 || a.parts > 0 && rows<<a.parts > warps || rows<<(a.parts+1) <= warps:
		t.Errorf("%d rows, 2^%d parts, %d warps", rows, a.parts, warps)
	case a.chunk%int(a.box) != 0, a.pages != 0 && a.pageTokens%a.box != 0, a.pages == 0 && int(a.box) != a.chunk:
		t.Errorf("boxes of %d, chunks of %d, pages of %d", a.box, a.chunk, a.pageTokens)
	case a.partials%16 != 0 || a.query%16 != 0 || a.out%16 != 0 || a.keys%16 != 0 || a.values%16 != 0 || a.Work%16 != 0 || a.seqs%16 != 0:
		t.Error("an address is no multiple of 16")
	}
	if !hopper {
		return
	}
	for _, m := range []struct {
		of  cuda.TensorMap
		ptr uint64
	}{{a.keyMap, a.keys}, {a.valueMap, a.values}} {
		depth := uint64(1)
		width, box := uint64(a.dim), uint64(1)
		if row%128 == 0 {
			width, depth = uint64(128/size), uint64(columns)
			if int(a.box) == a.chunk {
				box = depth
			}
		}
		if m.of[0] != m.ptr || m.of[1] != uint64(size)/2 || m.of[2] != width || m.of[4] != depth || m.of[5] != uint64(row) ||
			m.of[7] != uint64(128/size) || m.of[8] != uint64(a.box) || m.of[9] != box {
			t.Errorf("map %v of rows of %d bytes", m.of, row)
		}
	}
}

// place is the kernel's struct Walk.
type place struct {
	s                      sequence
	seq, head, block, tile int
	left, take, tiles      int
	visible                int
	whole                  bool // the range is of whole output tiles
}

func (a *attention) position(r int) int { return int((float32(r) + 0.5) * a.perGroup) }

func (a *attention) count(w *place) int {
	w.visible = int(w.s.keys)
	if a.Causal != 0 {
		last := min((w.block+1)*16, int(w.s.queries*a.group)) - 1
		w.visible = max(int(w.s.keys-w.s.queries)+a.position(last)+1, 0)
	}
	chunks := (w.visible + a.chunk - 1) / a.chunk
	return (chunks + 1<<a.tileShift - 1) >> a.tileShift
}

func (a *attention) block(b int) {
	a.writeMasked(b)
	k := testgpu.At[work](a.Work, b)
	if k.tiles == 0 {
		return
	}
	a.walk(b, k, place{s: k.first, seq: int(k.seq), head: int(k.head), block: int(k.block), tile: int(k.tile), left: int(k.tiles)})
	if k.wholeTiles > 0 {
		a.walk(b, k, place{s: k.firstWhole, seq: int(k.wholeSeq), head: int(k.wholeHead), block: int(k.wholeBlock), left: int(k.wholeTiles), whole: true})
	}
}

// walk goes over one of a block's two ranges.
func (a *attention) walk(b int, k *work, w place) {
	if first := *testgpu.At[sequence](a.seqs, w.seq); first != w.s {
		a.t.Errorf("block %d begins with %+v, sequence %d is %+v", b, w.s, w.seq, first)
	}
	w.tiles = a.count(&w)
	for {
		w.take = min(w.left, w.tiles-w.tile)
		if w.take < 1 || w.whole && w.take < w.tiles {
			a.t.Fatalf("block %d: nothing to take, or a part, at %+v", b, w)
		}
		a.part(b, k, &w)
		if w.left -= w.take; w.left <= 0 {
			return
		}
		w.tile = 0
		for {
			w.block++
			if w.block*16 >= int(w.s.queries*a.group) {
				w.block = 0
				if w.head++; w.head == int(a.heads) {
					w.head = 0
					w.seq++
					w.s = *testgpu.At[sequence](a.seqs, w.seq)
				}
			}
			if w.tiles = a.count(&w); w.tiles > 0 {
				break
			}
		}
	}
}

// state is of one row.
type rowState struct {
	o    []float64
	m, l float64
}

func (s *rowState) merge(o []float64, m, l float64) {
	top := max(s.m, m)
	if math.IsInf(top, -1) {
		return
	}
	f, g := lean.Exp4(s.m-top), lean.Exp4(m-top)
	for i := range s.o {
		s.o[i] *= f
		if g != 0 {
			s.o[i] += g * o[i]
		}
	}
	s.m, s.l = top, f*s.l+g*l
}

// part is one thread block's part of one output tile.
func (a *attention) part(b int, k *work, w *place) {
	for i := range w.take {
		a.visited[[4]int{w.seq, w.head, w.block, w.tile + i}]++
	}
	rows := min(int(w.s.queries*a.group)-w.block*16, 16)
	if rows > int(a.Rows) {
		a.t.Fatalf("an output tile of %d rows, %d said", rows, a.Rows)
	}
	begin, end := (w.tile<<a.tileShift)*a.chunk, min(((w.tile+w.take)<<a.tileShift)*a.chunk, (w.visible+a.chunk-1)/a.chunk*a.chunk)
	states := make([]rowState, rows)
	for r := range states {
		states[r] = a.attendRow(w, w.block*16+r, begin, end)
	}
	if w.take == w.tiles {
		a.result(w, states)
		return
	}
	slot, host, sharers := 2*b+1, b, int(k.guests)
	if w.tile > 0 {
		slot, host, sharers = 2*b, int(k.host), int(k.sharers)
	}
	for r, s := range states {
		row := slot*int(a.Rows) + r
		for i, x := range s.o {
			testgpu.Store(a.partials, row*a.dim+i, attn.Float32, x)
		}
		stats := a.statistics() + uint64(row)*8
		testgpu.Store(stats, 0, attn.Float32, s.m)
		testgpu.Store(stats, 1, attn.Float32, s.l)
	}
	counter := testgpu.At[uint32](a.counters, host)
	if *counter++; *counter < uint32(sharers) {
		return
	}
	*counter = 0
	for r := range states {
		s := rowState{o: make([]float64, a.dim), m: math.Inf(-1)}
		for j := range sharers {
			slot := 2 * (host + j)
			if j == 0 {
				slot++
			}
			row := slot*int(a.Rows) + r
			o := make([]float64, a.dim)
			for i := range o {
				o[i] = testgpu.Load(a.partials, row*a.dim+i, attn.Float32)
			}
			stats := a.statistics() + uint64(row)*8
			s.merge(o, testgpu.Load(stats, 0, attn.Float32), testgpu.Load(stats, 1, attn.Float32))
		}
		states[r] = s
	}
	a.result(w, states)
}

func (a *attention) statistics() uint64 {
	return a.partials + uint64(2*a.grid*int(a.Rows)*a.dim)*4
}

func (a *attention) attendRow(w *place, r, begin, end int) rowState {
	n := a.position(r)
	head := w.head*int(a.group) + r - n*int(a.group)
	sees := int(w.s.keys)
	if a.Causal != 0 {
		sees = min(sees, int(w.s.keys-w.s.queries)+n+1)
	}
	at := int(w.s.row) + n
	if a.rows != 0 {
		at = int(*testgpu.At[int32](a.rows, at))
	}
	q := at*int(a.queryRow) + head*int(a.queryHead)
	s := rowState{o: make([]float64, a.dim), m: math.Inf(-1)}
	query, key, value := make([]float64, a.dim), make([]float64, a.dim), make([]float64, a.dim)
	testgpu.LoadRow(query, a.query, q, testgpu.TypeOf(a.queryType))
	for token := begin; token < min(end, sees); token++ {
		row := int(w.s.pages)*int(a.pageRows) + token
		if a.pages != 0 {
			page := *testgpu.At[int32](a.pages, int(w.s.pages)+token/int(a.pageTokens))
			row = int(page)*int(a.pageRows) + token%int(a.pageTokens)
		}
		row += w.head * int(a.headRows)
		if n := a.keyMap[3]; n > 0 && uint64(row) >= n {
			a.t.Fatalf("row %d of %d", row, n)
		}
		testgpu.LoadRow(key, a.keys, row*a.dim, a.kv)
		testgpu.LoadRow(value, a.values, row*a.dim, a.kv)
		var x float64
		for i, q := range query {
			x += q * key[i]
		}
		s.merge(value, x*float64(a.scale), 1)
	}
	return s
}

func (a *attention) result(w *place, states []rowState) {
	for r := range states {
		a.resultOf(w, w.block*16+r, &states[r])
	}
}

// resultOf stores what came of row i of a sequence's rows.
func (a *attention) resultOf(w *place, i int, s *rowState) {
	n := a.position(i)
	head := w.head*int(a.group) + i - n*int(a.group)
	row := int(w.s.row) + n
	a.stored[[2]int{row, head}]++
	for c, x := range s.o {
		if s.l > 0 {
			x /= s.l
		}
		testgpu.Store(a.out, row*int(a.outRow)+head*int(a.outHead)+c, testgpu.TypeOf(a.outType), x)
	}
	if a.lse != 0 {
		testgpu.Store(a.lse, row*int(a.lseRow)+head*int(a.lseHead), attn.Float32, s.m*lean.Ln4+math.Log(s.l))
	}
}

func (a *attention) writeMasked(block int) {
	for b := block; b < int(*testgpu.At[int32](a.Masked, 0)); b += a.grid {
		row := int(*testgpu.At[int32](a.Masked, 1+b))
		for h := range int(a.heads * a.group) {
			for i := range a.dim {
				testgpu.Store(a.out, row*int(a.outRow)+h*int(a.outHead)+i, testgpu.TypeOf(a.outType), 0)
			}
			if a.lse != 0 {
				testgpu.Store(a.lse, row*int(a.lseRow)+h*int(a.lseHead), attn.Float32, math.Inf(-1))
			}
		}
	}
}
