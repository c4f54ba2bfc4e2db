package layers

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// packable are the formats that kernels read in packed order.
func packable() (all []weight.Format) {
	for f := range weight.Format(weight.Formats) {
		if weight.CanPack(f) {
			all = append(all, f)
		}
	}
	return all
}

// narrowMatrix returns random weights of a format with columns of zeros, outliers and, where the format has them, scales of 0. size has
// the magnitudes that an element is a sum of: with a minimum, of two numbers. ordered: columns may have an order.
func narrowMatrix(rng *rand.Rand, f weight.Format, rows, columns int, ordered bool) (m weight.Matrix, size []float64) {
	m = weight.Matrix{Format: f, Len: rows * columns}
	each := f.Size(columns)
	data := make([]byte, rows*each+1)[:rows*each]
	m.Ptr = unsafe.Pointer(unsafe.SliceData(data))
	groups := 1
	if f.HasScales() {
		if m.Group = enginetest.Pick(rng, 0, 0, 128, 256); f != weight.E4M3 || !ordered && m.Group > 128 {
			m.Group = 0
		}
		groups = m.Groups(columns)
		m.Scales = make([]float32, rows*groups)
	}
	x := make([]float32, columns)
	for row := range rows {
		for i := range x {
			if x[i] = float32(rng.NormFloat64() / math.Sqrt(float64(columns))); rng.IntN(100) == 0 {
				x[i] *= 30
			}
			if rng.IntN(20) == 0 {
				x[i] = 0
			}
		}
		if rng.IntN(20) == 0 {
			clear(x)
		}
		to := data[row*each:][:each]
		switch f {
		case weight.Int8, weight.E4M3, weight.Int4_32, weight.Int4_64, weight.Int4_128:
			scale, ok := weight.Round(f, to, x)
			if !ok {
				panic("numbers that cannot be rounded")
			}
			for g := range groups {
				if m.Scales != nil {
					m.Scales[row*groups+g] = scale * float32(1+g%3)
				}
			}
		default:
			for i := range to {
				to[i] = byte(rng.Uint32())
			}
			for at := 0; at < each; at += f.Bytes() {
				scale := rng.NormFloat64() / 16 / math.Sqrt(float64(columns))
				if rng.IntN(10) == 0 {
					scale *= float64(rng.IntN(2)) * 10
				}
				minimum, of := -8*scale, to[at:]
				switch f { // whose scales and minima have integers besides
				case weight.Q4_K, weight.Q5_K:
					scale, minimum = scale/32, -minimum/32
				case weight.Q6_K:
					scale, of = scale/64, to[at+208:]
				}
				binary.LittleEndian.PutUint16(of, uint16(half.FromFloat64(scale)))
				if f.HasMinima() {
					binary.LittleEndian.PutUint16(of[2:], uint16(half.FromFloat64(minimum)))
				}
			}
		}
	}
	if ordered && f.Block() > 1 && rng.IntN(3) == 0 {
		m.Order = make([]int32, columns)
		for i, column := range rng.Perm(columns) {
			m.Order[i] = int32(column)
		}
	}
	var minima []float32 // of 32 elements
	if f.HasMinima() {
		minima = make([]float32, rows*columns/32)
		weight.Unpack(f, make([]int8, rows*columns), make([]float32, len(minima)), minima, data)
	}
	size = make([]float64, rows*columns)
	for i, v := range narrowNumbers(&m, columns) {
		size[i] = math.Abs(v)
		if minima != nil {
			at := i
			if m.Order != nil {
				at = i/columns*columns + slices.Index(m.Order, int32(i%columns))
			}
			size[i] += 2 * math.Abs(float64(minima[at/32]))
		}
	}
	return m, size
}

// narrowNumbers are the elements of a matrix.
func narrowNumbers(m *weight.Matrix, columns int) []float64 {
	wide, scratch, all := make([]float32, columns), make([]float32, columns), make([]float64, 0, m.Len)
	for row := range m.Len / columns {
		m.Row(wide, row, scratch)
		for _, v := range wide {
			all = append(all, float64(v))
		}
	}
	return all
}

// pack puts weights into memory.
func (m *machine) pack(t testing.TB, w *weight.Matrix, columns int) (*weight.Packed, gpu.Memory) {
	t.Helper()
	p, err := weight.Packing(w, columns)
	noError(t, err)
	data := make([]byte, p.Bytes)
	p.Pack(data, w)
	return &p, m.Put(t, data, attn.Float32)
}

// testNarrow runs random layers whose weights have 8 or 4 bits, among them layers of several weights, gates, and weights that are two layers.
func testNarrow(t *testing.T, m *machine, d *Engine, cases, longest, widest int, someRows ...int) {
	rng := reftest.Rand(t)
	formats := packable()
	for i := range cases {
		of := formats[i%len(formats)]
		rows := enginetest.Pick(rng, someRows...)
		step := 1
		if of.Block() > 1 {
			step = of.Block()
		}
		in := max(step, min(enginetest.Pick(rng, 1, 7, 32, 33, 64, 96, 128, 130, 320, 576, 1000, 2048, 4096), longest)/step*step)
		o := Linear{Rows: rows, In: in, Activation: attn.Activation(rng.IntN(attn.Activations)), RoundX: rng.IntN(2) == 0, Early: rng.IntN(2) == 0}
		x := m.random(t, rng, attn.Float32, rows*in, math.Ldexp(1, enginetest.Pick(rng, 0, 0, -40, 40)))
		if o.X = x.Memory; rng.IntN(3) == 0 { // one element far above the others
			data, at := enginetest.Read(t, &o.X), rng.IntN(len(x.x))
			x.x[at] *= 0x1p12
			enginetest.Put(data, at, attn.Float32, x.x[at])
			noError(t, o.X.Buffer.Upload(o.X.Offset, data))
		}
		left, norm := x.x, 0.0
		if rng.IntN(3) == 0 {
			gamma := m.random(t, rng, attn.Float32, in, 1)
			o.Norm = &Norm{Gamma: gamma.Memory, Eps: 1e-5, RMS: true}
			left, norm = rmsNormed(x.x, in, gamma.x, nil, false, 1e-5), math.Sqrt(float64(in))
		}
		gate, halves := rng.IntN(4) == 0, rng.IntN(3) == 0
		outs := make([]int, enginetest.Pick(rng, 1, 1, 2, 3))
		if gate || halves {
			outs = make([]int, 2)
		}
		for j := range outs {
			outs[j] = min(enginetest.Pick(rng, 1, 7, 16, 50, 129, 255, 256, 300, 768), widest)
		}
		if gate {
			outs[1] = outs[0]
			o.Gate, o.Activation = true, attn.Activation(1+rng.IntN(attn.Activations-1))
		}
		type part struct {
			w, size, b []float64
		}
		var parts []part
		all := outs
		if halves {
			all = []int{outs[0] + outs[1]}
		}
		for j, out := range all {
			f := of
			if j > 0 && rng.IntN(2) == 0 {
				if f = formats[rng.IntN(len(formats))]; in%f.Block() != 0 {
					f = of
				}
			}
			scale := math.Ldexp(1, rng.IntN(5))
			b := m.random(t, rng, attn.Float32, out, scale)
			if rng.IntN(3) == 0 {
				b = matrix{x: make([]float64, out)}
			}
			if j == 1 && in%8 == 0 && rng.IntN(4) == 0 { // beside weights of 16 bits
				w := m.random(t, rng, attn.Float16, out*in, 1/math.Sqrt(float64(in)))
				size := make([]float64, len(w.x))
				for i, v := range w.x {
					size[i] = math.Abs(v)
				}
				parts = append(parts, part{w.x, size, b.x})
				o.Parts = append(o.Parts, LinearPart{W: w.Memory, B: b.Memory, Out: out})
				continue
			}
			w, size := narrowMatrix(rng, f, out, in, true)
			packed, memory := m.pack(t, &w, in)
			numbers := narrowNumbers(&w, in)
			if !halves {
				parts = append(parts, part{numbers, size, b.x})
				o.Parts = append(o.Parts, LinearPart{W: memory, B: b.Memory, Out: out, Packed: packed})
				continue
			}
			n := outs[0]
			parts = append(parts, part{numbers[:n*in], size[:n*in], b.x[:n]}, part{numbers[n*in:], size[n*in:], b.x[n:]})
			up := b.Memory
			if up.Buffer != nil {
				up.Offset, up.Len = up.Offset+int64(4*n), out-n
				b.Memory.Len = n
			}
			o.Parts = append(o.Parts, LinearPart{W: memory, B: b.Memory, Out: n, Packed: packed}, LinearPart{W: memory, B: up, Out: out - n, Packed: packed, First: n})
		}
		for j := range o.Parts {
			o.Parts[j].Y = m.empty(t, rows*o.Parts[j].Out)
		}
		var residual matrix
		if (len(o.Parts) == 1 || o.Gate) && rng.IntN(2) == 0 {
			residual = m.random(t, rng, attn.Float32, rows*outs[0], 1)
			o.Residual = residual.Memory
		}
		n, err := d.Scratch(&o)
		noError(t, err)
		o.Scratch = m.empty(t, n)
		noError(t, d.Linear(m.Stream, &o))
		m.Settle(t)
		if i%3 == 0 {
			testLinearRepeats(t, m, d, &o)
		}
		lost := 0x1p-18
		if o.operandParts() == 1 {
			lost += 0x1p-11
		}
		sumOf := func(p *part, r, c int) (sum, bound float64) {
			size, top := norm, 0.0
			for k := range in {
				sum += left[r*in+k] * p.w[c*in+k]
				size += math.Abs(left[r*in+k]) * p.size[c*in+k]
				top = max(top, math.Abs(left[r*in+k]))
			}
			for k := range in { // parts below the smallest float16 are lost, and digits round to 2^-31 of the largest element
				size += top * p.size[c*in+k] * 0x1p-13
			}
			return sum + p.b[c], lost*(size+math.Abs(p.b[c])) + cutOff(true, in, 2)*size
		}
		for j := range parts {
			if o.Gate && j > 0 {
				break
			}
			y := enginetest.Read(t, &o.Parts[j].Y)
			for r := range rows {
				for c := range outs[j] {
					sum, bound := sumOf(&parts[j], r, c)
					bound = reftest.MostSlope*bound + 0x1p-22*math.Abs(sum)
					sum = reftest.Activated(o.Activation, sum)
					if o.Gate {
						up, off := sumOf(&parts[1], r, c)
						sum, bound = sum*up, bound*math.Abs(up)+(math.Abs(sum)+bound)*off+0x1p-22*math.Abs(sum*up)
					}
					if residual.x != nil {
						sum += residual.x[r*outs[j]+c]
						bound += 0x1p-22 * (math.Abs(sum) + math.Abs(residual.x[r*outs[j]+c]))
					}
					if got := enginetest.Get(y, r*outs[j]+c, attn.Float32); !(math.Abs(got-sum) <= bound) {
						t.Fatalf("case %d, %v, %d x %d x %v, part %d, gate %v, halves %v, %v, norm %v, rounded %v: row %d, column %d: %v, want %v, bound %v",
							i, of, rows, in, outs, j, o.Gate, halves, o.Activation, o.Norm != nil, o.RoundX, r, c, got, sum, bound)
					}
				}
			}
		}
		memory := []gpu.Memory{o.X, o.Residual, o.Scratch}
		for j := range o.Parts {
			if p := &o.Parts[j]; p.First == 0 {
				memory = append(memory, p.W, p.B, p.Y)
			} else {
				memory = append(memory, p.Y)
			}
		}
		for i := range memory {
			if memory[i].Buffer != nil {
				noError(t, memory[i].Buffer.Close())
			}
		}
	}
}

// testNarrowNotFinite: a row of x that has an infinity or NaN makes no finite output, and the outputs of other rows keep their bits.
func testNarrowNotFinite(t *testing.T, m *machine, d *Engine) {
	rng := reftest.Rand(t)
	for _, f := range packable() {
		in, out, rows := 256*(1+rng.IntN(3)), 1+rng.IntN(300), 2+rng.IntN(3)
		w, _ := narrowMatrix(rng, f, out, in, true)
		packed, memory := m.pack(t, &w, in)
		x := m.random(t, rng, attn.Float32, rows*in, 1)
		o := Linear{Rows: rows, In: in, X: x.Memory, Parts: []LinearPart{{W: memory, Y: m.empty(t, rows*out), Out: out, Packed: packed}}}
		n, err := d.Scratch(&o)
		noError(t, err)
		o.Scratch = m.empty(t, n)
		run := func() []byte {
			noError(t, d.Linear(m.Stream, &o))
			m.Settle(t)
			return enginetest.Read(t, &o.Parts[0].Y)
		}
		before := run()
		for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
			data, row := enginetest.Read(t, &o.X), rng.IntN(rows)
			at := row*in + rng.IntN(in)
			was := enginetest.Get(data, at, attn.Float32)
			enginetest.Put(data, at, attn.Float32, bad)
			noError(t, o.X.Buffer.Upload(o.X.Offset, data))
			y := run()
			for i := range rows * out {
				got, want := enginetest.Get(y, i, attn.Float32), enginetest.Get(before, i, attn.Float32)
				if i/out == row && !math.IsNaN(got) && !math.IsInf(got, 0) || i/out != row && got != want {
					t.Fatalf("%v, %d x %d x %d, element %d of row %d is %v: row %d, column %d: %v, %v before", f, rows, in, out, at%in, row, bad, i/out, i%out, got, want)
				}
			}
			enginetest.Put(data, at, attn.Float32, was)
			noError(t, o.X.Buffer.Upload(o.X.Offset, data))
		}
		for _, memory := range []*gpu.Memory{&o.X, &memory, &o.Parts[0].Y, &o.Scratch} {
			if memory.Buffer != nil {
				noError(t, memory.Buffer.Close())
			}
		}
	}
}

// testNarrowGather reads rows of tables of 8 and 4 bits.
func testNarrowGather(t *testing.T, m *machine, d *Engine) {
	rng := reftest.Rand(t)
	for _, f := range packable() {
		n, tableRows, rows := f.Block()*(1+rng.IntN(5)), 1+rng.IntN(400), 1+rng.IntN(9)
		if f.Block() == 1 {
			n += rng.IntN(400)
		}
		w, _ := narrowMatrix(rng, f, tableRows, n, true)
		packed, table := m.pack(t, &w, n)
		numbers := narrowNumbers(&w, n)
		ids := make([]byte, 4*rows)
		for i := range rows {
			binary.LittleEndian.PutUint32(ids[4*i:], uint32(int32(rng.IntN(tableRows+2)-1)))
		}
		residual := m.random(t, rng, attn.Float32, rows*n, 1)
		o := Gather{Rows: rows, N: n, TableRows: tableRows, Table: table, Packed: packed, IDs: m.Put(t, ids, attn.Float32), Residual: residual.Memory, Y: m.empty(t, rows*n)}
		noError(t, d.Gather(m.Stream, &o))
		m.Settle(t)
		y := enginetest.Read(t, &o.Y)
		for i := range rows {
			id := int(int32(binary.LittleEndian.Uint32(ids[4*i:])))
			for k := range n {
				want := math.NaN()
				if id >= 0 && id < tableRows {
					want = float64(float32(numbers[id*n+k]) + float32(residual.x[i*n+k]))
				}
				if got := enginetest.Get(y, i*n+k, attn.Float32); got != want && (got == got || want == want) {
					t.Fatalf("%v, row %d, id %d of %d, column %d of %d: %v, want %v", f, i, id, tableRows, k, n, got, want)
				}
			}
		}
	}
}

func TestGPUNarrow(t *testing.T) {
	m, d := realDecoder(t)
	testNarrowNotFinite(t, m, d)
	testNarrow(t, m, d, enginetest.OrShort(240, 48), enginetest.OrShort(4096, 1000), 1300, 1, 2, 3, 4, 5, 8, 13, 16, 17, 31, 32, 33, 64, 65, 100)
	testNarrowGather(t, m, d)
}
