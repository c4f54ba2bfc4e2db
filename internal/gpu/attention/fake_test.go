//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"fmt"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// fakeGPU is a machine without a GPU, and what does its kernels' work.
func fakeGPU(t testing.TB, capability, sms, shared int) (*machine, *fakedriver.Library, *twin) {
	t.Helper()
	k := &twin{t: t, rng: reftest.Rand(t)}
	d, lib := testgpu.Fake(t, capability, sms, shared, k.run)
	s := lib.State()
	s.Argument(rotaryEntry, int(unsafe.Sizeof(rotaryParams{})))
	s.Argument("lean_append", int(unsafe.Sizeof(appendParams{})))
	s.Argument("lean_", int(unsafe.Sizeof(params{})))
	s.Argument("unfused_", int(unsafe.Sizeof(unfusedParams{})))
	s.Argument("prefill_", int(unsafe.Sizeof(prefillParams{})))
	s.Argument("prefix_gather", int(unsafe.Sizeof(prefixGatherParams{})))
	s.Argument("prefix_merge", int(unsafe.Sizeof(prefixMergeParams{})))
	e, err := New(d.Dev)
	noError(t, err)
	e.Eager, k.e = true, e
	return &machine{Device: d, engine: e}, lib, k
}

func TestFakeRandom(t *testing.T) {
	for _, f := range testgpu.Fakes {
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			testRandom(t, m, testgpu.Fewer(reftest.Cases(t, 25, 60)), options{work: testgpu.Fewer(2e6), longest: 800})
		})
	}
}

// onFakes runs f on each kind of GPU, with so many problems: a third on those but 9.0, which plan
// alike, and under the race detector on 9.0 alone.
func onFakes(t *testing.T, problems int, f func(t *testing.T, m *machine, problems int)) {
	for _, fake := range testgpu.Fakes {
		n := testgpu.Fewer(problems)
		if fake.Capability != 90 {
			if reftest.RaceEnabled {
				continue
			}
			n /= 3
		}
		t.Run(fake.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, fake.Capability, fake.SMs, fake.Shared)
			f(t, m, n)
		})
	}
}

// shorter is a context of n tokens, or of a third of them under the race detector.
func shorter(n int) int {
	if reftest.RaceEnabled {
		return n / 3
	}
	return n
}

func TestFakePrefill(t *testing.T) {
	onFakes(t, reftest.Cases(t, 5, 40), func(t *testing.T, m *machine, n int) {
		for _, take := range []choice{takeMany, takeBoth} {
			testPrefill(t, m, take, n, shorter(reftest.Cases(t, 90, 300)), false)
			testPrefillInstead(t, m, take, reftest.Cases(t, 1, 1000), shorter(reftest.Cases(t, 150, 300)))
		}
	})
}

func TestFakeMixed(t *testing.T) {
	onFakes(t, reftest.Cases(t, 4, 60), func(t *testing.T, m *machine, n int) { testMixed(t, m, n, shorter(reftest.Cases(t, 200, 400))) })
}

func TestFakeSchedules(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testSchedules(t, m, testgpu.Fewer(reftest.Cases(t, 300, 700)))
}

func TestFakeRepeats(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testRepeats(t, m, 4, testgpu.Fewer(1e6), 800)
}

func TestFakeAppend(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testAppend(t, m)
}

func TestFakeLargeQueries(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testLargeQueries(t, m)
}

// How many pages a chunk lies in decides which kernel reads them.
func TestFakeChunkPages(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	for _, c := range []struct {
		element      attn.DType
		dim          int
		paged        bool
		tokens, want int
	}{
		{attn.Float16, 64, true, 16, 4}, {attn.Float16, 128, true, 16, 2}, {attn.Float32, 64, true, 8, 2}, // chunks of 64, 32 and 16 keys
		{attn.Float16, 64, true, 1, 64}, {attn.Float16, 64, true, 64, 1}, {attn.Float16, 128, true, 64, 1}, {attn.Float16, 64, true, 1 << 20, 1},
		{attn.Float16, 64, true, 48, 0}, {attn.Float16, 64, true, 3, 0}, {attn.Float16, 64, true, 96, 0}, {attn.Float16, 64, false, 16, 0}, {attn.Float16, 64, false, 1024, 0},
	} {
		s := m.engine.shape(c.element, c.dim)
		if got := s.pages(c.paged, c.tokens); got != c.want {
			t.Errorf("%s of %d, pages of %d tokens (%v): a chunk of %d lies in %d, want %d", gpu.Name(c.element), c.dim, c.tokens, c.paged, s.keys, got, c.want)
		}
	}
}

// Output tiles of more than eight rows have a kernel of their own, where there is one, and so
// have keys in pages of which a chunk is a power of two, or a part of one.
func TestFakeManyRows(t *testing.T) {
	for _, f := range testgpu.Fakes {
		if reftest.RaceEnabled && f.Capability != 90 {
			continue // one goroutine, as on the GPU that has all of the kernels
		}
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			for _, kv := range gpu.Types {
				has := f.Capability == 90 && kv != attn.Float32
				for _, dim := range headDims {
					for rows := 1; rows <= BlockRows; rows++ {
						for _, pages := range []int{0, 1, 2, 4, 8, 16, 32} {
							name := fmt.Sprintf("lean_%s_%d", gpu.Name(kv), dim)
							switch {
							case !has:
							case dim == 128 && rows > 8:
								name += "_many"
							case (dim == 64 || dim == 128) && pages > 0 && pages <= prefetchedEntries:
								name += "_paged"
							}
							g := paged(2*rows, 2, dim)
							g.KV = kv
							k := m.engine.find(&want{problem: &g, rows: rows, pages: pages})
							if k == nil || len(k.entries) != 1 || k.entries[0] != name {
								t.Errorf("%v of %d, %d rows, %d pages a chunk: %+v, want %s", kv, dim, rows, pages, k, name)
							}
						}
					}
				}
			}
			testManyRows(t, m, 200, 9, 8)
			if f.Capability == 90 {
				testRow(t, m, 4, 2000)
			}
		})
	}
}

func TestFakeNeighbours(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testNeighbours(t, m)
}

func TestFakeGraph(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testGraph(t, m, 4, 0, testgpu.Fewer(1000), 4)
}

func TestFakeStreams(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testStreams(t, m, 2, 20, options{kv: attn.Float16, work: testgpu.Fewer(1e6), longest: 2000})
}

func TestFakeManyLaunches(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testManyLaunches(t, m, 2)
}

func BenchmarkFakeQueue(b *testing.B) {
	m, _, _ := fakeGPU(b, 90, 132, 232448)
	benchmarkQueue(b, m)
}

func BenchmarkFakeBuild(b *testing.B) {
	m, _, _ := fakeGPU(b, 90, 132, 232448)
	benchmarkBuild(b, m)
}
