package attention

import (
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/lean"
	"gorgonia.org/leanattention/internal/reftest"
)

// testParts merges random states of any number of parts, some without keys. Memory around the results is unchanged.
func testParts(t *testing.T, m *machine, n int) {
	rng := reftest.Rand(t)
	for range n {
		p := Parts{Count: enginetest.Pick(rng, 1, 2, 3, 4, 9, 32, 33, 40), Rows: 1 + rng.IntN(9), Heads: 1 + rng.IntN(5), Dim: enginetest.Pick(rng, headDims...)}
		to := Merged{Rows: rng.IntN(p.Rows + 1), OutAt: attn.PackedRows(p.Heads, p.Dim), LSEAt: attn.PackedRows(p.Heads, 1)}
		if rng.IntN(2) == 0 {
			to.OutAt = attn.Strides{Row: (p.Heads*p.Dim + 1) * 4, Head: p.Dim + 4}
			to.LSEAt = attn.Strides{Row: p.Heads*2 + 3, Head: 2}
		}
		to.Out = gpu.Memory{DType: enginetest.Pick(rng, attn.Float32, attn.Float16, attn.BFloat16), Len: to.OutAt.Extent(p.Rows, p.Heads, p.Dim)}
		m.Poison(t, &to.Out)
		if rng.IntN(4) > 0 {
			to.LSE = gpu.Memory{DType: attn.Float32, Len: to.LSEAt.Extent(p.Rows, p.Heads, 1)}
			m.Poison(t, &to.LSE)
		}
		memory := enginetest.Poisoned(int(p.Bytes())/4, attn.Float32)
		copy(memory, p.Table())
		b, err := m.Dev.NewBuffer(p.Bytes())
		noError(t, err)
		states := make([][]lean.Normalized[float64], p.Rows*p.Heads)
		for i := range p.Count {
			out, lse := p.State(b, i)
			for at := range states {
				s := lean.Normalized[float64]{O: make([]float64, p.Dim), LSE: float64(float32(enginetest.Pick(rng, 1., 30) * rng.NormFloat64()))}
				for c := range s.O {
					s.O[c] = float64(float32(rng.NormFloat64()))
				}
				if rng.IntN(3) == 0 {
					clear(s.O)
					s.LSE = math.Inf(-1)
				}
				states[at] = append(states[at], s)
				for c, x := range s.O {
					enginetest.Put(memory[out.Offset:], at*p.Dim+c, attn.Float32, x)
				}
				enginetest.Put(memory[lse.Offset:], at, attn.Float32, s.LSE)
			}
		}
		noError(t, b.Upload(0, memory))
		noError(t, m.engine.Merge(m.Stream, &p, b, &to))
		m.Settle(t)

		got, logs, want := enginetest.Read(t, &to.Out), []byte(nil), make([]float64, p.Dim)
		if to.LSE.Buffer != nil {
			logs = enginetest.Read(t, &to.LSE)
		}
		near := func(what string, x, y, bound float64) {
			t.Helper()
			if !(math.Abs(x-y) <= bound) && x != y {
				t.Fatalf("%+v: %s is %v, want %v", p, what, x, y)
			}
		}
		unit := map[attn.DType]float64{attn.Float32: 1e-6, attn.Float16: 1e-3, attn.BFloat16: 8e-3}[to.Out.DType]
		written := 0
		for at := range to.Rows * p.Heads {
			row, head := at/p.Heads, at%p.Heads
			l := lean.MergeNormalized(want, states[at])
			for c, x := range want {
				near("an output", enginetest.Get(got, row*to.OutAt.Row+head*to.OutAt.Head+c, to.Out.DType), x, unit*(3+math.Abs(x)))
				written++
			}
			if logs != nil {
				near("a log-sum-exp", enginetest.Get(logs, row*to.LSEAt.Row+head*to.LSEAt.Head, attn.Float32), l, 1e-6*(5+math.Abs(l)))
			}
		}
		rest := 0
		for i := range to.Out.Len {
			if math.IsNaN(enginetest.Get(got, i, to.Out.DType)) {
				rest++
			}
		}
		if written+rest != to.Out.Len {
			t.Fatalf("%+v: %d outputs, %d untouched, of %d", p, written, rest, to.Out.Len)
		}
		noError(t, b.Close())
	}
}

func TestPartsLayout(t *testing.T) {
	p := Parts{Count: 3, Rows: 5, Heads: 2, Dim: 64}
	table := p.Table()
	ints := unsafe.Slice((*int32)(unsafe.Pointer(&table[0])), len(table)/4)
	slots, out, lse, end := p.at()
	for row := range 5 {
		begin, next := ints[row], ints[row+1]
		if next-begin != 2 {
			t.Errorf("row %d has slots [%d, %d)", row, begin, next)
		}
		for i := range int32(2) {
			if got := ints[int32(slots)/4+begin+i]; got != i*5+int32(row) {
				t.Errorf("row %d, part %d: state %d", row, i, got)
			}
		}
	}
	if int64(len(table)) > out || out+3*5*2*64*4 > lse || lse+3*5*2*4 > end || end != p.Bytes() {
		t.Errorf("a table of %d bytes, then at %d, %d, %d", len(table), out, lse, end)
	}
}
