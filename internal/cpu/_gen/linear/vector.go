package main

import (
	"math"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// vector makes the loops over the elements of queries, outputs and scores.
func vector(g *gen) {
	for _, set := range []isa{avx2, avx512} {
		add(g, set)
		scale(g, set)
		divide(g, set)
		bias(g, set)
		biasStreams(g, set)
		slope(g, set)
		products(g, set)
		doubles(g, set)
	}
}

func at(base, k reg.GPVirtual) Mem { return Mem{Base: base, Index: k, Scale: 4} }

// paramAt returns where a parameter lies.
func (g *gen) paramAt(name string) Mem {
	p, err := g.Param(name).Resolve()
	if err != nil {
		g.fail(err)
	}
	return p.Addr
}

// result returns where a result lies.
func (g *gen) result(i int) Mem {
	r, err := g.ReturnIndex(i).Resolve()
	if err != nil {
		g.fail(err)
	}
	return r.Addr
}

func add(g *gen, set isa) {
	g.kernel("add", set, "vector.go", "addGo", "")
	g.combine(g.VADDPS, g.VADDPS_Z, g.VADDSS)
	g.kernel("times", set, "vector.go", "timesGo", "")
	g.combine(g.VMULPS, g.VMULPS_Z, g.VMULSS)
}

// combine makes the loop of a function that replaces each element of dst by what an instruction makes of it and that of src.
func (g *gen) combine(all func(...Op), masked func(m, x, k, y Op), one func(...Op)) {
	dst, src, n := g.arg("dst"), g.arg("src"), g.arg("n")
	v := g.vec()
	g.each(n, func(k reg.GPVirtual) {
		g.VMOVUPS(at(dst, k), v)
		all(at(src, k), v, v)
		g.VMOVUPS(v, at(dst, k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		g.VMOVUPS_Z(at(dst, k), m, v)
		masked(at(src, k), v, m, v)
		g.VMOVUPS(v, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x := v.AsX()
		g.VMOVSS(at(dst, k), x)
		one(at(src, k), x, x)
		g.VMOVSS(x, at(dst, k))
	})
}

func scale(g *gen, set isa) {
	g.kernel("scale", set, "vector.go", "scaleGo", "")
	dst, src, n := g.arg("dst"), g.arg("src"), g.arg("n")
	by, v := g.vec(), g.vec()
	g.VBROADCASTSD(g.paramAt("by"), by)
	both := func() {
		wide := g.float64Halves(v)
		for _, x := range wide {
			g.VMULPD(by, x, x)
		}
		g.narrow(wide, v)
	}
	g.each(n, func(k reg.GPVirtual) {
		g.VMOVUPS(at(src, k), v)
		both()
		g.VMOVUPS(v, at(dst, k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		g.VMOVUPS_Z(at(src, k), m, v)
		both()
		g.VMOVUPS(v, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x := g.XMM()
		g.VXORPS(x, x, x)
		g.VCVTSS2SD(at(src, k), x, x)
		g.VMULSD(by.AsX(), x, x)
		g.VCVTSD2SS(x, x, x)
		g.VMOVSS(x, at(dst, k))
	})
}

func divide(g *gen, set isa) {
	g.kernel("divide", set, "vector.go", "divideGo", "")
	dst, src, n := g.arg("dst"), g.arg("src"), g.arg("n")
	by, v := g.vec(), g.vec()
	g.VBROADCASTSS(g.paramAt("by"), by)
	g.each(n, func(k reg.GPVirtual) {
		g.VMOVUPS(at(src, k), v)
		g.VDIVPS(by, v, v)
		g.VMOVUPS(v, at(dst, k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		g.VMOVUPS_Z(at(src, k), m, v)
		g.VDIVPS_Z(by, v, m, v)
		g.VMOVUPS(v, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x := v.AsX()
		g.VMOVSS(at(src, k), x)
		g.VDIVSS(by.AsX(), x, x)
		g.VMOVSS(x, at(dst, k))
	})
}

// float64Halves returns the halves of v as float64.
func (g *gen) float64Halves(v reg.VecVirtual) (wide [2]reg.VecVirtual) {
	var upper, lower reg.VecVirtual
	if g.isa == avx512 {
		lower, upper = v.AsY().(reg.VecVirtual), g.YMM()
		g.VEXTRACTF64X4(Imm(1), v, upper)
	} else {
		lower, upper = v.AsX().(reg.VecVirtual), g.XMM()
		g.VEXTRACTF128(Imm(1), v, upper)
	}
	for i, half := range []reg.VecVirtual{lower, upper} {
		wide[i] = g.vec()
		g.VCVTPS2PD(half, wide[i])
	}
	return wide
}

// narrow rounds what float64Halves returned into v.
func (g *gen) narrow(wide [2]reg.VecVirtual, v reg.VecVirtual) {
	upper := g.vec()
	if g.isa == avx512 {
		g.VCVTPD2PS(wide[0], v.AsY())
		g.VCVTPD2PS(wide[1], upper.AsY())
		g.VINSERTF64X4(Imm(1), upper.AsY(), v, v)
	} else {
		g.VCVTPD2PSY(wide[0], v.AsX())
		g.VCVTPD2PSY(wide[1], upper.AsX())
		g.VINSERTF128(Imm(1), upper.AsX(), v, v)
	}
}

// constant returns where a float64 of the function at hand lies.
func (g *gen) constant(name string, x float64) Mem {
	m := g.StaticGlobal(name + "Of" + g.fn)
	g.DataAttributes(attr.RODATA | attr.NOPTR)
	g.AppendDatum(U64(math.Float64bits(x)))
	return m
}

func bias(g *gen, set isa) {
	g.kernel("bias", set, "vector.go", "biasGo", "")
	dst, src, n := g.arg("dst"), g.arg("src"), g.arg("n")
	add := g.biased()
	g.each(n, func(k reg.GPVirtual) {
		x, y := g.vec(), g.vec()
		g.VMOVUPS(at(dst, k), x)
		g.VMOVUPS(at(src, k), y)
		add(x, y)
		g.VMOVUPS(x, at(dst, k))
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		x, y := g.vec(), g.vec()
		g.VMOVUPS_Z(at(dst, k), m, x)
		g.VMOVUPS_Z(at(src, k), m, y)
		add(x, y)
		g.VMOVUPS(x, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x, y := g.vec(), g.vec()
		g.VMOVSS(at(dst, k), x.AsX())
		g.VMOVSS(at(src, k), y.AsX())
		add(x, y)
		g.VMOVSS(x.AsX(), at(dst, k))
	})
}

// biased returns what adds the products of y with the parameter `by` to x.
func (g *gen) biased() (add func(x, y reg.VecVirtual)) {
	by, lowest, inf := g.vec(), g.vec(), g.vec()
	g.VBROADCASTSD(g.paramAt("by"), by)
	g.VBROADCASTSD(g.constant("lowest", -math.MaxFloat32), lowest)
	g.VBROADCASTSD(g.constant("infinite", math.Inf(-1)), inf)
	// product makes x the product, as float64.
	product := func(x reg.VecVirtual) {
		const equal = 0
		least := g.vec()
		g.VMULPD(by, x, x)
		g.VMAXPD(x, lowest, least) // NaN stays
		if g.isa == avx512 {
			m := g.K()
			g.VCMPPD(Imm(equal), inf, x, m)
			g.VBLENDMPD(x, least, m, x)
			return
		}
		is := g.vec()
		g.VCMPPD(Imm(equal), inf, x, is)
		g.VBLENDVPD(is, x, least, x)
	}
	return func(x, y reg.VecVirtual) {
		scores, products := g.float64Halves(x), g.float64Halves(y)
		for i, p := range products {
			product(p)
			g.VADDPD(p, scores[i], scores[i])
		}
		g.narrow(scores, x)
	}
}

// biasStreams is bias where four neighbours come from four streams. Four of each stream are loaded, and transposed.
func biasStreams(g *gen, set isa) {
	g.kernel("biasStreams", set, "vector.go", "biasStreamsGo", "")
	dst, src, n, first := g.arg("dst"), g.arg("src"), g.arg("n"), g.arg("first")
	var from [4]reg.GPVirtual
	for i := range from {
		from[i] = g.GP64()
		g.MOVQ(Mem{Base: first, Disp: 8 * i}, from[i])
		g.LEAQ(at(src, from[i]), from[i])
	}
	add := g.biased()
	g.SUBQ(Imm(16), n)
	g.JL(LabelRef("rest"))
	g.Label("loop")
	var rows, pairs, quads [4]reg.VecVirtual
	for i := range rows {
		rows[i], pairs[i], quads[i] = g.XMM(), g.XMM(), g.vec()
		g.VMOVUPS(Mem{Base: from[i]}, rows[i])
		g.ADDQ(Imm(16), from[i])
	}
	g.VUNPCKLPS(rows[1], rows[0], pairs[0])
	g.VUNPCKLPS(rows[3], rows[2], pairs[1])
	g.VUNPCKHPS(rows[1], rows[0], pairs[2])
	g.VUNPCKHPS(rows[3], rows[2], pairs[3])
	for i := range 2 {
		g.VUNPCKLPD(pairs[2*i+1], pairs[2*i], quads[2*i].AsX())
		g.VUNPCKHPD(pairs[2*i+1], pairs[2*i], quads[2*i+1].AsX())
	}
	if set == avx512 {
		for i := range 2 {
			y := quads[2*i].AsY()
			g.VINSERTF32X4(Imm(1), quads[2*i+1].AsX(), y, y)
		}
		g.VINSERTF64X4(Imm(1), quads[2].AsY(), quads[0], quads[0])
		x := g.vec()
		g.VMOVUPS(Mem{Base: dst}, x)
		add(x, quads[0])
		g.VMOVUPS(x, Mem{Base: dst})
	} else {
		for i := range 2 {
			x, y := g.vec(), quads[2*i]
			g.VINSERTF128(Imm(1), quads[2*i+1].AsX(), y, y)
			g.VMOVUPS(Mem{Base: dst, Disp: 32 * i}, x)
			add(x, y)
			g.VMOVUPS(x, Mem{Base: dst, Disp: 32 * i})
		}
	}
	g.ADDQ(Imm(64), dst)
	g.SUBQ(Imm(16), n)
	g.JGE(LabelRef("loop"))
	g.Label("rest")
	g.ADDQ(Imm(16), n)
	g.JZ(LabelRef("done"))
	g.Label("one")
	x, y, next := g.vec(), g.vec(), g.GP64()
	g.VMOVSS(Mem{Base: dst}, x.AsX())
	g.VMOVSS(Mem{Base: from[0]}, y.AsX())
	add(x, y)
	g.VMOVSS(x.AsX(), Mem{Base: dst})
	g.ADDQ(Imm(4), dst)
	g.LEAQ(Mem{Base: from[0], Disp: 4}, next)
	for i := range 3 {
		g.MOVQ(from[i+1], from[i])
	}
	g.MOVQ(next, from[3])
	g.DECQ(n)
	g.JNZ(LabelRef("one"))
	g.Label("done")
	g.ret()
}

func slope(g *gen, set isa) {
	g.kernel("slope", set, "vector.go", "slopeGo", "")
	dst, n, first := g.arg("dst"), g.arg("n"), g.arg("first")
	by, from, step, on := g.vec(), g.vec(), g.vec(), g.vec()
	g.VBROADCASTSD(g.paramAt("by"), by)
	g.VBROADCASTSD(g.paramAt("from"), from)
	g.VBROADCASTSD(g.paramAt("step"), step)

	// Numbers of the next vector's elements, in two halves: each four are those of the four before, and step.
	var numbers [4]reg.VecVirtual
	for i := range numbers {
		numbers[i] = g.XMM()
		g.VXORPS(numbers[i], numbers[i], numbers[i])
		g.VCVTSI2SDQ(Mem{Base: first, Disp: 8 * i}, numbers[i], numbers[i])
	}
	index := g.vecs(2)
	for i := range 2 {
		g.VUNPCKLPD(numbers[2*i+1], numbers[2*i], numbers[2*i])
	}
	four := index[0].AsY()
	g.VXORPS(four, four, four)
	g.VINSERTF128(Imm(0), numbers[0], four, four)
	g.VINSERTF128(Imm(1), numbers[2], four, four)
	g.VADDPD(step, step, on) // 2 step
	if set == avx512 {
		more := g.YMM()
		g.VADDPD(step.AsY(), four, more)
		g.VINSERTF64X4(Imm(1), more, index[0], index[0])
		g.VADDPD(on, index[0], index[1])
		g.VADDPD(on, on, on)
	} else {
		g.VADDPD(step, index[0], index[1])
	}
	add := func(x reg.VecVirtual) {
		scores := g.float64Halves(x)
		for i, s := range scores {
			p := g.vec()
			g.VADDPD(index[i], from, p)
			g.VMULPD(by, p, p)
			g.VADDPD(p, s, s)
		}
		g.narrow(scores, x)
	}
	var last reg.VecVirtual
	if set == avx2 {
		last = g.vec()
		g.VXORPS(last, last, last)
		g.VBLENDPD(Imm(8), step, last, last)
	}
	g.each(n, func(k reg.GPVirtual) {
		x := g.vec()
		g.VMOVUPS(at(dst, k), x)
		add(x)
		g.VMOVUPS(x, at(dst, k))
		for _, i := range index {
			g.VADDPD(on, i, i)
		}
	}, func(k reg.GPVirtual, m reg.OpmaskVirtual) {
		x := g.vec()
		g.VMOVUPS_Z(at(dst, k), m, x)
		add(x)
		g.VMOVUPS(x, m, at(dst, k))
	}, func(k reg.GPVirtual) {
		x := g.vec()
		g.VMOVSS(at(dst, k), x.AsX())
		add(x)
		g.VMOVSS(x.AsX(), at(dst, k))
		g.VPERMPD(Imm(0b00_11_10_01), index[0], index[0]) // the lowest goes to the top, as the next one of its stream
		g.VADDPD(last, index[0], index[0])
	})
}

// pairs runs body for twice as many float64 as a vector has at a time, and one for each of the elements that are left.
func (g *gen) pairs(n reg.GPVirtual, body, one func(k reg.GPVirtual)) { g.pairsOf("", n, body, one) }

// pairsOf is pairs in a function that has several such loops, each of a name of its own.
func (g *gen) pairsOf(name string, n reg.GPVirtual, body, one func(k reg.GPVirtual)) {
	k, end := g.GP64(), g.GP64()
	g.XORQ(k, k)
	g.MOVQ(n, end)
	g.ANDQ(I32(-int32(g.isa.lanes)), end)
	g.JZ(LabelRef(name + "rest"))
	g.Label(name + "loop")
	body(k)
	g.ADDQ(Imm(uint64(g.isa.lanes)), k)
	g.CMPQ(k, end)
	g.JLT(LabelRef(name + "loop"))
	g.Label(name + "rest")
	g.CMPQ(k, n)
	g.JGE(LabelRef(name + "done"))
	g.Label(name + "one")
	one(k)
	g.INCQ(k)
	g.CMPQ(k, n)
	g.JLT(LabelRef(name + "one"))
	g.Label(name + "done")
}

// total returns the sum of the lanes of two vectors of float64, and of rest.
func (g *gen) total(sums []reg.VecVirtual, rest reg.VecVirtual) reg.VecVirtual {
	g.VADDPD(sums[1], sums[0], sums[0])
	sum := sums[0].AsY().(reg.VecVirtual)
	if g.isa == avx512 {
		upper := g.YMM()
		g.VEXTRACTF64X4(Imm(1), sums[0], upper)
		g.VADDPD(upper, sum, sum)
	}
	upper, low := g.XMM(), sum.AsX()
	g.VEXTRACTF128(Imm(1), sum, upper)
	g.VADDPD(upper, low, upper)
	second := g.XMM()
	g.VPERMILPD(Imm(1), upper, second)
	g.VADDSD(second, upper, upper)
	g.VADDSD(rest, upper, upper)
	return upper
}

// products makes the sums of products in float64, of float32 and of float64.
func products(g *gen, set isa) {
	for _, size := range []int{4, 8} {
		name := map[int]string{4: "dot", 8: "dot64"}[size]
		g.kernel(name, set, "vector.go", name+"Go", "")
		x, y, n := g.arg("x"), g.arg("y"), g.arg("n")
		element := func(base, k reg.GPVirtual, i int) Mem {
			return Mem{Base: base, Index: k, Scale: uint8(size), Disp: size * set.lanes / 2 * i}
		}
		sums := g.vecs(2)
		g.zero(sums...)
		rest := g.XMM()
		g.VXORPS(rest, rest, rest)
		g.pairs(n, func(k reg.GPVirtual) {
			for i, sum := range sums {
				a := g.vec()
				if size == 8 {
					g.VMOVUPD(element(x, k, i), a)
					g.VFMADD231PD(element(y, k, i), a, sum)
					continue
				}
				b := g.vec()
				g.VCVTPS2PD(element(x, k, i), a)
				g.VCVTPS2PD(element(y, k, i), b)
				g.VFMADD231PD(b, a, sum)
			}
		}, func(k reg.GPVirtual) {
			a, b := g.XMM(), g.XMM()
			if size == 8 {
				g.VMOVSD(element(x, k, 0), a)
				g.VFMADD231SD(element(y, k, 0), a, rest)
				return
			}
			g.VXORPS(a, a, a)
			g.VXORPS(b, b, b)
			g.VCVTSS2SD(element(x, k, 0), a, a)
			g.VCVTSS2SD(element(y, k, 0), b, b)
			g.VFMADD231SD(b, a, rest)
		})
		g.VMOVSD(g.total(sums, rest), g.result(0))
		g.ret()
	}
}

// doubles makes scale and divide for float64.
func doubles(g *gen, set isa) {
	for _, name := range []string{"scale64", "divide64"} {
		g.kernel(name, set, "vector.go", name+"Go", "")
		dst, src, n := g.arg("dst"), g.arg("src"), g.arg("n")
		by := g.vec()
		g.VBROADCASTSD(g.paramAt("by"), by)
		element := func(base, k reg.GPVirtual, i int) Mem {
			return Mem{Base: base, Index: k, Scale: 8, Disp: 4 * set.lanes * i}
		}
		g.pairs(n, func(k reg.GPVirtual) {
			for i := range 2 {
				v := g.vec()
				if name == "scale64" {
					g.VMULPD(element(src, k, i), by, v)
				} else {
					g.VMOVUPD(element(src, k, i), v)
					g.VDIVPD(by, v, v)
				}
				g.VMOVUPD(v, element(dst, k, i))
			}
		}, func(k reg.GPVirtual) {
			x := g.XMM()
			g.VMOVSD(element(src, k, 0), x)
			if name == "scale64" {
				g.VMULSD(by.AsX(), x, x)
			} else {
				g.VDIVSD(by.AsX(), x, x)
			}
			g.VMOVSD(x, element(dst, k, 0))
		})
		g.ret()
	}
}
