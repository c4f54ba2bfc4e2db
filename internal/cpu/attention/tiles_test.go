//go:build amd64 && gc && !noasm && linux

package attention

import (
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// tileTest draws a kernel call for tile registers, with peaked scores if peaked.
func tileTest(rng *rand.Rand, peaked bool) *call[float32] {
	dims := []int{32, 64, 96, 128}
	c := newCall[float32](rng, attn.BFloat16, 3+rng.IntN(14), 64+rng.IntN(400), dims[rng.IntN(4)], dims[rng.IntN(4)], false)
	if peaked {
		for i := range c.q {
			c.q[i] *= 8
		}
	}
	return c
}

// One key has nearly all weight.
func TestTilesPeaked(t *testing.T) {
	needTiles(t)
	rng := reftest.Rand(t)
	for range 100 {
		testKernel(t, attn.BFloat16, tileTest(rng, true))
	}
}

func needTiles(t *testing.T) {
	t.Helper()
	if cpu.InUse() != cpu.TierAMX {
		t.Skip("no tile registers in use")
	}
}

// Queries are split into three numbers whose sum is exact.
func TestQueryTiles(t *testing.T) {
	needTiles(t)
	rng := reftest.Rand(t)
	for range 100 {
		rows, dim := 1+rng.IntN(16), 32*(1+rng.IntN(4))
		q, tiles := make([]float32, rows*dim), make([]half.BFloat16, 48*dim)
		for i := range q {
			q[i] = float32(rng.NormFloat64() * math.Exp2(float64(rng.IntN(160)-80)))
		}
		queryTilesBF16AMX((*float32)(unsafe.Pointer(&tiles[0])), &q[0], rows, dim)
		for r := range rows {
			for i := range dim {
				var sum float64
				for p := range 3 {
					sum += float64(tiles[32*(48*(i/32)+16*p+i%32/2)+2*r+i%2].Float32())
				}
				if want := float64(q[r*dim+i]); sum != want {
					t.Fatalf("row %d, element %d: %v, want %v", r, i, sum, want)
				}
			}
		}
	}
}

// Signals, and threads that share a core, preserve each other's tile registers: the bits are the same every time.
func TestTilesInterrupted(t *testing.T) {
	needTiles(t)
	rng := reftest.Rand(t)
	stop := make(chan struct{})
	var workers, signals sync.WaitGroup
	signals.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				// The runtime's own preemption signal; the runtime tolerates further ones.
				if err := syscall.Kill(os.Getpid(), syscall.SIGURG); err != nil {
					t.Error(err)
				}
				runtime.Gosched()
			}
		}
	})
	for range 4 * runtime.GOMAXPROCS(0) {
		c := tileTest(rng, false)
		workers.Go(func() {
			run := func() []float32 {
				o, m, l := clone(c.o), clone(c.m), clone(c.l)
				call := c.t
				call.O, call.M, call.L = unsafe.Pointer(&o[0]), unsafe.Pointer(&m[0]), unsafe.Pointer(&l[0])
				kernels32[cpu.TierAMX][attn.BFloat16](&call)
				return append(append(o, m...), l...)
			}
			want := run()
			for begin := time.Now(); time.Since(begin) < 300*time.Millisecond; {
				for i, x := range run() {
					if x != want[i] {
						t.Errorf("element %d: %v, then %v", i, want[i], x)
						return
					}
				}
			}
		})
	}
	workers.Wait()
	close(stop)
	signals.Wait()
}
