package linear

import (
	"fmt"
	"math"
	"runtime"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cpu"
	"gorgonia.org/leanattention/internal/cpu/cputest"
	"gorgonia.org/leanattention/internal/cpu/matmul"
	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// eachTiles runs a test with the tier's kernels for many rows, and with the Go kernels, which every machine has:
// those for float32, and those for parts. Go kernels are slow: a test may do less with them. Under
// the race detector, which can't see into assembly, tests of several threads run with the Go kernels, too, and no others.
func eachTiles(t *testing.T, threads bool, test func(t *testing.T, k *matmul.Set, inGo bool)) {
	if reftest.RaceEnabled && !threads {
		t.Skip("the detector has use for tests of several threads")
	}
	if k := linearTiers[cpu.InUse()].tiles; k != nil {
		t.Run(cpu.InUse().String(), func(t *testing.T) { test(t, k, false) })
	}
	if cpu.InUse() != cpu.TierGo && !reftest.RaceEnabled {
		return // once is enough
	}
	was := linearTiers[cpu.InUse()]
	defer func() { linearTiers[cpu.InUse()] = was }()
	for name, k := range map[string]*matmul.Set{"go": matmul.GoFloats(), "go, parts": matmul.GoParts()} {
		tier := *was
		tier.tiles = k
		linearTiers[cpu.InUse()] = &tier
		t.Run(name, func(t *testing.T) { test(t, k, true) })
	}
}

// setFromRows makes so many rows many, for all ways of t, until restore is called.
func setFromRows(t *matmul.Set, rows int) (restore func()) {
	var was []int
	each := func(f func(*matmul.Way)) {
		for _, d := range cputest.WeightTypes {
			f(&t.Ways[d])
			if w := t.Rounded[d]; w != nil {
				f(w)
			}
		}
	}
	each(func(w *matmul.Way) {
		was = append(was, w.FromRows)
		w.FromRows = rows
	})
	return func() {
		each(func(w *matmul.Way) { w.FromRows, was = was[0], was[1:] })
	}
}

// TestLinearMany: layers of many rows at the edges of tiles, pieces, parts of In and blocks.
func TestLinearMany(t *testing.T) {
	rng := reftest.Rand(t)
	check := func(t *testing.T, d attn.DType, rows, in, out int) {
		c := newLinearCase[float32](t, rng, d, rows, in, out)
		defer c.close()
		c.run(t, cpu.Default())
		c.check(t)
	}
	eachTiles(t, false, func(t *testing.T, k *matmul.Set, inGo bool) {
		for _, d := range cputest.WeightTypes {
			for _, s := range [][3]int{ // rows, in, out
				{32, 64, 1}, {33, 65, 31}, {64, 96, 32}, {65, 255, 33}, {47, 256, 64}, {95, 257, 130}, {96, 511, 17}, {100, 1023, 40}, {97, 1024, 65},
				{98, 1025, 300}, {99, 2100, 33}, {32, 4200, 40}, {513, 70, 34}, {1100, 64, 5}, {101, 64, 1000}, {129, 130, 257},
			} {
				if !inGo || attn.Product(s[0], s[1]*s[2]) < 1<<19 {
					check(t, d, s[0], s[1], s[2])
				}
			}
			for n := 20; n > 0; n-- {
				if inGo && n > 3 {
					n = 3
				}
				check(t, d, k.Ways[d].FromRows+rng.IntN(100), tileIn+rng.IntN(200), 1+rng.IntN(100))
			}
		}
	})
}

// TestLinearManyAlone: among many rows, a row has the same bits whatever the others are and however many, on any
// number of threads.
func TestLinearManyAlone(t *testing.T) {
	rng := reftest.Rand(t)
	eachTiles(t, true, func(t *testing.T, k *matmul.Set, inGo bool) {
		ins, all, out, numbers := []int{64, 129, 900, 2100}, 700, 70, []int{1, 2, 3, 7, 16}
		if inGo || reftest.RaceEnabled {
			ins, all, out, numbers = []int{130}, 530, 35, []int{1, 3}
		}
		for _, d := range cputest.WeightTypes {
			for _, roundX := range []bool{false, true} {
				if roundX && k.Rounded[d] == nil {
					continue
				}
				for _, in := range ins {
					c := newLinearCase[float32](t, rng, d, all, in, out)
					c.RoundX = roundX
					c.run(t, cpu.Default())
					want := append([]float32(nil), c.Y...)
					from := max(k.Ways[d].FromRows, 129) // what is rounded may be many with fewer
					for _, rows := range []int{k.Ways[d].FromRows, k.Ways[d].FromRows + 1, from, 513} {
						first := rng.IntN(all + 1 - rows)
						one := c.some(first, rows)
						if err := Run(cpu.Default(), one); err != nil {
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
						c.run(t, cpu.Default())
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
func (c *linearCase[F]) some(first, rows int) *Operands[F] {
	o := c.Operands
	o.Rows, o.X, o.Y = rows, c.X[first*c.In:], make([]F, rows*c.Out)
	if o.Residual != nil {
		o.Residual = c.Residual[first*c.Out:]
	}
	if o.Times != nil {
		o.Times = c.Times[first*c.Out:]
	}
	return &o
}

// mostGEMVRows computes the layer with the kernels for few rows.
func (c *linearCase[F]) mostGEMVRows(t *testing.T, k *matmul.Set) {
	defer setFromRows(k, c.Rows+1)()
	c.run(t, cpu.Default())
}

// TestLinearManyOdd: among many rows, NaN and infinities in x and w, and sums beyond a float32, are those of few
// rows, and no other result changes a bit.
func TestLinearManyOdd(t *testing.T) {
	rng := reftest.Rand(t)
	isOdd := func(v float32) bool { return v-v != 0 }
	eachTiles(t, false, func(t *testing.T, k *matmul.Set, inGo bool) {
		for _, d := range cputest.WeightTypes {
			for _, bad := range []float64{math.NaN(), math.Inf(1), math.Inf(-1), math.MaxFloat32, float64(math.Float32frombits(0x7fffffff))} {
				for i := range 4 {
					inW, roundX := i%2 == 0, i/2 == 0
					c := newLinearCase[float32](t, rng, d, k.Ways[d].FromRows+rng.IntN(9), tileIn+rng.IntN(200), 1+rng.IntN(70))
					c.Activation, c.Bias, c.Times, c.Residual, c.RoundX = attn.NoActivation, nil, nil, nil, roundX
					c.run(t, cpu.Default())
					usual := append([]float32(nil), c.Y...)
					row, feature, i := rng.IntN(c.Rows), rng.IntN(c.Out), rng.IntN(c.In)
					if inW {
						cputest.Store(c.W.Ptr, c.dtype, feature*c.In+i, []float32{float32(bad)})
					} else {
						c.X[row*c.In+i] = float32(bad)
					}
					c.run(t, cpu.Default())
					got := append([]float32(nil), c.Y...)
					c.mostGEMVRows(t, k)
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
	eachTiles(t, false, func(t *testing.T, k *matmul.Set, inGo bool) {
		for _, d := range cputest.WeightTypes {
			for range 5 {
				c := newLinearCase[float32](t, rng, d, k.Ways[d].FromRows+rng.IntN(60), tileIn+rng.IntN(300), 1+rng.IntN(70))
				c.RoundX = true
				c.run(t, cpu.Default())
				got := append([]float32(nil), c.Y...)
				w := k.Rounded[d]
				if d == attn.BFloat16 && w != nil {
					for i, v := range c.X {
						c.X[i] = half.BFromFloat32(v).Float32()
					}
				}
				c.RoundX = false
				c.run(t, cpu.Default())
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
	eachTiles(t, true, func(t *testing.T, k *matmul.Set, inGo bool) {
		var e cpu.Engine
		defer e.Close()
		done := make(chan error)
		const callers = 4
		turns := 30
		if inGo {
			turns = 2
		}
		for i := range callers {
			c := newLinearCase[float32](t, rng, cputest.WeightTypes[i%3], k.Ways[cputest.WeightTypes[i%3]].FromRows+9*i, 100, 150)
			defer c.close()
			c.run(t, &e)
			want := append([]float32(nil), c.Y...)
			go func() {
				for range turns {
					clear(c.Y)
					if err := Run(&e, &c.Operands); err != nil {
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
	eachTiles(t, false, func(t *testing.T, k *matmul.Set, inGo bool) {
		var e cpu.Engine
		defer e.Close()
		for _, d := range cputest.WeightTypes {
			c := newLinearCase[float32](t, rng, d, k.Ways[d].FromRows+30, 70, 50)
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
	way := matmul.Way{Packing: 20}
	for range 200 {
		k := matmul.Set{Rows: 1 + rng.IntN(32), Outs: 8 << rng.IntN(3), Panels: 1 + rng.IntN(12)}
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
			if g.layer != layer || g.from != at || n < 1 || g.to > l.layers[layer].out || n > k.Panels*k.Outs || n%k.Outs > 0 && g.to < l.layers[layer].out {
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
		if n := l.groups[len(l.groups)-1]; threads > 1 && l.rowCuts < 2*threads && n.to-n.from > k.Outs {
			t.Errorf("%d rows, %d threads: the last group is %+v, tiles have %d features", l.rows, threads, n, k.Outs)
		}
		if l.rowCuts < 1 || l.rowCuts > 1 && l.rows/l.rowCuts < 4*k.Rows {
			t.Errorf("%d rows of tiles of %d: cut into %d", l.rows, k.Rows, l.rowCuts)
		}
	}
}
