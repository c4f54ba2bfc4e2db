package layers

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
)

func realDecoder(t testing.TB) (*machine, *Engine) { return decoderOf(t, realGPU(t)) }

func decoderOf(t testing.TB, m *machine) (*machine, *Engine) {
	t.Helper()
	d, err := New(m.Dev)
	noError(t, err)
	return m, d
}

// matrix is random numbers as a type has them, on the GPU and in float64.
type matrix struct {
	gpu.Memory
	x []float64
}

func (m *machine) random(t testing.TB, rng *rand.Rand, d attn.DType, n int, scale float64) (r matrix) {
	data := make([]byte, n*d.Size())
	r.x = make([]float64, n)
	for i := range r.x {
		enginetest.Put(data, i, d, rng.NormFloat64()*scale)
		r.x[i] = enginetest.Get(data, i, d)
	}
	r.Memory = m.Put(t, data, d)
	return r
}

func (m *machine) empty(t testing.TB, n int) (r gpu.Memory) {
	r = gpu.Memory{DType: attn.Float32, Len: n}
	m.Poison(t, &r)
	return r
}

func moments(row []float64) (mean, variance float64) {
	for _, v := range row {
		mean += v / float64(len(row))
	}
	for _, v := range row {
		variance += (v - mean) * (v - mean) / float64(len(row))
	}
	return mean, variance
}

// normed is the layer norm of rows of n elements.
func normed(x []float64, n int, gamma, beta []float64, eps float64) []float64 {
	y := make([]float64, len(x))
	for r := 0; r < len(x); r += n {
		mean, variance := moments(x[r : r+n])
		for i, v := range x[r : r+n] {
			v = (v - mean) / math.Sqrt(variance+eps)
			if gamma != nil {
				v *= gamma[i]
			}
			if beta != nil {
				v += beta[i]
			}
			y[r+i] = v
		}
	}
	return y
}

// rmsNormed is the norm by the root mean square of rows of n elements.
func rmsNormed(x []float64, n int, gamma, residual []float64, offset bool, eps float64) []float64 {
	y := make([]float64, len(x))
	for r := 0; r < len(x); r += n {
		squares := 0.0
		for _, v := range x[r : r+n] {
			squares += v * v / float64(n)
		}
		for i, v := range x[r : r+n] {
			v /= math.Sqrt(squares + eps)
			switch {
			case offset:
				v *= 1 + gamma[i]
			case gamma != nil:
				v *= gamma[i]
			}
			if residual != nil {
				v += residual[r+i]
			}
			y[r+i] = v
		}
	}
	return y
}

// lost is how much of a product's operands the tensor core's parts of them do
// not have, and sums in float32 lose.
func lost(d attn.DType) float64 {
	if d == attn.BFloat16 {
		return 0x1p-15
	}
	return 0x1p-18
}

// rounded is how much of a product's operands is lost where x is rounded to W's type.
func rounded(d attn.DType) float64 {
	if d == attn.BFloat16 {
		return 0x1p-8
	}
	return 0x1p-11
}

// cutOff is how much of the largest sum on its way the tensor core loses besides,
// which cuts off what it adds: of a matrix all columns may be in one sum. Other layers add
// up a column block from zero at a time. A product of 16 columns, of each part of x, may lose a unit of the sum's last place.
func cutOff(matrix bool, in, parts int) float64 {
	if !matrix {
		return 0
	}
	return float64(parts*in) / 16 * 0x1p-23
}

func TestGPULinear(t *testing.T) {
	m, d := realDecoder(t)
	testLinear(t, m, d, enginetest.OrShort(300, 45), enginetest.OrShort(8192, 1000), 1300, someRows...)
}

func TestGPUGates(t *testing.T) {
	m, d := realDecoder(t)
	testLayers(t, m, d, layersOf{gates: true}, enginetest.OrShort(200, 45), enginetest.OrShort(8192, 1000), 1300, someRows...)
	testLayers(t, m, d, layersOf{gates: true}, enginetest.OrShort(40, 12), enginetest.OrShort(4104, 1000), 1300, manyRows...)
}

func TestGPULinearRounded(t *testing.T) {
	m, d := realDecoder(t)
	testRounded(t, m, d, enginetest.OrShort(80, 20), 1544, 1300)
}

// testRounded runs layers that may round x, on all kernels that do: of 32 rows or 64, one cluster or two side
// by side, with x in registers, or in what is lent of the ring. Without such kernels it is skipped.
func testRounded(t *testing.T, m *machine, d *Engine, cases, longest, widest int) {
	t.Helper()
	if d.info.Capability != groupCapability {
		t.Skip("there are no kernels that round x of a batch")
	}
	testLayers(t, m, d, layersOf{rounded: map[roundedLaunch]int{}}, cases, longest, widest, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128)
}

func TestGPULinearManyRows(t *testing.T) {
	m, d := realDecoder(t)
	testLinear(t, m, d, enginetest.OrShort(60, 12), enginetest.OrShort(4104, 1000), 1300, manyRows...)
}

// someRows are of all kinds of launches; manyRows of those that are persistent, where the GPU
// has any: about a tile's end, and so many that a second group of tiles begins.
var (
	someRows = []int{1, 1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 150}
	manyRows = []int{129, 150, 255, 256, 257, 300}
)

// testLinear runs random layers of some of these rows, and of up to so many inputs and
// outputs a part.
func testLinear(t *testing.T, m *machine, d *Engine, cases, longest, widest int, someRows ...int) {
	t.Helper()
	testLayers(t, m, d, layersOf{}, cases, longest, widest, someRows...)
}

// layersOf says of which layers cases are.
type layersOf struct {
	gates   bool                  // gated units alone
	rounded map[roundedLaunch]int // not nil: that may all be rounded, until all launches of such a batch have been seen
	product map[hopperLayout]int  // not nil: that may all be rounded, until all kernels of hopper.go for them have been seen
}

// roundedLaunch is a kind of launch that rounds x.
type roundedLaunch struct {
	rows, below int
	lent        bool
}

// testLayers is testLinear of some layers.
func testLayers(t *testing.T, m *machine, d *Engine, of layersOf, cases, longest, widest int, someRows ...int) {
	rng := reftest.Rand(t)
	types := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}
	defer func(splits []int, persistent []persistentTile, tiled []tiledCluster, slower float64) {
		d.leftOut, d.copied, d.splits, d.persistent, d.tiled, d.slower, d.separateGates = nil, false, splits, persistent, tiled, slower, false
	}(d.splits, d.persistent, d.tiled, d.slower)
	defer func(least int, orders []bool) { d.leastHopper, d.orders, d.hopperTime = least, orders, 1 }(d.leastHopper, d.orders)
	for i := range reftest.AtLeast(cases, func() bool {
		return (of.rounded == nil || len(of.rounded) == 6) && (of.product == nil || len(of.product) == 4)
	}) {
		gates := of.gates || (of.rounded != nil || of.product != nil) && rng.IntN(2) == 0
		d.splits, d.leftOut = skinnySplits[:], enginetest.Pick(rng, nil, nil, nil, []int{32}, []int{64}, []int{32, 64})
		if one := rng.IntN(2 * len(skinnySplits)); one < len(skinnySplits) { // whichever would be best
			d.splits = skinnySplits[one:][:1]
		}
		d.persistent, d.slower = persistentTiles[:], enginetest.Pick(rng, 1.0, 0, math.Inf(1), math.Inf(1))
		if one := rng.IntN(2 * len(persistentTiles)); one < len(persistentTiles) {
			d.persistent = persistentTiles[one:][:1]
		}
		d.separateGates, d.leastHopper, d.hopperTime = rng.IntN(6) == 0, enginetest.Pick(rng, leastHopper, math.MaxInt), enginetest.Pick(rng, 0, 1.0)
		w := types[i%3]
		if of.rounded != nil {
			w = types[i%2]
		}
		rows := enginetest.Pick(rng, someRows...)
		in := min(8*enginetest.Pick(rng, 1, 3, 8, 32, 33, 96, 125, 384, 513, 1024), longest)
		if of.rounded != nil {
			in = min(enginetest.Pick(rng, 264, 520, 1000, 1544, 1544), longest)
			d.copied = rng.IntN(3) == 0
			d.splits, d.leftOut = skinnySplits[enginetest.Pick(rng, 0, 0, 1, 2):][:1], enginetest.Pick(rng, []int{32}, []int{64})
			if rows > 64 {
				d.leftOut = d.leftOut[:0]
			}
		}
		if rows > 64 {
			in = min(in, 1000)
		}
		d.tiled = tiledClusters[:]
		if one := rng.IntN(2 * len(tiledClusters)); one < len(tiledClusters) && d.info.Capability == groupCapability {
			if c := tiledClusters[one]; c.split <= attn.Ceil(in, gemmStep) && c.split*c.beside <= d.info.Multiprocessors {
				d.tiled = tiledClusters[one:][:1]
			}
		}
		o := Linear{Rows: rows, In: in, Activation: attn.Activation(rng.IntN(attn.Activations)), RoundX: of.rounded != nil || of.product != nil || rng.IntN(2) == 0, Early: rng.IntN(2) == 0}
		if w == attn.Float32 {
			o.Products = enginetest.Pick(rng, attn.Float32, attn.Float32, attn.Float16, attn.BFloat16)
		}
		scale := math.Ldexp(1, enginetest.Pick(rng, 0, 0, -40, 40))
		x := m.random(t, rng, attn.Float32, rows*in, scale)
		o.X = x.Memory
		if rng.IntN(3) == 0 { // one element far above the others
			data := enginetest.Read(t, &o.X)
			x.x[rng.IntN(len(x.x))] *= 0x1p12
			for j, v := range x.x {
				enginetest.Put(data, j, attn.Float32, v)
			}
			noError(t, o.X.Buffer.Upload(o.X.Offset, data))
		}
		memory := []gpu.Memory{o.X}
		left := x.x
		if rng.IntN(2) == 0 {
			gamma, beta := m.random(t, rng, attn.Float32, in, 1), m.random(t, rng, attn.Float32, in, 1)
			o.Norm = &Norm{Gamma: gamma.Memory, Beta: beta.Memory, Eps: 1e-5}
			memory = append(memory, gamma.Memory, beta.Memory)
			if rng.IntN(4) == 0 {
				o.Norm.Gamma, gamma.x = gpu.Memory{}, nil
			}
			left = normed(x.x, in, gamma.x, beta.x, 1e-5)
			if rng.IntN(3) == 0 {
				o.Norm.RMS, o.Norm.Beta, o.Norm.UnitOffset = true, gpu.Memory{}, gamma.x != nil && rng.IntN(2) == 0
				left = rmsNormed(x.x, in, gamma.x, nil, o.Norm.UnitOffset, 1e-5)
			}
		}
		type part struct{ w, b matrix }
		var parts []part
		outs := make([]int, enginetest.Pick(rng, 1, 1, 2, 2, 3))
		if gates {
			outs, o.Activation = make([]int, 2), attn.Activation(1+rng.IntN(attn.Activations-1))
		}
		for i := range outs {
			outs[i] = min(enginetest.Pick(rng, 1, 7, 8, 9, 50, 129, 200, 768, 1300), widest)
			if of.product != nil {
				outs[i] = attn.Ceil(outs[i], 2) * 2
			}
		}
		if of.product != nil {
			d.hopperTime, o.Activation = 0, enginetest.Pick(rng, attn.NoActivation, attn.ReLU)
			d.leastHopper, d.orders = leastHopper, []bool{rng.IntN(2) == 0}
			if gates {
				o.Activation = enginetest.Pick(rng, attn.SiLU, attn.GELUTanh)
			}
		}
		if len(outs) == 2 && o.Activation != attn.NoActivation && (gates || rng.IntN(3) == 0) {
			o.Gate, outs[1] = true, outs[0]
		}
		for _, out := range outs {
			p := part{w: m.random(t, rng, w, out*in, 1/math.Sqrt(float64(in)))}
			memory = append(memory, p.w.Memory)
			o.Parts = append(o.Parts, LinearPart{W: p.w.Memory, Y: m.empty(t, rows*out), Out: out})
			last := &o.Parts[len(o.Parts)-1]
			if rng.IntN(2) == 0 {
				p.b = m.random(t, rng, attn.Float32, out, scale)
				last.B = p.b.Memory
				memory = append(memory, p.b.Memory)
			}
			if memory = append(memory, last.Y); o.Gate && len(parts) == 1 && rng.IntN(2) == 0 {
				last.Y = gpu.Memory{} // nobody writes it
			}
			parts = append(parts, p)
		}
		var residual matrix
		if (len(parts) == 1 || o.Gate) && rng.IntN(2) == 0 {
			residual = m.random(t, rng, attn.Float32, rows*o.Parts[0].Out, scale)
			o.Residual = residual.Memory
			memory = append(memory, residual.Memory)
		}
		scratch, err := d.Scratch(&o)
		noError(t, err)
		if scratch > 0 {
			o.Scratch = m.empty(t, scratch)
			memory = append(memory, o.Scratch)
		}
		noError(t, d.Linear(m.Stream, &o))
		m.Settle(t)
		if i%3 == 0 {
			testLinearRepeats(t, m, d, &o)
		}
		chosen := &o
		if o.rounds() {
			chosen, _ = o.rounded()
			w = o.Products
			for _, p := range parts { // the kernel's weights
				b := make([]byte, 2)
				for at, v := range p.w.x {
					enginetest.Put(b, 0, w, v)
					p.w.x[at] = enginetest.Get(b, 0, w)
				}
			}
		}
		launch, err := d.choose(chosen)
		noError(t, err)
		if l := launch.skinny; l != nil && of.rounded != nil {
			k := &skinnyKinds[l.kind]
			if k.parts != 1 {
				t.Fatalf("%d rows that may be rounded have %d parts", rows, k.parts)
			}
			of.rounded[roundedLaunch{k.rows, l.below, d.skinnyLent(l.kind, attn.Ceil(attn.Ceil(in, skinnyBlock), l.split)) > 0}]++
		}
		if launch.product && of.product != nil {
			layout, _, err := d.hopperLayoutOf(chosen, w)
			noError(t, err)
			of.product[layout]++
		}
		cut, lost := cutOff(launch.gemm != nil || launch.product, in, launch.parts()), lost(w)
		if launch.parts() == 1 {
			if !chosen.RoundX {
				t.Fatalf("%d rows of %d: x is rounded without being asked", rows, in)
			}
			lost += rounded(w)
		}
		if o.Gate {
			if y := &o.Parts[1].Y; y.Buffer != nil {
				for at, v := range enginetest.Read(t, y) {
					if v != 0xff {
						t.Fatalf("case %d: byte %d of what the gate is for is %#x", i, at, v)
					}
				}
			}
		}
		// What a part's sum is, the sum of its magnitudes, and the most that it is on its way.
		sumOf := func(p part, r, c int) (sum, size, most float64) {
			for k := range in {
				v := left[r*in+k] * p.w.x[c*in+k]
				sum, size = sum+v, size+math.Abs(v)
				most = max(most, math.Abs(sum))
			}
			if p.b.x != nil {
				sum, size = sum+p.b.x[c], size+math.Abs(p.b.x[c])
			}
			return sum, size, most
		}
		for j, p := range parts {
			if o.Gate && j > 0 {
				break
			}
			out := o.Parts[j].Out
			y := enginetest.Read(t, &o.Parts[j].Y)
			for r := range rows {
				for c := range out {
					sum, size, most := sumOf(p, r, c)
					own := 0.0 // what the activation is off by
					if o.Activation > attn.ReLU {
						own, size, most = 0x1p-22*math.Abs(sum), reftest.MostSlope*size, reftest.MostSlope*most
					}
					sum = reftest.Activated(o.Activation, sum)
					norm := 0.0 // what the norm itself rounds
					if o.Norm != nil {
						norm = math.Sqrt(float64(in))
					}
					bound := lost*(size+norm) + cut*most + own
					if o.Gate {
						up, size, most := sumOf(parts[1], r, c)
						off := lost*(size+norm) + cut*most // of up
						sum, bound = sum*up, bound*math.Abs(up)+(math.Abs(sum)+bound)*off+0x1p-22*math.Abs(sum*up)
					}
					if residual.x != nil {
						sum += residual.x[r*out+c]
						bound += lost * (math.Abs(sum) + math.Abs(residual.x[r*out+c]))
					}
					if got := enginetest.Get(y, r*out+c, attn.Float32); !(math.Abs(got-sum) <= bound) {
						t.Fatalf("case %d, w %v, %d x %d x %d, part %d of %d, gate %v, %v, norm %v, %+v: row %d, column %d: %v, want %v, bound %v",
							i, w, rows, in, out, j, len(parts), o.Gate, o.Activation, o.Norm != nil, launch, r, c, got, sum, bound)
					}
				}
			}
		}
		for i := range memory {
			noError(t, memory[i].Buffer.Close())
		}
	}
	if of.rounded != nil && len(of.rounded) < 6 {
		t.Errorf("only %v", of.rounded)
	}
}

// testLinearRepeats runs a layer that has run again, over NaNs: the bits are the same.
func testLinearRepeats(t *testing.T, m *machine, d *Engine, o *Linear) {
	t.Helper()
	var before [][]byte
	made := o.Parts
	if o.Gate {
		made = made[:1]
	}
	for i := range made {
		y := &o.Parts[i].Y
		before = append(before, enginetest.Read(t, y))
		noError(t, y.Buffer.Set(0, 0xff, y.Buffer.Len()))
	}
	noError(t, d.Linear(m.Stream, o))
	m.Settle(t)
	for i := range made {
		if !bytes.Equal(enginetest.Read(t, &o.Parts[i].Y), before[i]) {
			t.Fatalf("%d rows of %d, part %d: other bits the second time", o.Rows, o.In, i)
		}
	}
}

func TestGPUNorm(t *testing.T) {
	m, d := realDecoder(t)
	testNorm(t, m, d, 40)
}

func testNorm(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	for i := range cases {
		rows, n := enginetest.Pick(rng, 1, 2, 5, 33), enginetest.Pick(rng, 1, 2, 31, 256, 257, 768, 4096, 5000)
		if i%4 == 3 {
			rows, n = leastNormRows+rng.IntN(9), enginetest.Pick(rng, 4, 64, 132)
		}
		x := m.random(t, rng, attn.Float32, rows*n, math.Ldexp(1, rng.IntN(20)-10))
		gamma, beta := m.random(t, rng, attn.Float32, n, 1), m.random(t, rng, attn.Float32, n, 1)
		y := m.empty(t, rows*n)
		noError(t, d.Norm(m.Stream, rows, n, x.Memory, y, &Norm{Gamma: gamma.Memory, Beta: beta.Memory, Eps: 1e-5}))
		m.Settle(t)
		got := enginetest.Read(t, &y)
		want := normed(x.x, n, gamma.x, beta.x, 1e-5)
		for r := range rows {
			// Where a row's elements are close to each other, what the mean is rounded by shows.
			row := x.x[r*n : (r+1)*n]
			_, variance := moments(row)
			mean := 0x1p-22 * max(slices.Max(row), -slices.Min(row)) / math.Sqrt(variance+1e-5)
			for j, want := range want[r*n : (r+1)*n] {
				bound := 1e-5*(1+math.Abs(want)) + mean*math.Abs(gamma.x[j])
				if v := enginetest.Get(got, r*n+j, attn.Float32); !(math.Abs(v-want) <= bound) {
					t.Fatalf("%d x %d, row %d, element %d: %v, want %v, +- %v", rows, n, r, j, v, want, bound)
				}
			}
		}
		for _, x := range []gpu.Memory{x.Memory, gamma.Memory, beta.Memory, y} {
			noError(t, x.Buffer.Close())
		}
	}
}

func TestGPUGather(t *testing.T) {
	m, d := realDecoder(t)
	testGather(t, m, d, 30)
}

// testGather: the ids come just before, by copies that are put off: the launch overlaps
// the kernel that makes them, in a graph too.
func testGather(t *testing.T, m *machine, d *Engine, cases int) {
	rng := reftest.Rand(t)
	noError(t, gpu.PutOffCopies(m.Stream))
	pinned, err := m.Dev.NewHost(2 * 4 * 40)
	noError(t, err)
	for i := range cases {
		rows, n := 1+rng.IntN(40), 1+rng.IntN(900)
		var all, come []gpu.Memory
		residual := m.random(t, rng, attn.Float32, rows*n, 1)
		all = append(all, residual.Memory)
		// A gather of fresh operands, and what it makes of what is added.
		fresh := func(i int) (*Gather, func(added func(at int) float64) []float64) {
			kind, of := []attn.DType{attn.Float16, attn.BFloat16, attn.Float32}[i%3], 1+rng.IntN(300)
			table := m.random(t, rng, kind, of*n, 1)
			ids, data := make([]int, rows), make([]byte, 4*rows)
			for r := range ids {
				ids[r] = enginetest.Pick(rng, rng.IntN(of), rng.IntN(of), rng.IntN(of), -1, of, math.MaxInt32, math.MinInt32)
				binary.LittleEndian.PutUint32(data[4*r:], uint32(int32(ids[r])))
			}
			o := &Gather{Rows: rows, N: n, TableRows: of, Table: table.Memory, IDs: m.Put(t, make([]byte, len(data)), attn.Float32), Y: m.empty(t, rows*n)}
			all = append(all, o.Table, o.IDs, o.Y)
			noError(t, pinned.Write(len(data)*len(come), data))
			come = append(come, o.IDs)
			return o, func(added func(at int) float64) []float64 {
				want := make([]float64, rows*n)
				for at := range want {
					want[at] = math.NaN()
					if id := ids[at/n]; id >= 0 && id < of {
						want[at] = float64(float32(table.x[id*n+at%n] + added(at)))
					}
				}
				return want
			}
		}
		check := func(what string, o *Gather, want []float64) {
			t.Helper()
			y := enginetest.Read(t, &o.Y)
			for at, want := range want {
				if got := enginetest.Get(y, at, attn.Float32); got != want && !(math.IsNaN(got) && math.IsNaN(want)) {
					t.Fatalf("%s: row %d, column %d: %v, want %v", what, at/n, at%n, got, want)
				}
			}
		}
		o, of := fresh(i)
		added := func(int) float64 { return 0 }
		if i%2 == 0 {
			o.Residual, added = residual.Memory, func(at int) float64 { return residual.x[at] }
		}
		want := of(added)
		then, ofThen := fresh(i + i/3)
		then.Residual = o.Y
		wantThen := ofThen(func(at int) float64 { return want[at] })
		queue := func() error { // two launches, or one
			return errors.Join(d.Gather(m.Stream, o), d.Gather(m.Stream, then))
		}
		if i%4 >= 2 {
			g := d.NewGathers(o)
			if g == nil || !g.Then(then) || g.Then(then) {
				t.Fatalf("two gathers of %d rows of %d elements are not one launch", rows, n)
			}
			queue = func() error { return g.Queue(m.Stream) }
		}
		done := func() error { return nil }
		if i%3 == 0 {
			graph, err := m.Stream.Capture(queue)
			noError(t, err)
			queue, done = func() error { return m.Stream.Launch(graph) }, graph.Close
		}
		for k, ids := range come {
			noError(t, m.Stream.Upload(ids.Buffer, ids.Offset, pinned, 4*rows*k, 4*rows))
		}
		noError(t, queue())
		m.Settle(t)
		noError(t, done())
		check("the first", o, want)
		check("the second", then, wantThen)
		for _, x := range all {
			noError(t, x.Buffer.Close())
		}
	}
	noError(t, pinned.Close())
}

// BenchmarkGPULinear reads weights that are not in the cache, as a decoder's
// layers do, one launch behind the other in a graph.
func BenchmarkGPULinear(b *testing.B) {
	m, d := realDecoder(b)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, s := range []struct{ in, out, parts int }{
		{768, 768, 3}, {768, 768, 1}, {768, 3072, 1}, {3072, 768, 1}, {768, 50272, 1},
		{2048, 2048, 3}, {2048, 2048, 1}, {2048, 8192, 1}, {8192, 2048, 1}, {2048, 50272, 1},
		{4096, 4096, 3}, {4096, 4096, 1}, {4096, 16384, 1}, {16384, 4096, 1},
	} {
		for _, rows := range []int{1, 4, 8, 16, 32, 64, 512} {
			b.Run(fmt.Sprintf("%dx%dx%d/rows%d", s.in, s.out, s.parts, rows), func(b *testing.B) {
				one := s.in * s.out * s.parts * 2
				count := max(4, (600<<20)/one)
				var memory []gpu.Memory
				x := m.random(b, rng, attn.Float32, rows*s.in, 1)
				scratch := m.empty(b, rows*(s.in+1))
				memory = append(memory, x.Memory, scratch)
				var ops []Linear
				for range count {
					o := Linear{Rows: rows, In: s.in, X: x.Memory, Early: true, Scratch: scratch}
					// As in a decoder: a norm where x is narrow, but for the layer behind
					// attention, which has a residual as the one of wide x has.
					vector := func(n int) gpu.Memory {
						v := m.random(b, rng, attn.Float32, n, 1)
						memory = append(memory, v.Memory)
						return v.Memory
					}
					if s.in <= s.out && s.in*s.parts != s.out {
						o.Norm = &Norm{Gamma: vector(s.in), Beta: vector(s.in), Eps: 1e-5}
					} else {
						o.Residual = vector(rows * s.out)
					}
					if s.out == 4*s.in {
						o.Activation = attn.ReLU
					}
					for range s.parts {
						w, err := m.Dev.NewBuffer(int64(s.in * s.out * 2))
						noError(b, err)
						p := LinearPart{W: gpu.Memory{Buffer: w, DType: attn.Float16, Len: s.in * s.out}, Y: m.empty(b, rows*s.out), Out: s.out}
						if s.out < 50000 {
							p.B = vector(s.out)
						}
						o.Parts = append(o.Parts, p)
						memory = append(memory, p.W, p.Y)
					}
					ops = append(ops, o)
				}
				g, err := m.Stream.Capture(func() error {
					for i := range ops {
						if err := d.Linear(m.Stream, &ops[i]); err != nil {
							return err
						}
					}
					return nil
				})
				noError(b, err)
				best := time.Duration(math.MaxInt64)
				for range 5 {
					begin, err := m.Dev.NewEvent(true)
					noError(b, err)
					end, err := m.Dev.NewEvent(true)
					noError(b, err)
					noError(b, m.Stream.Record(begin))
					noError(b, m.Stream.Launch(g))
					noError(b, m.Stream.Record(end))
					noError(b, m.Stream.Synchronize())
					took, err := end.Since(begin)
					noError(b, err)
					best = min(best, took/time.Duration(count))
				}
				b.ReportMetric(float64(one)/best.Seconds()/1e9, "GB/s")
				b.ReportMetric(float64(rows)*float64(one)/best.Seconds()/1e12, "TFLOPS")
				b.ReportMetric(best.Seconds()*1e6, "us/launch")
				for i := range memory {
					noError(b, memory[i].Buffer.Close())
				}
			})
		}
	}
}
