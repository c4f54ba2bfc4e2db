package attention

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestAppend(t *testing.T) {
	for range 30 {
		testAppend[float32](t, 20, 30)
		testAppend[float64](t, 20, 30)
	}
	// Enough elements for four threads.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	for range 4 {
		testAppend[float32](t, 64, 300)
		testAppend[float64](t, 64, 300)
	}
}

// testAppend stores rows of up to longest elements, and `many` rows of one sequence.
func testAppend[F cpu.Real](t *testing.T, longest, many int) {
	var e cpu.Engine
	defer e.Close()
	rng := reftest.Rand(t)
	l := randomLayout(rng)
	heads, dim := 1+rng.IntN(4), longest-rng.IntN(20)
	g := attn.Problem{KVHeads: heads, PageTokens: l.page}
	at := pageStrides(l, heads, dim, rng.IntN(2))
	from := attn.Strides{Row: heads*dim + rng.IntN(3), Head: dim} // token-major rows: the usual case
	rows := many + 30
	if rng.IntN(3) == 0 {
		from = attn.Strides{Row: dim, Head: rows*dim + rng.IntN(3)}
	}

	seqs := []attn.Sequence{
		{Row: 3, Queries: 1, Keys: 1 + rng.IntN(50)},
		{Row: 20, Queries: many, Keys: many + rng.IntN(2)*rng.IntN(100)},
		{Row: 0, Queries: 0, Keys: 7},
		{Row: 10, Queries: 5, Keys: 5},
	}
	pool := 0
	for _, q := range seqs {
		pool += attn.Ceil(q.Keys, l.page)
	}
	free := rng.Perm(pool)
	for i := range seqs {
		for range attn.Ceil(seqs[i].Keys, l.page) {
			seqs[i].Pages = append(seqs[i].Pages, int32(free[0]))
			free = free[1:]
		}
	}
	src := make([]F, rows*max(from.Row, dim)+heads*max(from.Head, dim))
	for i := range src {
		src[i] = F(rng.NormFloat64() * math.Exp2(float64(rng.IntN(40)-20)))
	}
	src[rng.IntN(len(src))] = F(math.Inf(-1))
	// Values that would be half-way cases of float16 and bfloat16 if they were rounded to float32 first.
	src[seqs[3].Row*from.Row] = F(1 + 0x1p-11 + 0x1p-40)
	src[(seqs[3].Row+1)*from.Row] = F(1 + 0x1p-8 + 0x1p-40)
	var keep problem[F]
	dst := keep.buffer(0, l.dtype, pool*at.Page)

	if err := Append(&e, &g, seqs, dst, at, dim, src, from); err != nil {
		t.Fatal(err)
	}

	owned := make([]bool, dst.Len)
	for _, q := range seqs {
		for i := range q.Queries {
			key := q.Keys - q.Queries + i
			for h := range heads {
				for x := range dim {
					e := int(q.Pages[key/l.page])*at.Page + key%l.page*at.Row + h*at.Head + x
					owned[e] = true
					want := cputest.Rounded(float64(src[(q.Row+i)*from.Row+h*from.Head+x]), l.dtype)
					if got := cputest.Load(dst.Ptr, dst.DType, e); got != want {
						t.Fatalf("%v: token %d, head %d, element %d: got %v, want %v", l, i, h, x, got, want)
					}
				}
			}
		}
	}
	for i, mine := range owned {
		if !mine && !math.IsNaN(cputest.Load(dst.Ptr, dst.DType, i)) {
			t.Fatalf("%v: element %d, which is unassigned, was written", l, i)
		}
	}
}

func TestAppendErrors(t *testing.T) {
	const dim, heads, page = 4, 2, 8
	mem := make([]float32, 3*page*heads*dim)
	type args struct {
		g    attn.Problem
		seqs []attn.Sequence
		dst  cpu.Buffer
		at   attn.PageStrides
		dim  int
		src  []float32
		from attn.Strides
	}
	for name, c := range map[string]struct {
		change func(*args)
		want   error
	}{
		"as it should be":              {func(a *args) {}, nil},
		"no heads":                     {func(a *args) { a.g.KVHeads = 0 }, attn.ErrShape},
		"no page size":                 {func(a *args) { a.g.PageTokens = 0 }, attn.ErrShape},
		"no dim":                       {func(a *args) { a.dim = 0 }, attn.ErrShape},
		"negative source stride":       {func(a *args) { a.from.Head = -1 }, attn.ErrShape},
		"negative stride":              {func(a *args) { a.at.Row = -1 }, attn.ErrShape},
		"unknown dtype":                {func(a *args) { a.dst.DType = 9 }, attn.ErrDType},
		"nil buffer":                   {func(a *args) { a.dst.Ptr = nil }, attn.ErrShape},
		"negative length":              {func(a *args) { a.dst.Len = -1 }, attn.ErrShape},
		"unaligned":                    {func(a *args) { a.dst.Ptr = unsafe.Add(a.dst.Ptr, 2); a.dst.Len-- }, attn.ErrShape},
		"buffer one too short":         {func(a *args) { a.dst.Len-- }, attn.ErrPage},
		"source one too short":         {func(a *args) { a.src = a.src[:len(a.src)-1] }, attn.ErrShape},
		"more tokens than keys":        {func(a *args) { a.seqs[1].Keys = 2 }, attn.ErrShape},
		"negative row":                 {func(a *args) { a.seqs[1].Row = -1 }, attn.ErrShape},
		"negative count":               {func(a *args) { a.seqs[1].Queries = -1 }, attn.ErrShape},
		"row out of range":             {func(a *args) { a.seqs[1].Row = math.MaxInt - 1 }, attn.ErrShape},
		"too few pages":                {func(a *args) { a.seqs[1].Pages = a.seqs[1].Pages[:1] }, attn.ErrPage},
		"page beyond the buffer":       {func(a *args) { a.seqs[1].Pages[1] = 3 }, attn.ErrPage},
		"negative page":                {func(a *args) { a.seqs[1].Pages[1] = -1 }, attn.ErrPage},
		"a page number that overflows": {func(a *args) { a.at.Page = math.MaxInt }, attn.ErrPage},
		"nonsense in pages that are not written": {func(a *args) {
			a.seqs[1].Pages[0] = 1 << 30
			a.seqs[1].Pages = append(a.seqs[1].Pages, -5)
		}, nil},
		"no tokens and no pages": {func(a *args) { a.seqs[0] = attn.Sequence{Keys: 100} }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range mem {
				mem[i] = float32(i)
			}
			before := slices.Clone(mem)
			a := args{
				g: attn.Problem{KVHeads: heads, PageTokens: page},
				seqs: []attn.Sequence{
					{Row: 0, Queries: 1, Keys: 1, Pages: []int32{1}},
					{Row: 1, Queries: 3, Keys: 12, Pages: []int32{0, 2}},
				},
				dst: cpu.Buffer{DType: attn.Float32, Ptr: unsafe.Pointer(&mem[0]), Len: len(mem)},
				at:  attn.PageStrides{Page: page * heads * dim, Head: dim * page, Row: dim}, dim: dim,
				src: make([]float32, 4*heads*dim), from: attn.Strides{Row: heads * dim, Head: dim},
			}
			// The last row of the last page is the buffer's last row only if all 8 slots are used.
			a.seqs[1].Keys = 16
			c.change(&a)
			err := Append(cpu.Default(), &a.g, a.seqs, a.dst, a.at, a.dim, a.src, a.from)
			if !errors.Is(err, c.want) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			if err != nil && !slices.Equal(mem, before) {
				t.Fatal("something was written")
			}
		})
	}
}

// BenchmarkAppend measures storing the keys of a prompt's chunk.
func BenchmarkAppend(b *testing.B) {
	for _, d := range []attn.DType{attn.Float32, attn.Float16, attn.BFloat16} {
		for _, procs := range []int{1, runtime.GOMAXPROCS(0)} {
			b.Run(fmt.Sprintf("%v/threads=%d", d, procs), func(b *testing.B) {
				defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(procs))
				const rows, heads, dim, page = 512, 32, 64, 16
				g := attn.Problem{KVHeads: heads, PageTokens: page}
				at := attn.PageStrides{Page: heads * page * dim, Head: page * dim, Row: dim}
				dst := cpu.Buffer{DType: d, Ptr: cputest.Noise(d, 4*rows*heads*dim), Len: 4 * rows * heads * dim}
				src := make([]float32, rows*heads*dim)
				for i := range src {
					src[i] = rand.Float32() - 0.5
				}
				seqs := make([][]attn.Sequence, 4) // more than a cache holds
				for i := range seqs {
					q := attn.Sequence{Queries: rows, Keys: rows}
					for _, p := range rand.Perm(rows / page) {
						q.Pages = append(q.Pages, int32(i*rows/page+p))
					}
					seqs[i] = []attn.Sequence{q}
				}
				var e cpu.Engine
				defer e.Close()
				i := 0
				for b.Loop() {
					if err := Append(&e, &g, seqs[i%4], dst, at, dim, src, attn.Strides{Row: heads * dim, Head: dim}); err != nil {
						b.Fatal(err)
					}
					i++
				}
				b.ReportMetric(b.Elapsed().Seconds()/float64(b.N)/float64(len(src))*1e9, "ns/element")
			})
		}
	}
}
