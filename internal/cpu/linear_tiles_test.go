package cpu

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

var weightTypes = []attn.DType{attn.Float32, attn.Float16, attn.BFloat16}

// tilesInUse returns the kernels for many rows, and skips the test if there are none.
func tilesInUse(t testing.TB) *linearTiles {
	t.Helper()
	k := linearTiers[inUse].tiles
	if k == nil || reftest.RaceEnabled {
		t.Skip("all rows are few, or somebody looks for races in assembly")
	}
	return k
}

// eachTiles runs a test with the tier's kernels for many rows, and with their Go twins, which every machine has:
// those for float32, and those for parts. Twins are slow: a test may do less with them. Under
// the race detector, which can't see into assembly, tests of several threads run with the twins too, and no others.
func eachTiles(t *testing.T, threads bool, test func(t *testing.T, k *linearTiles, twins bool)) {
	if reftest.RaceEnabled && !threads {
		t.Skip("the detector has use for tests of several threads")
	}
	if k := linearTiers[inUse].tiles; k != nil {
		t.Run(inUse.String(), func(t *testing.T) { test(t, k, false) })
	}
	if inUse != tierGo && !reftest.RaceEnabled {
		return // once is enough
	}
	was := linearTiers[inUse]
	defer func() { linearTiers[inUse] = was }()
	for name, k := range map[string]*linearTiles{"twins": floatTwins(), "twins of parts": partTwins()} {
		tier := *was
		tier.tiles = k
		linearTiers[inUse] = &tier
		t.Run(name, func(t *testing.T) { test(t, k, true) })
	}
}

func floatTwins() *linearTiles {
	k := &linearTiles{rows: 5, outs: 16, panels: 3}
	mul := []func(*tileArgs){nil}
	for rows := 1; rows <= k.rows; rows++ {
		mul = append(mul, func(a *tileArgs) {
			a.rows, a.outs = rows, k.outs
			tileF32Go(a)
		})
	}
	for d, pack := range map[attn.DType]func(*packArgs){attn.Float32: packF32Go, attn.Float16: packF16Go, attn.BFloat16: packBF16Go} {
		k.ways[d] = tileWay{fromRows: 16, depth: 64, mul: mul, pack: pack, rows: packRows}
	}
	return k
}

func partTwins() *linearTiles {
	k := &linearTiles{rows: 2 * stepRows, outs: 2 * stepRows, panels: 2}
	way := func(x, w int, pack func(*packArgs)) tileWay {
		mul := make([]func(*tileArgs), k.rows+1)
		mul[k.rows] = func(a *tileArgs) {
			a.xParts, a.wParts = x, w
			tilePartsGo(a)
		}
		split := func(a *packArgs) { splitF32Go(a, x) }
		return tileWay{fromRows: 32, depth: 2 * stepDepth, mul: mul, pack: pack, rows: stepRows, xParts: x, wParts: w, split: split, odd: oddGo}
	}
	f16, bf16 := way(2, 2, pairsF16Go), way(1, 1, pairsBF16Go)
	k.ways[attn.Float32], k.ways[attn.Float16], k.ways[attn.BFloat16] = way(3, 3, pairsF32Go), way(3, 2, pairsF16Go), way(3, 1, pairsBF16Go)
	k.rounded[attn.Float16], k.rounded[attn.BFloat16] = &f16, &bf16
	return k
}

// setFromRows makes so many rows many, for all ways, until restore is called.
func (t *linearTiles) setFromRows(rows int) (restore func()) {
	var was []int
	each := func(f func(*tileWay)) {
		for _, d := range weightTypes {
			for _, w := range t.waysOf(d) {
				f(w)
			}
		}
	}
	each(func(w *tileWay) {
		was = append(was, w.fromRows)
		w.fromRows = rows
	})
	return func() {
		each(func(w *tileWay) { w.fromRows, was = was[0], was[1:] })
	}
}

// waysOf are what a type's weights can be multiplied with.
func (t *linearTiles) waysOf(d attn.DType) []*tileWay {
	if w := t.rounded[d]; w != nil {
		return []*tileWay{&t.ways[d], w}
	}
	return []*tileWay{&t.ways[d]}
}

// guardedRows returns guarded memory of some rows that lie stride bytes apart.
func guardedRows(t testing.TB, rng *rand.Rand, d attn.DType, rows, n int) (at unsafe.Pointer, stride int) {
	t.Helper()
	pad := rng.IntN(3)
	stride = (n + pad) * d.Size()
	mem, free := guarded(t, rows*stride-pad*d.Size())
	t.Cleanup(free)
	b := Buffer{DType: d, Ptr: mem, Len: rows*(n+pad) - pad}
	for i := range rows * n {
		v := rounded(rng.NormFloat64()*math.Exp2(float64(rng.IntN(20)-10)), d)
		store(&b, i/n*(n+pad)+i%n, []float32{float32(v)})
	}
	return mem, stride
}

// TestTilePacking: what packs rows of x and weights writes the bits of its Go twin, and nothing else.
func TestTilePacking(t *testing.T) {
	k, rng := tilesInUse(t), reftest.Rand(t)
	twins := map[attn.DType]func(*packArgs){attn.Float32: packF32Go, attn.Float16: packF16Go, attn.BFloat16: packBF16Go}
	pairs := map[attn.DType]func(*packArgs){attn.Float32: pairsF32Go, attn.Float16: pairsF16Go, attn.BFloat16: pairsBF16Go}
	columnsOf := map[attn.DType]func(*packArgs){attn.Float16: columnsF16Go, attn.BFloat16: columnsBF16Go}
	splits := []func(*packArgs){1: splitX1Go, splitX2Go, splitX3Go}
	for _, d := range weightTypes {
		for _, w := range k.waysOf(d) {
			for _, n := range []int{1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100} {
				for rows := 1; rows <= w.rows; rows++ {
					src, stride := guardedRows(t, rng, d, rows, n)
					a := packArgs{src: src, srcRow: stride, rows: rows, n: n, dstStep: 4 * (w.rows + rng.IntN(20))}
					size, twin := a.dstStep*(n-1)+4*w.rows, twins[d]
					if w.wParts > 0 {
						a.dstPart, twin = stepBytes, pairs[d]
						a.dstStep = (w.wParts + rng.IntN(2)) * stepBytes
						size = (n-1)/stepDepth*a.dstStep + w.wParts*stepBytes
					}
					// Of steps, what belongs to rows behind the last may be anything.
					samePacked(t, fmt.Sprintf("%v %v, %d rows of %d", inUse, d, rows, n), &a, size, w.pack, twin, w.wParts > 0 && rows < w.rows)
				}
			}
			for _, n := range []int{1, 2, 15, 16, 17, 31, 32, 33, 64, 95} {
				if w.wParts == 0 || promptTiers[inUse].exact[d] == nil {
					break
				}
				columns := promptTiers[inUse].exact[d].columns
				src, stride := guardedRows(t, rng, d, n, stepRows)
				a := packArgs{src: src, srcRow: stride, rows: stepRows, n: n, dstPart: stepBytes, dstStep: (w.wParts + rng.IntN(2)) * stepBytes}
				size := (n-1)/stepDepth*a.dstStep + w.wParts*stepBytes
				samePacked(t, fmt.Sprintf("%v %v, %d values", inUse, d, n), &a, size, columns, columnsOf[d], false)
			}
			for _, n := range []int{1, 15, 16, 17, 31, 32, 33, 64, 95} {
				for rows := 1; rows <= stepRows && w.split != nil; rows++ {
					src, stride := guardedRows(t, rng, attn.Float32, rows, n)
					for _, odd := range []float64{0, math.Inf(1), math.NaN(), 1e-40, math.MaxFloat32} {
						if odd != 0 {
							*(*float32)(unsafe.Add(src, rng.IntN(rows)*stride+4*rng.IntN(n))) = float32(odd)
						}
						a := packArgs{src: src, srcRow: stride, rows: rows, n: n, dstPart: stepBytes, dstStep: (w.xParts + rng.IntN(2)) * stepBytes}
						size := (n-1)/stepDepth*a.dstStep + w.xParts*stepBytes
						samePacked(t, fmt.Sprintf("%v x in %d, %d rows of %d", inUse, w.xParts, rows, n), &a, size, w.split, splits[w.xParts], false)
					}
				}
			}
		}
	}
}

// samePacked compares what two kernels write into memory of the given size. With loose set, 4 bytes that the twin
// leaves alone may be anything.
func samePacked(t *testing.T, name string, a *packArgs, size int, kernel, twin func(*packArgs), loose bool) {
	t.Helper()
	const untouched = 0xa5
	var got [2][]byte
	for i, f := range []func(*packArgs){kernel, twin} {
		mem, free := guarded(t, size)
		defer free()
		got[i] = unsafe.Slice((*byte)(mem), size)
		copy(got[i], bytes.Repeat([]byte{untouched}, size))
		b := *a
		b.dst = mem
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

// TestTileKernels: the kernels in use are within the rounding of sums of their Go twins, for all numbers of rows.
func TestTileKernels(t *testing.T) {
	k, rng := tilesInUse(t), reftest.Rand(t)
	for _, d := range weightTypes {
		for _, w := range k.waysOf(d) {
			for rows, kernel := range w.mul {
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

func testTile(t *testing.T, rng *rand.Rand, k *linearTiles, w *tileWay, rows, n int) {
	t.Helper()
	const pad = 3
	tiles, tall := 1, 1
	if w.split != nil {
		tiles, tall = 1+rng.IntN(3), 1+rng.IntN(2)
	}
	outs := tiles * k.outs
	a := tileArgs{n: n, rows: rows, outs: k.outs, xParts: w.xParts, wParts: w.wParts, yRow: 4 * (outs + pad), more: rng.IntN(2), tiles: tiles, tall: tall}
	a.yStep = rows * a.yRow
	twin, terms := tileF32Go, n
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
	if w.split == nil {
		a.x, a.xRow = numbers(attn.Float32, rows, n)
		a.w, _ = numbers(attn.Float32, 1, n*k.outs)
	} else {
		twin, terms = tilePartsGo, n*stepDepth*w.xParts*w.wParts
		a.xRow = n * w.xParts * stepBytes
		a.xStep = 2 * a.xRow
		a.x, _ = numbers(attn.BFloat16, 1, tall*n*w.xParts*stepBytes)
		a.w, _ = numbers(attn.BFloat16, 1, tiles*n*w.wParts*stepBytes)
		a.wStep = 2 * n * w.wParts * stepBytes
	}
	was := make([]float32, tall*rows*(outs+pad))
	for i := range was {
		was[i] = rng.Float32()
	}
	run := func(kernel func(*tileArgs)) []float32 {
		mem, free := guarded(t, 4*(len(was)-pad))
		t.Cleanup(free)
		y := unsafe.Slice((*float32)(mem), len(was)-pad)
		copy(y, was)
		b := a
		b.y = mem
		kernel(&b)
		return y
	}
	got, want := run(w.mul[rows]), run(twin)
	for _, take := range signs {
		take()
	}
	for i, size := range run(twin) {
		if i%(outs+pad) >= outs {
			if got[i] != was[i] {
				t.Fatalf("%v, %d rows: element %d was written", inUse, rows, i)
			}
		} else if diff := math.Abs(float64(got[i] - want[i])); !(diff <= float64(terms+1)*0x1p-23*float64(size)) {
			t.Fatalf("%v, %d rows of %d: element %d is %v, of the Go kernel %v", inUse, rows, n, i, got[i], want[i])
		}
	}
}

// TestLinearMany: layers of many rows at the edges of tiles, pieces, parts of In and blocks.
func TestLinearMany(t *testing.T) {
	rng := reftest.Rand(t)
	check := func(t *testing.T, d attn.DType, rows, in, out int) {
		c := newLinearCase[float32](t, rng, d, rows, in, out)
		defer c.close()
		c.run(t, Default())
		c.check(t)
	}
	eachTiles(t, false, func(t *testing.T, k *linearTiles, twins bool) {
		for _, d := range weightTypes {
			for _, s := range [][3]int{ // rows, in, out
				{32, 64, 1}, {33, 65, 31}, {64, 96, 32}, {65, 255, 33}, {47, 256, 64}, {95, 257, 130}, {96, 511, 17}, {100, 1023, 40}, {97, 1024, 65},
				{98, 1025, 300}, {99, 2100, 33}, {32, 4200, 40}, {513, 70, 34}, {1100, 64, 5}, {101, 64, 1000}, {129, 130, 257},
			} {
				if !twins || attn.Product(s[0], s[1]*s[2]) < 1<<19 {
					check(t, d, s[0], s[1], s[2])
				}
			}
			for n := 20; n > 0; n-- {
				if twins && n > 3 {
					n = 3
				}
				check(t, d, k.ways[d].fromRows+rng.IntN(100), tileIn+rng.IntN(200), 1+rng.IntN(100))
			}
		}
	})
}

// TestLinearManyAlone: among many rows, a row has the same bits whatever the others are and however many, on any
// number of threads.
func TestLinearManyAlone(t *testing.T) {
	rng := reftest.Rand(t)
	eachTiles(t, true, func(t *testing.T, k *linearTiles, twins bool) {
		ins, all, out, numbers := []int{64, 129, 900, 2100}, 700, 70, []int{1, 2, 3, 7, 16}
		if twins || reftest.RaceEnabled {
			ins, all, out, numbers = []int{130}, 530, 35, []int{1, 3}
		}
		for _, d := range weightTypes {
			for _, roundX := range []bool{false, true} {
				if roundX && k.rounded[d] == nil {
					continue
				}
				for _, in := range ins {
					c := newLinearCase[float32](t, rng, d, all, in, out)
					c.RoundX = roundX
					c.run(t, Default())
					want := append([]float32(nil), c.Y...)
					from := max(k.ways[d].fromRows, 129) // what is rounded may be many with fewer
					for _, rows := range []int{k.ways[d].fromRows, k.ways[d].fromRows + 1, from, 513} {
						first := rng.IntN(all + 1 - rows)
						one := c.some(first, rows)
						if err := Linear(Default(), one); err != nil {
							t.Fatal(err)
						}
						for i, v := range one.Y {
							if v != want[first*out+i] {
								t.Fatalf("%v, %d elements: row %d has %v among %d rows and %v among %d",
									d, in, first+i/out, v, rows, want[first*out+i], all)
							}
						}
					}
					for _, threads := range numbers {
						was := runtime.GOMAXPROCS(threads)
						c.run(t, Default())
						runtime.GOMAXPROCS(was)
						for i, v := range c.Y {
							if v != want[i] {
								t.Fatalf("%v: element %d is %v on %d threads, not %v", d, i, v, threads, want[i])
							}
						}
					}
					c.close()
				}
			}
		}
	})
}

// some is the operands of some of the rows.
func (c *linearCase[F]) some(first, rows int) *LinearOperands[F] {
	o := c.LinearOperands
	o.Rows, o.X, o.Y = rows, c.X[first*c.In:], make([]F, rows*c.Out)
	if o.Residual != nil {
		o.Residual = c.Residual[first*c.Out:]
	}
	if o.Times != nil {
		o.Times = c.Times[first*c.Out:]
	}
	return &o
}

// fewRows computes the layer with the kernels for few rows.
func (c *linearCase[F]) fewRows(t *testing.T, k *linearTiles) {
	defer k.setFromRows(c.Rows + 1)()
	c.run(t, Default())
}

// TestLinearManyOdd: among many rows, NaN and infinities in x and w, and sums beyond a float32, are those of few
// rows, and no other result changes a bit.
func TestLinearManyOdd(t *testing.T) {
	rng := reftest.Rand(t)
	isOdd := func(v float32) bool { return v-v != 0 }
	eachTiles(t, false, func(t *testing.T, k *linearTiles, twins bool) {
		for _, d := range weightTypes {
			for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), math.MaxFloat32, float64(math.Float32frombits(0x7fffffff))} {
				for i := range 4 {
					inW, roundX := i%2 == 0, i/2 == 0
					c := newLinearCase[float32](t, rng, d, k.ways[d].fromRows+rng.IntN(9), tileIn+rng.IntN(200), 1+rng.IntN(70))
					c.Activation, c.Bias, c.Times, c.Residual, c.RoundX = attn.NoActivation, nil, nil, nil, roundX
					c.run(t, Default())
					usual := append([]float32(nil), c.Y...)
					row, feature, i := rng.IntN(c.Rows), rng.IntN(c.Out), rng.IntN(c.In)
					if inW {
						store(&c.W, feature*c.In+i, []float32{float32(bad)})
					} else {
						c.X[row*c.In+i] = float32(bad)
					}
					c.run(t, Default())
					got := append([]float32(nil), c.Y...)
					c.fewRows(t, k)
					for at, v := range got {
						if inW && at%c.Out != feature || !inW && at/c.Out != row {
							if v != usual[at] {
								t.Fatalf("%v, %v: element %d, which has no part in it, is %v, not %v", d, bad, at, v, usual[at])
							}
							continue
						}
						if few := c.Y[at]; isOdd(few) != isOdd(v) || isOdd(few) && v != few && (v == v || few == few) {
							t.Fatalf("%v, %v: element %d is %v, of few rows %v", d, bad, at, v, few)
						}
					}
					c.close()
				}
			}
		}
	})
}

// TestLinearRounded: where x may be rounded, the result is that of a rounded x; or it is the usual one.
func TestLinearRounded(t *testing.T) {
	rng := reftest.Rand(t)
	eachTiles(t, false, func(t *testing.T, k *linearTiles, twins bool) {
		for _, d := range weightTypes {
			for range 5 {
				c := newLinearCase[float32](t, rng, d, k.ways[d].fromRows+rng.IntN(60), tileIn+rng.IntN(300), 1+rng.IntN(70))
				c.RoundX = true
				c.run(t, Default())
				got := append([]float32(nil), c.Y...)
				w := k.rounded[d]
				if d == attn.BFloat16 && w != nil {
					for i, v := range c.X {
						c.X[i] = half.BFromFloat32(v).Float32()
					}
				}
				c.RoundX = false
				c.run(t, Default())
				for i, v := range got {
					if w == nil || d == attn.BFloat16 {
						if v != c.Y[i] {
							t.Fatalf("%v: element %d is %v, with x rounded before %v", d, i, v, c.Y[i])
						}
						continue
					}
					size := 1.0
					for j, v := range c.w[i%c.Out] {
						size += math.Abs(v * float64(c.X[i/c.Out*c.In+j]))
					}
					if diff := math.Abs(float64(v - c.Y[i])); !(diff <= 1.13*size*0x1p-13) {
						t.Fatalf("%v: element %d is %v, with x as it is %v", d, i, v, c.Y[i])
					}
				}
				c.close()
			}
		}
	})
}

// TestLinearManyConcurrently: calls at once do not share their scratch.
func TestLinearManyConcurrently(t *testing.T) {
	rng := reftest.Rand(t)
	eachTiles(t, true, func(t *testing.T, k *linearTiles, twins bool) {
		var e Engine
		defer e.Close()
		done := make(chan error)
		const callers = 4
		turns := 30
		if twins {
			turns = 2
		}
		for i := range callers {
			c := newLinearCase[float32](t, rng, weightTypes[i%3], k.ways[weightTypes[i%3]].fromRows+9*i, 100, 150)
			defer c.close()
			c.run(t, &e)
			want := append([]float32(nil), c.Y...)
			go func() {
				for range turns {
					clear(c.Y)
					if err := Linear(&e, &c.LinearOperands); err != nil {
						done <- err
						return
					}
					for i, v := range c.Y {
						if v != want[i] {
							done <- fmt.Errorf("%d rows: element %d is %v, want %v", c.Rows, i, v, want[i])
							return
						}
					}
				}
				done <- nil
			}()
		}
		for range callers {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
}

func TestLinearManyDoesNotAllocate(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the race detector allocates")
	}
	rng := reftest.Rand(t)
	eachTiles(t, false, func(t *testing.T, k *linearTiles, twins bool) {
		var e Engine
		defer e.Close()
		for _, d := range weightTypes {
			c := newLinearCase[float32](t, rng, d, k.ways[d].fromRows+30, 70, 50)
			if n := testing.AllocsPerRun(10, func() { c.run(t, &e) }); n > 0 {
				t.Errorf("%v: %v allocations", d, n)
			}
			c.close()
		}
	})
}

// TestTileCuts: pieces have each element of each layer once, no more features than fit into scratch, and those at the end are
// as small as they can be, unless rows alone are cut into enough.
func TestTileCuts(t *testing.T) {
	rng := reftest.Rand(t)
	way := tileWay{packing: 20}
	for range 200 {
		k := linearTiles{rows: 1 + rng.IntN(32), outs: 8 << rng.IntN(3), panels: 1 + rng.IntN(12)}
		l := linearRun{tiles: &k, way: &way, rows: 1 + rng.IntN(600), inTurn: rng.IntN(3) == 0}
		for range 1 + rng.IntN(3) {
			l.layers = append(l.layers, linearLayer{out: 1 + rng.IntN(2000)})
		}
		threads := 1 + rng.IntN(40)
		l.cut(threads)
		layer, at := 0, 0
		for i, g := range l.groups {
			if at == l.layers[layer].out {
				layer, at = layer+1, 0
			}
			n := g.to - g.from
			if g.layer != layer || g.from != at || n < 1 || g.to > l.layers[layer].out || n > k.panels*k.outs || n%k.outs > 0 && g.to < l.layers[layer].out {
				t.Fatalf("%d rows, %+v, %d threads: group %d is %+v, behind feature %d of layer %d", l.rows, k, threads, i, g, at, layer)
			}
			at = g.to
		}
		last := len(l.layers)
		if l.inTurn {
			last = 1
		}
		if layer != last-1 || at != l.layers[layer].out {
			t.Fatalf("%d layers: groups end at feature %d of layer %d", last, at, layer)
		}
		if n := l.groups[len(l.groups)-1]; threads > 1 && l.rowCuts < 2*threads && n.to-n.from > k.outs {
			t.Errorf("%d rows, %d threads: the last group is %+v, tiles have %d features", l.rows, threads, n, k.outs)
		}
		if l.rowCuts < 1 || l.rowCuts > 1 && l.rows/l.rowCuts < 4*k.rows {
			t.Errorf("%d rows of tiles of %d: cut into %d", l.rows, k.rows, l.rowCuts)
		}
	}
}
