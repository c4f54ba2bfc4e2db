package linear

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/internal/weight"
)

// blockFormats are the formats that the tier in use reads in groups.
func blockFormats() (all []weight.Format) {
	for f := range weight.Format(weight.Formats) {
		if isBlocks(f) && Has(f) {
			all = append(all, f)
		}
	}
	return all
}

// roundingFormats are those whose products may round x.
func roundingFormats() []weight.Format {
	return slices.DeleteFunc(blockFormats(), func(f weight.Format) bool { return f == weight.E4M3 })
}

// newBlockCase is a layer with random weights of a format in guarded memory, and the same layer with float32 weights.
func newBlockCase(t testing.TB, rng *rand.Rand, f weight.Format, rows, in, out int) (c, decoded *linearCase[float32]) {
	decoded = newLinearCase[float32](t, rng, attn.Float32, rows, in, out)
	size := f.Size(in * out)
	mem, free := cputest.Guarded(t, size)
	decoded.free = append(decoded.free, free)
	blocks := unsafe.Slice((*byte)(mem), size)
	for i := range blocks {
		blocks[i] = byte(rng.Uint32())
	}
	for at := 0; f.Block() > 1 && at < size; at += f.Bytes() {
		for _, k := range factorsOf[f] {
			x := half.FromFloat32(float32(rng.NormFloat64()))
			blocks[at+k], blocks[at+k+1] = byte(x), byte(x>>8)
		}
		if isInt4(f) {
			blocks[at+2] %= weight.MaxInt4Zero + 1
		}
	}
	own := *decoded
	c = &own
	c.W = weight.Matrix{Format: f, Ptr: mem, Len: in * out}
	wide := unsafe.Slice((*float32)(decoded.W.Ptr), in*out)
	if f == weight.E4M3 {
		for i, b := range blocks {
			blocks[i] = b &^ byte(b>>3&b>>2&b>>1&b&1) // no NaN
		}
		c.W.Group = 128 * rng.IntN(2)
		for range out * c.W.Groups(in) {
			c.W.Scales = append(c.W.Scales, float32(math.Ldexp(rng.NormFloat64(), -6)))
		}
		c.W.Scales[rng.IntN(len(c.W.Scales))] = []float32{0, 0x1p-100, -1}[rng.IntN(3)]
		for o := range out {
			c.W.Row(wide[o*in:][:in], o, nil)
		}
	} else {
		weight.Decode(f, wide, mem)
	}
	if f == weight.Int8 {
		for range out {
			c.W.Scales = append(c.W.Scales, float32(rng.NormFloat64()))
		}
		decoded.W.Scales = c.W.Scales
	}
	c.w = nil
	for o := range out {
		row := make([]float64, in)
		for i := range row {
			if row[i] = float64(wide[o*in+i]); decoded.W.Scales != nil {
				row[i] *= float64(c.W.Scales[o])
			}
		}
		c.w = append(c.w, row)
	}
	decoded.w = c.w
	return c, decoded
}

func isInt4(f weight.Format) bool { return f >= weight.Int4_32 && f <= weight.Int4_128 }

// factorsOf are the offsets of the 16-bit numbers in a block.
var factorsOf = map[weight.Format][]int{weight.Q8_0: {0}, weight.Q4_0: {0}, weight.Q4_1: {0, 2},
	weight.Q5_0: {0}, weight.Q5_1: {0, 2}, weight.Q4_K: {0, 2}, weight.Q5_K: {0, 2}, weight.Q6_K: {208},
	weight.Int4_32: {0}, weight.Int4_64: {0}, weight.Int4_128: {0}}

// blockWidths returns numbers of elements of a row.
func blockWidths(f weight.Format) []int {
	if f.Block() == 1 {
		return []int{1, 15, 31, 33, 96, 127, 128, 129, 300, 777, 1664}
	}
	return []int{f.Block(), 2 * f.Block(), 3 * f.Block(), 4 * f.Block(), 5 * f.Block(), 9 * f.Block()}
}

// TestBlocksExact: unless x may be rounded, results have the bits of the decoded weights, for few rows, many and one.
func TestBlocksExact(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range blockFormats() {
		for _, in := range blockWidths(f) {
			for _, rows := range []int{1, 2, 3, 4, 5, 9, 130} {
				if reftest.RaceEnabled && rng.IntN(3) > 0 {
					continue
				}
				c, decoded := newBlockCase(t, rng, f, rows, in, []int{1, 3, 5, 30, 67}[rng.IntN(5)])
				c.RoundX = f == weight.E4M3 && rows%2 == 0 // which rounds nothing
				c.run(t, cpu.Default())
				c.check(t)
				got := slices.Clone(c.Y)
				decoded.run(t, cpu.Default())
				for i, v := range decoded.Y {
					if math.Float32bits(got[i]) != math.Float32bits(v) {
						t.Fatalf("%v %v, %d x %d x %d: result %d is %v, of float32 weights %v", cpu.InUse(), f, rows, in, c.Out, i, got[i], v)
					}
				}
				c.close()
			}
		}
	}
}

// TestBlocksFillAllocations: no pointer leaves a weight that fills its allocation, which the race detector looks for.
func TestBlocksFillAllocations(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range blockFormats() {
		for _, rows := range []int{1, 5} {
			c, _ := newBlockCase(t, rng, f, rows, 1024, 128) // multiples of 8 KB, for which Go adds nothing
			mem := bytes.Clone(unsafe.Slice((*byte)(c.W.Ptr), f.Size(c.W.Len)))
			c.W.Ptr = unsafe.Pointer(&mem[0])
			c.run(t, cpu.Default())
			c.check(t)
			c.close()
		}
	}
}

// integersIn makes x whose rounding to 8 bits is exact: integers times a power of two, with a block's largest at 127.
func integersIn(rng *rand.Rand, x []float32, in int) {
	for at := range x {
		block := at / in * (in/32 + 1) // blocks begin with rows
		block += at % in / 32
		scale := math.Ldexp(1, block*7%11-5)
		q := rng.IntN(255) - 127
		if at%in%32 == 0 {
			q = 127 - 254*rng.IntN(2)
		}
		x[at] = float32(float64(q) * scale)
	}
}

// TestBlocksRounded: with an x of integers, results are those of float64 to the rounding of float32 sums.
func TestBlocksRounded(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range roundingFormats() {
		for _, in := range blockWidths(f) {
			for _, rows := range []int{1, 2, 3, 4, 5, 7, 8, 9, 130} {
				if reftest.RaceEnabled && rng.IntN(3) > 0 {
					continue
				}
				c, _ := newBlockCase(t, rng, f, rows, in, []int{1, 2, 3, 5, 11, 16, 30, 67}[rng.IntN(8)])
				c.RoundX = true
				integersIn(rng, c.X, in)
				c.cancelled = cancelled(c)
				c.run(t, cpu.Default())
				c.check(t)
				c.close()
			}
		}
	}
}

// cancelled returns the size of the largest sum of scales times integers, and of minima, times those of x: a minimum is multiplied by
// the sum of a block, and may cancel the integers.
func cancelled(c *linearCase[float32]) float64 {
	if !c.W.Format.HasMinima() {
		return 0
	}
	most := 0.0
	for o := range c.Out {
		q, scales, minima := make([]int8, c.In), make([]float32, c.In/16), make([]float32, c.In/16)
		size := c.W.Format.Size(c.In)
		weight.Unpack(c.W.Format, q, scales, minima, unsafe.Slice((*byte)(c.W.At(o*c.In)), size))
		for r := range c.Rows {
			sum := 0.0
			for i, v := range q {
				run := i / c.W.Format.Run()
				sum += (math.Abs(float64(scales[run])*float64(v)) + math.Abs(float64(minima[run]))) * math.Abs(float64(c.X[r*c.In+i]))
			}
			most = max(most, sum)
		}
	}
	return most
}

// TestBlocksRound: rounding any x to 8 bits costs half a step of each block.
func TestBlocksRound(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range roundingFormats() {
		for _, in := range blockWidths(f) {
			rows := []int{1, 4, 6}[rng.IntN(3)]
			c, _ := newBlockCase(t, rng, f, rows, in, 9)
			c.RoundX, c.Bias, c.Residual, c.Times, c.Activation = true, nil, nil, nil, 0
			c.run(t, cpu.Default())
			slack := cancelled(c) * 0x1p-24 * float64(in)
			worst := 0.0
			for r := range rows {
				for o, w := range c.w {
					want, bound := 0.0, slack
					for b := 0; b < in; b += 32 {
						most, size := 0.0, 0.0
						for i := b; i < min(b+32, in); i++ {
							x := float64(c.X[r*in+i])
							most, size, want = max(most, math.Abs(x)), size+math.Abs(w[i]), want+x*w[i]
						}
						bound += most / 254 * 1.001 * size
					}
					off := math.Abs(float64(c.Y[r*c.Out+o]) - want)
					if !(off <= bound) {
						t.Fatalf("%v %v, %d x %d: result (%d, %d) is %v, want %v +- %v", cpu.InUse(), f, rows, in, r, o, c.Y[r*c.Out+o], want, bound)
					}
					worst = max(worst, off)
				}
			}
			if in >= 64 && worst == 0 {
				t.Errorf("%v %v, %d x %d: x was not rounded", cpu.InUse(), f, rows, in)
			}
			c.close()
		}
	}
}

// TestBlocksAlone: a row has the same bits alone and among others, and on any number of threads, also if a panel has a part of In.
func TestBlocksAlone(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range roundingFormats() {
		for _, rows := range []int{131, 11} {
			const out = 45
			in := 512
			if rows < 100 {
				in = 2*panelGroups*groupElements + max(f.Block(), 32)
			}
			c, _ := newBlockCase(t, rng, f, rows, in, out)
			c.RoundX = true
			c.run(t, cpu.Default())
			all := slices.Clone(c.Y)
			for _, n := range []int{1, 2, 3, 4, 5, 6, 9} {
				cputest.SetProcs(t, 1+rng.IntN(3))
				at := rng.IntN(rows - n + 1)
				o := c.Operands
				o.Rows, o.X, o.Y = n, c.X[at*in:], make([]float32, n*out)
				for i := range o.Y {
					o.Y[i] = float32(math.NaN())
				}
				if o.Times != nil {
					o.Times = o.Times[at*out:]
				}
				if o.Residual != nil {
					o.Residual = o.Residual[at*out:]
				}
				if err := Run(cpu.Default(), &o); err != nil {
					t.Fatal(err)
				}
				for i, v := range o.Y {
					if math.Float32bits(v) != math.Float32bits(all[at*out+i]) {
						t.Fatalf("%v %v: of %d rows, result %d is %v, of %d rows %v", cpu.InUse(), f, n, i, v, rows, all[at*out+i])
					}
				}
			}
			c.close()
		}
	}
}

// TestPanels: a pack kernel writes the same set as unpacking and interleaving the rows, and no other set.
func TestPanels(t *testing.T) {
	rng := reftest.Rand(t)
	k := linearTiers[cpu.InUse()].blocks
	for f, pack := range k.pack {
		if pack == nil {
			continue
		}
		f := weight.Format(f)
		for _, in := range blockWidths(f) {
			c, _ := newBlockCase(t, rng, f, 1, in, dotStreams)
			n, size := (in-1)/groupElements+1, int(unsafe.Sizeof(weightGroup{}))
			got, want, rows := make([]panelGroup, n), make([]panelGroup, n), make([]weightGroup, dotStreams*n)
			set := rng.IntN(len(got[0]))
			for i := range got {
				for s := range got[i] {
					for j := range got[i][s].q {
						got[i][s].q[j] = 0xa5
					}
				}
			}
			copy(want, got)
			pack(&unpackArgs{dst: unsafe.Pointer(&got[0][set]), src: c.W.Ptr, srcRow: f.Size(in), n: in})
			k.unpack[f](&unpackArgs{dst: unsafe.Pointer(&rows[0]), dstRow: n * size, src: c.W.Ptr, srcRow: f.Size(in), rows: dotStreams, n: in})
			k.interleave(&interleaveArgs{dst: unsafe.Pointer(&want[0][set]), src: unsafe.Pointer(&rows[0]), srcRow: n * size, second: secondOf[kindOf(f)], groups: n})
			for i := range got {
				if kindOf(f) == plainBlocks {
					got[i][set].second, want[i][set].second = [16]float32{}, [16]float32{}
				}
				if got[i] != want[i] {
					t.Fatalf("%v %v: group %d of %d elements, set %d:\n%v\nwant\n%v", cpu.InUse(), f, i, in, set, got[i], want[i])
				}
			}
			c.close()
		}
	}
}

// TestBlocksOdd: what is not finite in x or in a scale makes no finite result, zeros and tiny numbers count as 0, and other rows and
// features are as before.
func TestBlocksOdd(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range roundingFormats() {
		const rows, in, out = 6, 256, panelOuts + 10
		c, _ := newBlockCase(t, rng, f, rows, in, out)
		c.RoundX, c.Bias, c.Residual, c.Times, c.Activation = true, nil, nil, nil, 0
		copy(c.X[in:2*in], make([]float32, in))
		for i := range in {
			c.X[2*in+i] = float32(math.Ldexp(rng.NormFloat64(), -130))
		}
		c.run(t, cpu.Default())
		before := slices.Clone(c.Y)
		for i, v := range before[out : 3*out] {
			if v != 0 {
				t.Fatalf("%v %v: result %d of zeros is %v", cpu.InUse(), f, i, v)
			}
		}
		c.X[rng.IntN(in)] = float32(math.Inf(1))
		c.X[3*in+rng.IntN(in)] = float32(math.NaN())
		bad := -1
		if len(factorsOf[f]) > 0 {
			bad = rng.IntN(out)
			at := f.Size(bad*in + rng.IntN(in/f.Block())*f.Block())
			b := unsafe.Slice((*byte)(unsafe.Add(c.W.Ptr, at+factorsOf[f][0])), 2)
			b[0], b[1] = 0, 0x7c
		}
		c.run(t, cpu.Default())
		for i, v := range c.Y {
			row, o := i/out, i%out
			if odd := row == 0 || row == 3 || o == bad; odd && v-v == 0 || !odd && v != before[i] {
				t.Errorf("%v %v: result (%d, %d) is %v, and was %v", cpu.InUse(), f, row, o, v, before[i])
			}
		}
		c.close()
	}
}

// TestBlocksTogether: layers of one x and of several, with and without rounding, have the bits of layers alone.
func TestBlocksTogether(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range blockFormats() {
		for _, rows := range []int{1, 3, 140} {
			for _, round := range []bool{false, true} {
				var all []Operands[float32]
				var want [][]float32
				for i := range 4 {
					c, _ := newBlockCase(t, rng, f, rows, 256, 13+5*i)
					t.Cleanup(c.close)
					c.RoundX = round
					if i > 0 && i < 3 {
						c.X = all[0].X
					}
					c.run(t, cpu.Default())
					want = append(want, slices.Clone(c.Y))
					all = append(all, c.Operands)
				}
				for i := range all {
					clear(all[i].Y)
				}
				if err := RunAll(cpu.Default(), all); err != nil {
					t.Fatal(err)
				}
				for i, o := range all {
					if !slices.Equal(o.Y, want[i]) {
						t.Fatalf("%v %v, %d rows, rounded %v: layer %d of 4 has other results than alone", cpu.InUse(), f, rows, round, i)
					}
				}
			}
		}
	}
}

// TestBlocksOrder: weights with an order of columns have the bits of the same columns of x in order, also among other layers.
func TestBlocksOrder(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range []weight.Format{weight.Q4_1, weight.Q6_K, weight.Int4_128} {
		for _, rows := range []int{1, 3, 140} {
			const in = 256
			var all []Operands[float32]
			var want [][]float32
			order := make([]int32, in)
			for i, from := range rng.Perm(in) {
				order[i] = int32(from)
			}
			for i := range 4 {
				c, _ := newBlockCase(t, rng, f, rows, in, 13+5*i)
				t.Cleanup(c.close)
				c.RoundX = rows != 3
				if i > 0 {
					c.X = all[0].X
				}
				x := c.X
				if i < 3 {
					c.W.Order = order
					c.X = make([]float32, rows*in)
					for j := range c.X {
						c.X[j] = x[j/in*in+int(order[j%in])]
					}
				}
				alone := c.Operands
				alone.W.Order = nil
				if err := Run(cpu.Default(), &alone); err != nil {
					t.Fatal(err)
				}
				want = append(want, slices.Clone(c.Y))
				c.X = x
				all = append(all, c.Operands)
				clear(c.Y)
			}
			if err := RunAll(cpu.Default(), all); err != nil {
				t.Fatal(err)
			}
			for i, o := range all {
				if !slices.Equal(o.Y, want[i]) {
					t.Fatalf("%v %v, %d rows: layer %d of 4 has other results than with columns in order", cpu.InUse(), f, rows, i)
				}
			}
			bad := all[0]
			bad.W.Order = order[1:]
			if err := Run(cpu.Default(), &bad); !errors.Is(err, attn.ErrShape) {
				t.Fatal(err)
			}
			if n := cputest.Allocations(5, func() {
				if err := RunAll(cpu.Default(), all); err != nil {
					t.Error(err)
				}
			}); n > 0 {
				t.Errorf("%v %v, %d rows: %d allocations", cpu.InUse(), f, rows, n)
			}
		}
	}
}

// TestBlocksDoNotAllocate: see TestLinearDoesNotAllocate.
func TestBlocksDoNotAllocate(t *testing.T) {
	rng := reftest.Rand(t)
	for _, f := range blockFormats() {
		for _, rows := range []int{1, 9, 130} {
			for _, round := range []bool{false, true} {
				c, _ := newBlockCase(t, rng, f, rows, 512, 64)
				c.RoundX = round
				if n := cputest.Allocations(10, func() { c.run(t, cpu.Default()) }); n > 0 {
					t.Errorf("%v %v, %d rows, rounded %v: %d allocations", cpu.InUse(), f, rows, round, n)
				}
				c.close()
			}
		}
	}
}

// BenchmarkBlocks is layers of one row and of many, whose weights are in memory and not in a cache, in turn with the read ceiling and
// with bfloat16. Rates are of bytes of weights, or of products. Each turn is short, so that the best is one without other work.
func BenchmarkBlocks(b *testing.B) {
	const memory, turn = 256 << 20, 4 << 20
	bytes := cputest.Noise(attn.Float16, memory/2)
	for _, size := range [][2]int{{8192, 2048}, {1536, 576}, {576, 1536}, {49152, 576}} {
		out, in := size[0], size[1]
		for _, rows := range []int{1, 4, 16, 384} {
			x, y, scales := make([]float32, rows*in), make([]float32, rows*out), make([]float32, out)
			for i := range x {
				x[i] = rand.Float32() - 0.5
			}
			at := 0
			next := func(n int) unsafe.Pointer { // memory that was not read for long
				if at+n > memory {
					at = 0
				}
				at += n
				return unsafe.Add(bytes, at-n)
			}
			var all []*cputest.Contender
			if rows == 1 {
				all = append(all, &cputest.Contender{Name: "read", Work: turn, Run: func() {
					if _, err := cpu.ReadSum(cpu.Default(), unsafe.Slice((*byte)(next(turn)), turn)); err != nil {
						b.Fatal(err)
					}
				}})
			}
			for _, f := range append([]weight.Format{weight.BFloat16}, blockFormats()...) {
				for _, round := range []bool{true, false} {
					if f == weight.BFloat16 && round || in%f.Block() != 0 {
						continue
					}
					o := Operands[float32]{Rows: rows, In: in, Out: out, X: x, Y: y, RoundX: round, W: weight.Matrix{Format: f, Len: in * out}}
					if f.HasScales() {
						o.W.Scales = scales
					}
					layer := f.Size(in * out)
					layers := max(1, turn/layer)
					if rows > 1 {
						layers = 1
					}
					c := &cputest.Contender{Name: fmt.Sprint(f, map[bool]string{true: ", x of 8 bits"}[round]), Work: float64(layers * layer), Run: func() {
						for range layers {
							o.W.Ptr = next((layer + 63) / 64 * 64)
							if err := Run(cpu.Default(), &o); err != nil {
								b.Fatal(err)
							}
						}
					}}
					if rows > 1 {
						c.Work = float64(rows) * float64(out) * float64(in)
					}
					all = append(all, c)
				}
			}
			b.Run(fmt.Sprintf("%dx%d/rows%d", out, in, rows), func(b *testing.B) {
				unit := "GB/s"
				if rows > 1 {
					unit = "G products/s"
				}
				cputest.Compete(b, unit, all)
			})
		}
	}
}
