package matmul

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// tilesInUse returns the kernels for many rows, and skips the test if there are none.
func tilesInUse(t testing.TB) *Set {
	t.Helper()
	k := Tiers[cpu.InUse()]
	if k == nil || reftest.RaceEnabled {
		t.Skip("all rows are few, or somebody looks for races in assembly")
	}
	return k
}

// waysOf are what a type's weights can be multiplied with.
func waysOf(t *Set, d attn.DType) []*Way {
	if w := t.Rounded[d]; w != nil {
		return []*Way{&t.Ways[d], w}
	}
	return []*Way{&t.Ways[d]}
}

// guardedRows returns guarded memory of some rows that lie stride bytes apart.
func guardedRows(t testing.TB, rng *rand.Rand, d attn.DType, rows, n int) (at unsafe.Pointer, stride int) {
	t.Helper()
	pad := rng.IntN(3)
	stride = (n + pad) * d.Size()
	mem, free := cputest.Guarded(t, rows*stride-pad*d.Size())
	t.Cleanup(free)
	b := cpu.Buffer{DType: d, Ptr: mem, Len: rows*(n+pad) - pad}
	for i := range rows * n {
		v := cputest.Rounded(rng.NormFloat64()*math.Exp2(float64(rng.IntN(20)-10)), d)
		cputest.Store(b.Ptr, b.DType, i/n*(n+pad)+i%n, []float32{float32(v)})
	}
	return mem, stride
}

// TestTilePacking: what packs rows of x and weights writes the bits of the Go kernel, and nothing else.
func TestTilePacking(t *testing.T) {
	k, rng := tilesInUse(t), reftest.Rand(t)
	inGo := map[attn.DType]func(*PackArgs){attn.Float32: packF32Go, attn.Float16: packF16Go, attn.BFloat16: packBF16Go}
	pairs := map[attn.DType]func(*PackArgs){attn.Float32: pairsF32Go, attn.Float16: pairsF16Go, attn.BFloat16: pairsBF16Go}
	columnsOf := map[attn.DType]func(*PackArgs){attn.Float16: columnsF16Go, attn.BFloat16: columnsBF16Go}
	splits := []func(*PackArgs){1: splitX1Go, splitX2Go, splitX3Go}
	for _, d := range cputest.WeightTypes {
		for _, w := range waysOf(k, d) {
			for _, n := range []int{1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100} {
				for rows := 1; rows <= w.Rows; rows++ {
					src, stride := guardedRows(t, rng, d, rows, n)
					a := PackArgs{Src: src, SrcRow: stride, Rows: rows, N: n, DstStep: 4 * (w.Rows + rng.IntN(20))}
					size, goKernel := a.DstStep*(n-1)+4*w.Rows, inGo[d]
					if w.WParts > 0 {
						a.DstPart, goKernel = StepBytes, pairs[d]
						a.DstStep = (w.WParts + rng.IntN(2)) * StepBytes
						size = (n-1)/StepDepth*a.DstStep + w.WParts*StepBytes
					}
					// Of steps, what belongs to rows behind the last may be anything.
					samePacked(t, fmt.Sprintf("%v %v, %d rows of %d", cpu.InUse(), d, rows, n), &a, size, w.Pack, goKernel, w.WParts > 0 && rows < w.Rows)
				}
			}
			for _, n := range []int{1, 2, 15, 16, 17, 31, 32, 33, 64, 95} {
				if w.Columns == nil {
					break
				}
				src, stride := guardedRows(t, rng, d, n, StepRows)
				a := PackArgs{Src: src, SrcRow: stride, Rows: StepRows, N: n, DstPart: StepBytes, DstStep: (w.WParts + rng.IntN(2)) * StepBytes}
				size := (n-1)/StepDepth*a.DstStep + w.WParts*StepBytes
				samePacked(t, fmt.Sprintf("%v %v, %d values", cpu.InUse(), d, n), &a, size, w.Columns, columnsOf[d], false)
			}
			for _, n := range []int{1, 15, 16, 17, 31, 32, 33, 64, 95} {
				for rows := 1; rows <= StepRows && w.Split != nil; rows++ {
					src, stride := guardedRows(t, rng, attn.Float32, rows, n)
					for _, odd := range []float64{0, math.Inf(1), math.NaN(), 1e-40, math.MaxFloat32} {
						if odd != 0 {
							*(*float32)(unsafe.Add(src, rng.IntN(rows)*stride+4*rng.IntN(n))) = float32(odd)
						}
						a := PackArgs{Src: src, SrcRow: stride, Rows: rows, N: n, DstPart: StepBytes, DstStep: (w.XParts + rng.IntN(2)) * StepBytes}
						size := (n-1)/StepDepth*a.DstStep + w.XParts*StepBytes
						samePacked(t, fmt.Sprintf("%v x in %d, %d rows of %d", cpu.InUse(), w.XParts, rows, n), &a, size, w.Split, splits[w.XParts], false)
					}
				}
			}
		}
	}
}

// samePacked compares what two kernels write into memory of the given size. With loose set, 4 bytes that the Go kernel
// leaves alone may be anything.
func samePacked(t *testing.T, name string, a *PackArgs, size int, kernel, goKernel func(*PackArgs), loose bool) {
	t.Helper()
	const untouched = 0xa5
	var got [2][]byte
	for i, f := range []func(*PackArgs){kernel, goKernel} {
		mem, free := cputest.Guarded(t, size)
		defer free()
		got[i] = unsafe.Slice((*byte)(mem), size)
		copy(got[i], bytes.Repeat([]byte{untouched}, size))
		b := *a
		b.Dst = mem
		f(&b)
	}
	for i, v := range got[0] {
		w := got[1][i]
		word := got[1][i&^1:][:2]
		if v != w && !(loose && bytes.Equal(got[1][i&^3:][:4], bytes.Repeat([]byte{untouched}, 4))) && !(isNaN16(word) && isNaN16(got[0][i&^1:][:2])) {
			t.Fatalf("%s: byte %d is %#x, of the Go kernel %#x", name, i, v, w)
		}
	}
}

func isNaN16(b []byte) bool { return (half.BFloat16(b[0]) | half.BFloat16(b[1])<<8).IsNaN() }

// TestTileKernels: the kernels in use are within the rounding of sums of the Go kernels, for all numbers of rows.
func TestTileKernels(t *testing.T) {
	k, rng := tilesInUse(t), reftest.Rand(t)
	for _, d := range cputest.WeightTypes {
		for _, w := range waysOf(k, d) {
			for rows, kernel := range w.Mul {
				if kernel == nil {
					continue
				}
				for _, n := range []int{1, 2, 3, 4, 5, 7, 8, 9, 31, 64, 65} {
					testTile(t, rng, k, w, rows, n)
				}
			}
		}
	}
}

func testTile(t *testing.T, rng *rand.Rand, k *Set, w *Way, rows, n int) {
	t.Helper()
	const pad = 3
	tiles, tall := 1, 1
	if w.Split != nil {
		tiles, tall = 1+rng.IntN(3), 1+rng.IntN(2)
	}
	outs := tiles * k.Outs
	a := Args{N: n, Rows: rows, outs: k.Outs, xParts: w.XParts, wParts: w.WParts, YRow: 4 * (outs + pad), More: rng.IntN(2), Tiles: tiles, Tall: tall}
	a.YStep = rows * a.YRow
	goKernel, terms := tileF32Go, n
	var signs []func() // take the signs of x and w away
	numbers := func(d attn.DType, rows, n int) (unsafe.Pointer, int) {
		at, stride := guardedRows(t, rng, d, rows, n)
		signs = append(signs, func() {
			for r := range rows {
				for i := range n * d.Size() {
					if i%d.Size() == d.Size()-1 {
						*(*byte)(unsafe.Add(at, r*stride+i)) &= 0x7f
					}
				}
			}
		})
		return at, stride
	}
	if w.Split == nil {
		a.X, a.XRow = numbers(attn.Float32, rows, n)
		a.W, _ = numbers(attn.Float32, 1, n*k.Outs)
	} else {
		goKernel, terms = tilePartsGo, n*StepDepth*w.XParts*w.WParts
		a.XRow = n * w.XParts * StepBytes
		a.XStep = 2 * a.XRow
		a.X, _ = numbers(attn.BFloat16, 1, tall*n*w.XParts*StepBytes)
		a.W, _ = numbers(attn.BFloat16, 1, tiles*n*w.WParts*StepBytes)
		a.WStep = 2 * n * w.WParts * StepBytes
	}
	was := make([]float32, tall*rows*(outs+pad))
	for i := range was {
		was[i] = rng.Float32()
	}
	run := func(kernel func(*Args)) []float32 {
		mem, free := cputest.Guarded(t, 4*(len(was)-pad))
		t.Cleanup(free)
		y := unsafe.Slice((*float32)(mem), len(was)-pad)
		copy(y, was)
		b := a
		b.Y = mem
		kernel(&b)
		return y
	}
	got, want := run(w.Mul[rows]), run(goKernel)
	for _, take := range signs {
		take()
	}
	for i, size := range run(goKernel) {
		if i%(outs+pad) >= outs {
			if got[i] != was[i] {
				t.Fatalf("%v, %d rows: element %d was written", cpu.InUse(), rows, i)
			}
		} else if diff := math.Abs(float64(got[i] - want[i])); !(diff <= float64(terms+1)*0x1p-23*float64(size)) {
			t.Fatalf("%v, %d rows of %d: element %d is %v, of the Go kernel %v", cpu.InUse(), rows, n, i, got[i], want[i])
		}
	}
}
