//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"fmt"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

// The number of pages of a chunk selects the kernel.
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

// Output tiles of more than eight rows have a kernel of their own, if the GPU has one. So have keys in pages that are a
// power-of-two part or multiple of a chunk.
func TestFakeManyRows(t *testing.T) {
	for _, f := range enginetest.Fakes {
		if reftest.RaceEnabled && f.Capability != 90 {
			continue // one goroutine, as on the GPU that has all kernels
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
							case slices.Contains(packedDims, dim):
								name = fmt.Sprintf("packed_%s_%d", gpu.Name(kv), dim)
							case dim == 128 && rows > 8:
								name += "_many"
							case (dim == 64 || dim == 128) && pages > 0 && pages <= prefetchedEntries:
								name += "_paged"
							}
							g := paged(2*rows, 2, dim)
							g.Pages = g.Pages.As(kv)
							k := m.engine.find(&want{problem: &g, rows: rows, pages: pages})
							if k == nil || len(k.entries) != 1 || k.entries[0] != name {
								t.Errorf("%v of %d, %d rows, %d pages a chunk: %+v, want %s", kv, dim, rows, pages, k, name)
							}
						}
					}
				}
			}
		})
	}
}

func BenchmarkFakeQueue(b *testing.B) {
	m, _, _ := fakeGPU(b, 90, 132, 232448)
	benchmarkQueue(b, m)
}

func BenchmarkFakeBuild(b *testing.B) {
	m, _, _ := fakeGPU(b, 90, 132, 232448)
	benchmarkBuild(b, m)
}
