package layers

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestGPULoss(t *testing.T) {
	m, d := realDecoder(t)
	testLoss(t, m, d, enginetest.OrShort(40, 6), 1000)
	testTableGradient(t, m, d, enginetest.OrShort(40, 4))
	testLossRefuses(t, m, d)
}

// TestGPULossRows has no product: racecheck fails at products by warp groups.
func TestGPULossRows(t *testing.T) {
	m, d := realDecoder(t)
	testLossRows(t, m, d, enginetest.OrShort(60, 12))
}

// testLossRows: the loss of given logits, and their gradients of 16 bits and of float32, with and without the loss, against float64.
func testLossRows(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		o := Loss{Products: enginetest.Pick(rng, attn.Float16, attn.BFloat16), Rows: enginetest.Pick(rng, 1, 5), Width: 8, Vocabulary: enginetest.Pick(rng, 1, 3, 33, 300, 1100)}
		size, wide := o.Vocabulary, o.wide()
		logits := m.random(t, rng, attn.Float32, o.Rows*wide, enginetest.Pick(rng, 0, 1, 30.))
		b, dy := m.random(t, rng, attn.Float32, size, 1), m.random(t, rng, attn.Float32, o.Rows, 1)
		targets := make([]int, o.Rows)
		for r := range targets {
			targets[r] = rng.IntN(size+1) - 1
		}
		o.Targets, o.Y = m.putIDs(t, targets), m.empty(t, o.Rows)
		if i%2 == 0 {
			o.B = b.Memory
		} else {
			b.x = make([]float64, size)
		}
		grads, rounded := o, m.random(t, rng, o.Products, o.Rows*wide, 1).Memory
		grads.DY = dy.Memory
		noError(t, d.lossOfRows(m.Stream, &o, 0, o.Rows, logits.Memory, gpu.Memory{}))
		if i%3 == 0 { // the loss is not known
			grads.Y = gpu.Memory{}
		}
		noError(t, d.lossOfRows(m.Stream, &grads, 0, o.Rows, logits.Memory, rounded))
		noError(t, d.lossOfRows(m.Stream, &grads, 0, o.Rows, logits.Memory, gpu.Memory{})) // overwrites logits
		m.Settle(t)
		loss, short, long := enginetest.Read(t, &o.Y), enginetest.Read(t, &rounded), enginetest.Read(t, &logits.Memory)
		unit, least := 0x1p-8, 0x1p-120 // of a rounded number
		if o.Products == attn.Float16 {
			unit, least = 0x1p-11, 0x1p-25
		}
		for r, target := range targets {
			x, top, sum := make([]float64, size), math.Inf(-1), 0.0
			for j := range x {
				x[j] = float64(float32(logits.x[r*wide+j]) + float32(b.x[j]))
				top = max(top, x[j])
			}
			for _, v := range x {
				sum += math.Exp(v - top)
			}
			if want := top + math.Log(sum) - x[max(target, 0)]; target >= 0 {
				if v := enginetest.Get(loss, r, attn.Float32); !(math.Abs(v-want) <= 0x1p-20*(1+math.Abs(want)+math.Abs(top))) {
					t.Fatalf("row %d, %d tokens: the loss is %v, want %v", r, size, v, want)
				}
			} else if v := enginetest.Get(loss, r, attn.Float32); v != 0 {
				t.Fatalf("row %d without a target: the loss is %v", r, v)
			}
			for j := range wide {
				want, off := 0.0, 0.0
				if j < size && target >= 0 {
					p := math.Exp(x[j]-top) / sum
					want = dy.x[r] * p
					if off = math.Abs(dy.x[r]) * (p*0x1p-17*(1+math.Abs(top)) + 0x1p-120); j == target {
						want -= dy.x[r]
						off += math.Abs(dy.x[r]) * 0x1p-23
					}
				}
				if v := enginetest.Get(long, r*wide+j, attn.Float32); j < size && !(math.Abs(v-want) <= off) {
					t.Fatalf("row %d, %d tokens: the gradient of logit %d is %v, want %v", r, size, j, v, want)
				}
				if v := enginetest.Get(short, r*wide+j, o.Products); !(math.Abs(v-want) <= off+math.Abs(want)*unit+least) {
					t.Fatalf("row %d, %d tokens: the rounded gradient of logit %d is %v, want %v", r, size, j, v, want)
				}
			}
		}
		for _, x := range []gpu.Memory{logits.Memory, b.Memory, dy.Memory, rounded, o.Targets, o.Y} {
			noError(t, x.Buffer.Close())
		}
	}
}

// putIDs copies indices to the GPU.
func (m *machine) putIDs(t testing.TB, ids []int) gpu.Memory {
	data := make([]byte, 4*len(ids))
	for i, id := range ids {
		binary.LittleEndian.PutUint32(data[4*i:], uint32(int32(id)))
	}
	return m.Put(t, data, attn.Float32)
}

// testLoss: loss and gradients against float64, in one piece and in several, with rows that do not count, targets outside of the
// vocabulary, peaked logits and memory that begins anywhere; twice the same bits.
func testLoss(t *testing.T, m *machine, d *Engine, cases, most int) {
	rng := reftest.Rand(t)
	defer func(least int) { d.logits, d.leastHopper = 0, least }(d.leastHopper)
	rounded := 0
	for i := range reftest.AtLeast(cases, func() bool { return rounded > 0 }) {
		o := Loss{Products: enginetest.Pick(rng, attn.Float32, attn.Float32, attn.Float16, attn.BFloat16), Rows: enginetest.Pick(rng, 1, 5, 32, lossRows), Width: enginetest.Pick(rng, 1, 7, 16, 24), Vocabulary: enginetest.Pick(rng, 1, 3, 33, 256, 300, 1+rng.IntN(most))}
		d.logits, d.leastHopper = 0, enginetest.Pick(rng, 1, leastHopper)
		if i%3 == 0 { // pieces
			d.logits, o.Rows = 1, enginetest.Pick(rng, lossRows+1, 2*lossRows, 2*lossRows+5)
		}
		bias, outside, before := i%2 == 0, i%5 == 4, i%4
		x, w := m.random(t, rng, attn.Float32, before+o.Rows*o.Width, enginetest.Pick(rng, 0, 1, 30.)), m.random(t, rng, attn.Float32, o.Vocabulary*o.Width, 1)
		b, dy := m.random(t, rng, attn.Float32, o.Vocabulary, 1), m.random(t, rng, attn.Float32, o.Rows, 1)
		targets := make([]int, o.Rows)
		for r := range targets {
			targets[r] = rng.IntN(o.Vocabulary+1) - 1
		}
		if outside {
			targets[rng.IntN(o.Rows)] = enginetest.Pick(rng, -2, o.Vocabulary, math.MaxInt32, math.MinInt32)
		}
		o.X, o.W, o.Targets, o.Y, o.Scratch = x.Memory, w.Memory, m.putIDs(t, targets), m.empty(t, o.Rows), m.empty(t, m.lossScratch(t, d, &o))
		o.X.Offset, o.X.Len = o.X.Offset+4*int64(before), o.Rows*o.Width
		if bias {
			o.B = b.Memory
		}
		if o.rounds() && o.aligned() {
			rounded++
		}
		grads := o
		grads.DY, grads.DX, grads.DW, grads.DB = dy.Memory, m.empty(t, o.Rows*o.Width), m.empty(t, o.Vocabulary*o.Width), m.empty(t, o.Vocabulary)
		if i%3 > 0 { // the loss is not known
			grads.Y = gpu.Memory{}
		}
		run := func() (all [][]byte) {
			noError(t, d.Loss(m.Stream, &o))
			noError(t, d.Loss(m.Stream, &grads))
			m.Settle(t)
			for _, x := range []*gpu.Memory{&o.Y, &grads.DX, &grads.DW, &grads.DB} {
				all = append(all, enginetest.Read(t, x))
			}
			return all
		}
		got := run()
		if !slices.EqualFunc(got, run(), bytes.Equal) {
			t.Fatalf("%d rows of %d, %d tokens: other bits in the second run", o.Rows, o.Width, o.Vocabulary)
		}
		if !bias {
			b.x = make([]float64, o.Vocabulary)
		}
		want := lossOf(&o, x.x[before:], w.x, b.x, dy.x, targets)
		for which, name := range []string{"loss", "dx", "dw", "db"} {
			if name == "db" && !bias {
				continue
			}
			for at, want := range want[which] {
				if v := enginetest.Get(got[which], at, attn.Float32); math.IsNaN(want.x) != math.IsNaN(v) || math.Abs(v-want.x) > want.off {
					t.Fatalf("%d rows of %d, %d tokens, bias %v: %s[%d] is %v, want %v within %v", o.Rows, o.Width, o.Vocabulary, bias, name, at, v, want.x, want.off)
				}
			}
		}
		for _, x := range []gpu.Memory{x.Memory, w.Memory, b.Memory, dy.Memory, o.Targets, o.Y, o.Scratch, grads.DX, grads.DW, grads.DB} {
			noError(t, x.Buffer.Close())
		}
	}
}

func (m *machine) lossScratch(t testing.TB, d *Engine, o *Loss) int {
	n, err := d.LossScratch(o)
	noError(t, err)
	return n
}

// expected is a number, and the largest difference that a result may have from the number.
type expected struct{ x, off float64 }

// lossOf returns the loss and the gradients of x, w and b in float64.
func lossOf(o *Loss, x, w, b, dy []float64, targets []int) (want [4][]expected) {
	const unit, least = 0x1p-23, 0x1p-125 // weights and products below least may be zero
	lost, floor := 0x1p-18, 0.0           // of a product, and of an operand besides
	if o.rounds() && o.aligned() {
		if lost = 2*0x1p-8 + 0x1p-15; o.Products == attn.Float16 {
			lost, floor = 2*0x1p-11+0x1p-18, 0x1p-25
		}
	}
	product := lost + float64(o.Width)*unit // of the sum of absolute products
	for i, n := range []int{o.Rows, o.Rows * o.Width, o.Vocabulary * o.Width, o.Vocabulary} {
		want[i] = make([]expected, n)
	}
	logits := make([]float64, o.Vocabulary)
	for r, target := range targets {
		if target == -1 {
			continue
		}
		top, sum, off := math.Inf(-1), 0.0, 0.0
		for j := range logits {
			logits[j] = b[j]
			size := math.Abs(b[j]) * unit
			for k := range o.Width {
				p := x[r*o.Width+k] * w[j*o.Width+k]
				logits[j] += p
				size += math.Abs(p)*product + floor*(math.Abs(x[r*o.Width+k])+math.Abs(w[j*o.Width+k]))
			}
			top, off = max(top, logits[j]), max(off, size)
		}
		off = 2*off + 8*unit
		for _, l := range logits {
			sum += math.Exp(l - top)
		}
		bad := target < 0 || target >= o.Vocabulary
		if want[0][r] = (expected{math.NaN(), 0}); !bad {
			l := top + math.Log(sum) - logits[target]
			want[0][r] = expected{l, off + unit*(math.Abs(l)+math.Abs(top))}
		}
		for j, l := range logits {
			p := math.Exp(l-top) / sum
			e := expected{dy[r] * p, math.Abs(dy[r]) * (p*(math.Expm1(2*off)+16*unit) + least)}
			if j == target {
				e.x, e.off = e.x-dy[r], e.off+unit*math.Abs(dy[r])
			}
			if bad {
				e.x = math.NaN()
			}
			size := func(sums int) float64 {
				return e.off + (math.Abs(e.x)+e.off)*(lost+float64(sums)*unit) + least + floor*math.Abs(dy[r])
			}
			for k := range o.Width {
				dx, dw := &want[1][r*o.Width+k], &want[2][j*o.Width+k]
				wx, xx := w[j*o.Width+k], x[r*o.Width+k]
				dx.x, dx.off = dx.x+e.x*wx, dx.off+math.Abs(wx)*size(o.Vocabulary)
				dw.x, dw.off = dw.x+e.x*xx, dw.off+math.Abs(xx)*size(o.Rows)
			}
			db := &want[3][j]
			db.x, db.off = db.x+e.x, db.off+size(o.Rows)
		}
	}
	for i := range want {
		for j := range want[i] {
			want[i][j].off += 0x1p-120
		}
	}
	return want
}

// testTableGradient: the sums are those of a loop over rows, to the bit.
func testTableGradient(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		o := TableGradient{Rows: enginetest.Pick(rng, 1, 31, 256, 257, 600), N: enginetest.Pick(rng, 1, 5, 256, 1024, 1025), TableRows: enginetest.Pick(rng, 1, 4, 90)}
		if o.Rows > 300 {
			o.N = min(o.N, 20)
		}
		dy, ids := m.random(t, rng, attn.Float32, o.Rows*o.N, math.Ldexp(1, rng.IntN(80)-40)), make([]int, o.Rows)
		for r := range ids {
			ids[r] = rng.IntN(o.TableRows)
			if i%3 == 0 {
				ids[r] = enginetest.Pick(rng, ids[r], -1, o.TableRows, math.MaxInt32, math.MinInt32)
			}
		}
		o.IDs, o.DY, o.DTable = m.putIDs(t, ids), dy.Memory, m.empty(t, o.TableRows*o.N)
		want := make([]float32, o.TableRows*o.N)
		for r, id := range ids {
			if id < 0 || id >= o.TableRows {
				continue
			}
			for c := range o.N {
				want[id*o.N+c] += float32(dy.x[r*o.N+c])
			}
		}
		noError(t, d.TableGradient(m.Stream, &o))
		m.Settle(t)
		got := enginetest.Read(t, &o.DTable)
		for at, want := range want {
			if v := enginetest.Get(got, at, attn.Float32); v != float64(want) {
				t.Fatalf("%d rows of %d elements, table of %d: row %d, column %d is %v, want %v", o.Rows, o.N, o.TableRows, at/o.N, at%o.N, v, want)
			}
		}
		for _, x := range []gpu.Memory{o.IDs, o.DY, o.DTable} {
			noError(t, x.Buffer.Close())
		}
	}
}

func testLossRefuses(t *testing.T, m *machine, d *Engine) {
	rng := rand.New(rand.NewPCG(1, 2))
	x, half, y := m.random(t, rng, attn.Float32, 64, 1).Memory, m.random(t, rng, attn.Float16, 64, 1).Memory, m.empty(t, 64)
	good := Loss{Rows: 4, Width: 4, Vocabulary: 4, X: x, W: x, B: x, Targets: x, Y: y, Scratch: m.empty(t, 200)}
	gradient := good
	gradient.DY, gradient.DX, gradient.DW, gradient.DB = x, y, y, y
	for _, c := range []struct {
		what    string
		of      Loss
		change  func(*Loss)
		is      error
		because string
	}{
		{"no rows", good, func(o *Loss) { o.Rows = 0 }, attn.ErrShape, "0 rows of 4 elements, and 4 tokens"},
		{"no vocabulary", good, func(o *Loss) { o.Vocabulary = 0 }, attn.ErrShape, "0 tokens"},
		{"a short w", good, func(o *Loss) { o.Vocabulary = 17 }, attn.ErrShape, "w has 64 elements of 68"},
		{"a short b", good, func(o *Loss) { o.B.Len = 3 }, attn.ErrShape, "b has 3 elements of 4"},
		{"short targets", good, func(o *Loss) { o.Targets.Len = 3 }, attn.ErrShape, "the targets has 3"},
		{"float16", good, func(o *Loss) { o.X = half }, attn.ErrDType, "x is float16"},
		{"no result", good, func(o *Loss) { o.Y = gpu.Memory{} }, attn.ErrShape, "the loss has no buffer"},
		{"little scratch", good, func(o *Loss) { o.Scratch.Len = 31 }, attn.ErrShape, "the scratch has 31 elements of 32"},
		{"no dx", gradient, func(o *Loss) { o.DX = gpu.Memory{} }, attn.ErrShape, "dx has no buffer"},
		{"a short dw", gradient, func(o *Loss) { o.DW.Len = 15 }, attn.ErrShape, "dw has 15"},
		{"no db", gradient, func(o *Loss) { o.DB = gpu.Memory{} }, attn.ErrShape, "db has no buffer"},
	} {
		c.change(&c.of)
		wantError(t, c.what, d.Loss(m.Stream, &c.of), c.is, c.because)
	}
	table := TableGradient{Rows: 4, N: 4, TableRows: 4, IDs: x, DY: x, DTable: y}
	table.TableRows = 17
	wantError(t, "a short table", d.TableGradient(m.Stream, &table), attn.ErrShape, "the table's gradient has 64 elements of 68")
	table.TableRows, table.N = 4, 0
	wantError(t, "no columns", d.TableGradient(m.Stream, &table), attn.ErrShape, "4 rows of 0 elements")
	table.N, table.DY = 4, half
	wantError(t, "dy of float16", d.TableGradient(m.Stream, &table), attn.ErrDType, "dy")
	m.Settle(t)
	for _, v := range []gpu.Memory{x, half, y, good.Scratch} {
		noError(t, v.Buffer.Close())
	}
}
