//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"errors"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/reftest"
)

// fakeGPU is a machine without a GPU. When the test ends nothing may be left of it.
func fakeGPU(t testing.TB, capability, sms, shared int) (*machine, *fakedriver.Library, *twin) {
	t.Helper()
	lib := fakedriver.New(t)
	s := lib.State()
	s.Total, s.Major, s.Minor, s.SMs, s.Shared = 1<<32, int32(capability/10), int32(capability%10), int32(sms), int32(shared)
	s.Argument("lean_append", int(unsafe.Sizeof(appendParams{})))
	s.Argument("lean_", int(unsafe.Sizeof(params{})))
	s.Argument("unfused_", int(unsafe.Sizeof(unfusedParams{})))
	s.Argument("prefill_", int(unsafe.Sizeof(prefillParams{})))
	s.Argument("sample_", int(unsafe.Sizeof(sampleParams{})))
	real := Image
	Image = func(string, int) ([]byte, error) { return []byte("image"), nil }
	drv, err := cuda.LoadFrom(lib.Path)
	noError(t, err)
	dev, err := drv.Open(0)
	noError(t, err)
	e, err := New(dev)
	noError(t, err)
	e.eager = true
	stream, err := dev.NewStream()
	noError(t, err)
	k := &twin{t: t, rng: reftest.Rand(t), e: e}
	m := &machine{dev: dev, engine: e, stream: stream}
	m.settle = func(t testing.TB) {
		t.Helper()
		for _, l := range launches(lib.Log()) {
			k.run(l)
		}
		lib.Forget()
	}
	m.capture = func(t testing.TB, f func() error) func() error {
		t.Helper()
		lib.Forget()
		g, err := stream.Capture(f)
		noError(t, err)
		captured := launches(lib.Log())
		lib.Forget()
		return func() error {
			for _, l := range captured {
				k.run(l)
			}
			return stream.Launch(g)
		}
	}
	t.Cleanup(func() {
		Image = real
		if err := dev.Close(); err != nil && !errors.Is(err, cuda.ErrClosed) {
			t.Error(err)
		}
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d objects left in the driver, %d calls that would have crashed", lib.Live(), lib.Defects())
		}
	})
	return m, lib, k
}

var fakes = []struct {
	name                    string
	capability, sms, shared int
}{
	{"9.0", 90, 13, 232448},
	{"8.0", 80, 7, 166912},
	{"8.6", 86, 1, 101376},
	{"12.0", 120, 31, 101376},
}

// fewer is n, or what the race detector leaves time for.
func fewer(n int) int {
	if raceEnabled {
		return n / 10
	}
	return n
}

func TestFakeRandom(t *testing.T) {
	for _, f := range fakes {
		t.Run(f.name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.capability, f.sms, f.shared)
			testRandom(t, m, fewer(60), options{work: fewer(2e6), longest: 800})
		})
	}
}

func TestFakePrefill(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testPrefill(t, m, fewer(40), 300)
}

func TestFakeSchedules(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testSchedules(t, m, fewer(700))
}

func TestFakeRepeats(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testRepeats(t, m, 4, fewer(1e6), 800)
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
		element, dim int
		paged        bool
		tokens, want int
	}{
		{0, 64, true, 16, 4}, {0, 128, true, 16, 2}, {2, 64, true, 8, 2}, // chunks of 64, 32 and 16 keys
		{0, 64, true, 1, 64}, {0, 64, true, 64, 1}, {0, 128, true, 64, 1}, {0, 64, true, 1 << 20, 1},
		{0, 64, true, 48, 0}, {0, 64, true, 3, 0}, {0, 64, true, 96, 0}, {0, 64, false, 16, 0}, {0, 64, false, 1024, 0},
	} {
		s := m.engine.shape(c.element, c.dim)
		if got := s.pages(c.paged, c.tokens); got != c.want {
			t.Errorf("%s of %d, pages of %d tokens (%v): a chunk of %d lies in %d, want %d", elements[c.element].name, c.dim, c.tokens, c.paged, s.keys, got, c.want)
		}
	}
}

// Output tiles of more than eight rows have a kernel of their own, where there is one, and so
// have keys in pages of which a chunk is a power of two, or a part of one.
func TestFakeManyRows(t *testing.T) {
	for _, f := range fakes {
		t.Run(f.name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.capability, f.sms, f.shared)
			e := m.engine
			for i := range elements {
				has := f.capability == 90 && elements[i].bytes == 2
				for _, k := range []*cuda.Function{e.many[i], e.paged[i][0], e.paged[i][1]} {
					if (k != nil) != has {
						t.Errorf("%s: kernels for many rows and pages: %v", elements[i].name, !has)
					}
				}
				for j, dim := range headDims {
					for rows := 1; rows <= blockRows; rows++ {
						for _, pages := range []int{0, 1, 2, 4, 8, 16, 32} {
							shape, want := e.shape(i, dim), e.attend[i][j]
							switch {
							case !has:
							case dim == 128 && rows > 8:
								want = e.many[i]
							case dim == 64 && pages > 0 && pages <= openingEntries:
								want = e.paged[i][0]
							case dim == 128 && pages > 0 && pages <= openingEntries:
								want = e.paged[i][1]
							}
							if e.kernel(&shape, rows, pages) != want {
								t.Errorf("%s of %d, %d rows, %d pages a chunk: another kernel", elements[i].name, dim, rows, pages)
							}
						}
					}
				}
			}
			testManyRows(t, m, 200, 9, 8)
		})
	}
}

func TestFakeNeighbours(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testNeighbours(t, m)
}

func TestFakeGraph(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testGraph(t, m, 4, fewer(1000))
}

func TestFakeStreams(t *testing.T) {
	m, _, _ := fakeGPU(t, 90, 13, 232448)
	testStreams(t, m, 2, 20, options{kv: attn.Float16, work: fewer(1e6), longest: 2000})
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
