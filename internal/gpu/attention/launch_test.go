//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// launches checks the launches that a driver stub got against the kernels' assumptions: threads, shared memory, tensor
// maps, output tiles. The launches do nothing. Tests with PTX or a GPU check the results.
type launches struct {
	t testing.TB
	e *Engine
}

// fakeGPU returns a machine without a GPU.
func fakeGPU(t testing.TB, capability, sms, shared int) (*machine, *fakedriver.Library, *launches) {
	t.Helper()
	k := &launches{t: t}
	d, lib := enginetest.Fake(t, capability, sms, shared, k.check)
	s := lib.State()
	s.Argument(rotaryEntry, int(unsafe.Sizeof(rotaryParams{})))
	s.Argument(appendEntry, int(unsafe.Sizeof(appendParams{})))
	s.Argument(narrowEntry, int(unsafe.Sizeof(narrowAppend{})))
	s.Argument("latent_any_", int(unsafe.Sizeof(latentAnyParams{})))
	s.Argument("any_", int(unsafe.Sizeof(latentAnyParams{})))
	s.Argument(latentAppendEntry, int(unsafe.Sizeof(latentAppend{})))
	s.Argument("lean_", int(unsafe.Sizeof(params{})))
	s.Argument("narrow_", int(unsafe.Sizeof(narrowParams{})))
	s.Argument(fourEntry, int(unsafe.Sizeof(rotaryParams{})))
	s.Argument("q4_", int(unsafe.Sizeof(narrowParams{})))
	s.Argument("unfused_", int(unsafe.Sizeof(unfusedParams{})))
	s.Argument("prefill_", int(unsafe.Sizeof(prefillParams{})))
	s.Argument("prefix_gather", int(unsafe.Sizeof(prefixGatherParams{})))
	s.Argument("prefix_merge", int(unsafe.Sizeof(prefixMergeParams{})))
	e, err := New(d.Dev)
	noError(t, err)
	e.Eager, k.e = true, e
	return &machine{Device: d, engine: e}, lib, k
}

func (k *launches) check(l enginetest.Launch) {
	k.t.Helper()
	if l.Overlap != (k.e.info.Capability >= 90) {
		k.t.Errorf("%s: overlaps: %v", l.Kernel, l.Overlap)
	}
	switch arg := unsafe.Pointer(&l.Arg[0]); {
	case l.Kernel == rotaryEntry, l.Kernel == appendEntry:
	case l.Kernel == narrowEntry:
		k.narrowAppend(&l)
	case strings.HasPrefix(l.Kernel, "narrow_"):
		k.narrow(&l)
	case l.Kernel == fourEntry, strings.HasPrefix(l.Kernel, "q4_"):
		k.four(&l)
	case strings.HasPrefix(l.Kernel, "latent_any_"), strings.HasPrefix(l.Kernel, "any_"):
		k.latentAny(&l)
	case l.Kernel == latentAppendEntry:
		a := (*latentAppend)(arg)
		if of := &a.rotary.Append; a.rotary.each < 1 || l.Blocks%int(a.rotary.each) != 0 || l.Threads != appendThreads || of.dim%8 != 0 || a.value%latentGroup != 0 || a.scales == 0 || of.dim > a.value && a.rest == 0 || of.values != 0 {
			k.t.Errorf("%d blocks of %d threads: %+v", l.Blocks, l.Threads, a)
		}
	case l.Kernel == "prefix_gather":
		if p := (*prefixGatherParams)(arg); l.Threads != prefixThreads || p.width%8 != 0 || p.queryRow%8 != 0 || p.queryHead%8 != 0 || (p.query|p.to)%8 != 0 {
			k.t.Errorf("gather by %d threads: %+v", l.Threads, p)
		}
	case l.Kernel == "prefix_merge":
		if p := (*prefixMergeParams)(arg); l.Threads != prefixThreads || (p.outRow|p.outHead|int64(p.dim))%4 != 0 {
			k.t.Errorf("merge by %d threads: %+v", l.Threads, p)
		}
	case strings.HasPrefix(l.Kernel, "prefill_"):
		k.prefill(&l)
	case strings.HasPrefix(l.Kernel, "unfused_"):
		u := (*unfusedParams)(arg)
		if name := strings.Split(l.Kernel, "_"); len(name) == 3 && gpu.Name(enginetest.TypeOf(u.kind)) != name[2] {
			k.t.Errorf("%s of %v", l.Kernel, enginetest.TypeOf(u.kind))
		}
		if l.Blocks != unfusedBlocks*k.e.blocks || l.Threads != unfusedThreads {
			k.t.Errorf("%s: %d blocks of %d threads", l.Kernel, l.Blocks, l.Threads)
		}
	default:
		k.decode(&l)
	}
}

// decode checks a launch of a decode kernel.
func (k *launches) decode(l *enginetest.Launch) {
	a := decodeLaunch{k.t, (*params)(unsafe.Pointer(&l.Arg[0])), 0, 0, 0}
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
	k.checkDecode(l, &a)
	for b := range l.Blocks {
		if n := *enginetest.At[uint32](a.counters, b); n != 0 {
			k.t.Fatalf("counter %d is %d before the launch", b, n)
		}
		if strings.HasSuffix(l.Kernel, "_paged") {
			a.checkPrefetch(b)
		}
	}
}

type decodeLaunch struct {
	t testing.TB
	*params
	dim   int
	kv    attn.DType
	chunk int
}

// checkPrefetch compares a block's prefetched pages with the block table.
func (a *decodeLaunch) checkPrefetch(block int) {
	w, tokens := enginetest.At[work](a.Work, block), int(a.pageTokens)
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
			want = *enginetest.At[int32](a.pages, int(w.first.pages)+first+i)
		}
		if got := *enginetest.At[int32](a.prefetched, block*prefetchedEntries+i); got != want {
			a.t.Fatalf("block %d begins in page number %d of %d tokens: entry %d of its first pages is %d, want %d", block, first, tokens, i, got, want)
		}
	}
}

// checkDecode checks a launch against the kernels' assumptions.
func (k *launches) checkDecode(l *enginetest.Launch, a *decodeLaunch) {
	t, hopper := k.t, k.e.info.Capability >= 90
	size := a.kv.Size()
	threads := int(a.warps) * 32
	switch {
	case k.e.info.Capability == 90:
		threads = 3 * 4 * 32 // consumers, producers and epilogue, four warps each
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
		bytes := uint64(row)
		if m.of[5] < bytes { // rows are spread: a column block of the kernel gets fewer elements, some of them twice
			if width, bytes = m.of[2], m.of[5]; width*uint64(size) > 128 && depth > 1 || m.of[6]*(depth-1)+width*uint64(size) != bytes {
				t.Errorf("map %v spreads %d elements over %d column blocks", m.of, width, depth)
			}
		}
		if m.of[0] != m.ptr || m.of[1] != uint64(size)/2 || m.of[2] != width || m.of[4] != depth || m.of[5] != bytes ||
			m.of[7] != uint64(128/size) || m.of[8] != uint64(a.box) || m.of[9] != box {
			t.Errorf("map %v of rows of %d bytes", m.of, row)
		}
	}
}

// prefill checks a launch of a prefill kernel: its blocks have the parts of each output tile in order.
func (k *launches) prefill(l *enginetest.Launch) {
	p := (*prefillParams)(unsafe.Pointer(&l.Arg[0]))
	i := slices.IndexFunc(k.e.kernels, func(of kernel) bool { return slices.Contains(of.entries, l.Kernel) })
	if i < 0 || k.e.kernels[i].parts == 0 {
		k.t.Fatalf("%s is no prefill kernel of the table", l.Kernel)
	}
	kernel := &k.e.kernels[i]
	if code := gpu.Code(kernel.kv); kernel.exact && (p.queryType != code || p.outType != code) {
		k.t.Errorf("%s: queries and outputs have the types %d and %d", l.Kernel, p.queryType, p.outType)
	}
	if l.Blocks != kernel.tile.blocks*k.e.info.Multiprocessors || l.Threads != prefillThreads(kernel) || l.Shared != prefillShared(kernel) || l.Shared > k.e.info.SharedPerBlockMost {
		k.t.Errorf("%s: %d blocks of %d threads and %d bytes of shared memory", l.Kernel, l.Blocks, l.Threads, l.Shared)
	}
	maps := [2]cuda.TensorMap{p.keyMap, p.valueMap}
	if warps := kernel.tile.warps > 0; warps != (k.e.info.Capability != 90) || warps != (p.keys != 0) || warps != (p.values != 0) || warps != (maps == [2]cuda.TensorMap{}) || l.Overlap != k.e.hasCopyEngine() {
		k.t.Errorf("%s: keys at %d and %v, overlaps %v", l.Kernel, p.keys, p.keyMap, l.Overlap)
	} else if warps {
		maps[0][0], maps[1][0] = p.keys, p.values
	} else if p.keyMap[8] != uint64(p.box) || p.keyMap[9] != 1 || p.keyMap[0]%16 != 0 || kernel.tile.keys%int(p.box) != 0 || p.pages != 0 && p.pageTokens%p.box != 0 {
		k.t.Errorf("map %v, boxes of %d, pages of %d", p.keyMap, p.box, p.pageTokens)
	}
	outputs := map[[3]int32]prefillTile{} // by sequence, head and block: the parts so far
	for b := range l.Blocks {
		begin, end := int(*enginetest.At[int32](p.starts, b)), int(*enginetest.At[int32](p.starts, b+1))
		for i := begin; i < end; i++ {
			t := enginetest.At[prefillTile](p.tiles, i)
			at := [3]int32{t.seq, t.head, t.block}
			all, there := outputs[at]
			switch {
			case there != (t.part > 0), there && (t.part != all.part+1 || t.first != all.end || t.parts != all.parts || t.host != all.host), !there && t.first != 0, t.part >= t.parts:
				k.t.Fatalf("block %d has %+v, behind %+v", b, t, all)
			case t.parts == 1:
			case p.partials%16 != 0 || p.partials == 0 || p.counters == 0:
				k.t.Fatalf("parts, and nowhere to put them: %d, %d", p.partials, p.counters)
			case int(t.host+t.part) != b, t.part > 0 && i != begin, t.part == 0 && i != end-1, t.first%int32(kernel.tile.keys) != 0, t.end <= t.first:
				k.t.Fatalf("block %d has %+v as number %d of [%d,%d)", b, t, i, begin, end)
			}
			outputs[at] = *t
		}
	}
	for _, t := range outputs {
		if t.part != t.parts-1 {
			k.t.Fatalf("%+v is the last part", t)
		}
	}
}

// Launches of random steps suit each kind of GPU for which kernels differ, including those without an emulator.
func TestLaunches(t *testing.T) {
	for _, f := range enginetest.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			rng := reftest.Rand(t)
			plan := m.engine.NewPlan()
			types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
			var parts, both, shared, beside bool // required of some steps, if the GPU's kernels can
			all := func() bool {
				return shared && (parts || m.engine.blocks < 3) && (both && beside || !m.runsBeside())
			}
			for i := range reftest.AtLeast(enginetest.Fewer(reftest.Cases(t, 15, 300)), all) {
				kv := types[rng.IntN(3)]
				o := options{kv: kv, work: 2e5, longest: 800, dense: rng.IntN(2) == 0, mixed: rng.IntN(3) == 0}
				m.engine.choice, m.engine.Eager = 0, i%4 > 0
				var shape reftest.Shape
				switch i % 4 {
				case 0:
					shape = randomShape(rng, o)
				case 1:
					m.engine.choice, shape = enginetest.Pick(rng, takePrefill, takeBoth), prefillShape(rng, 300)
				case 2:
					m.engine.choice, shape = takeBoth, mixedShape(rng, 300)
				case 3:
					shape = forkShape(rng, 300, false)
					o.dense, o.forks, o.page, o.apart = false, true, enginetest.Pick(rng, 1, 3, 16, 16, 33), shape.Dim != shape.ValueDim
				}
				o.shape = &shape
				p := m.newProblem(t, rng, reftest.Normal, o)
				if i%4 == 0 {
					p.randomSchedule()
				}
				m.run(t, plan, p)
				if t.Failed() {
					t.Fatalf("case %d: %v", i, p)
				}
				both = both || plan.form.both
				parts = parts || slices.ContainsFunc(plan.prefilling.data, func(t prefillTile) bool { return t.parts > 1 })
				if plan.form.sharing.on() {
					shared = true
					beside = beside || plan.prefixes.plan.form.beside
				}
				p.close(t)
			}
			if !all() {
				t.Errorf("steps with parts of output tiles %v, both kinds of kernels %v, shared prefixes %v, these beside others %v", parts, both, shared, beside)
			}
			noError(t, plan.Close())
		})
	}
}
