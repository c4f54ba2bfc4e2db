package main

import (
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// norm makes the passes of layer norm and of RMS norm over a row, in float64, of float32 and of float64.
func norm(g *gen) {
	for _, set := range []isa{avx2, avx512} {
		for _, r := range []row{{4, ""}, {8, "64"}} {
			sum(g, set, r)
			deviations(g, set, r)
			normalise(g, set, r)
		}
	}
}

// row is one whose elements have so many bytes. The names of its functions end so.
type row struct {
	size   int
	suffix string
}

// at returns where element k of a row lies, or what lies i vectors of float64 behind it.
func (r row) at(g *gen, base, k reg.GPVirtual, i int) Mem {
	return Mem{Base: base, Index: k, Scale: uint8(r.size), Disp: r.size * g.isa.lanes / 2 * i}
}

// load returns a vector of float64.
func (r row) load(g *gen, from Mem) reg.VecVirtual {
	v := g.vec()
	if r.size == 8 {
		g.VMOVUPD(from, v)
	} else {
		g.VCVTPS2PD(from, v)
	}
	return v
}

// one returns an element.
func (r row) one(g *gen, from Mem) reg.VecVirtual {
	x := g.XMM()
	if r.size == 8 {
		g.VMOVSD(from, x)
	} else {
		g.VXORPS(x, x, x)
		g.VCVTSS2SD(from, x, x)
	}
	return x
}

func (g *gen) kernelOf(base string, set isa, r row) {
	g.kernel(base+r.suffix, set, "norm.go", base+r.suffix+"Go", "")
}

func sum(g *gen, set isa, r row) {
	g.kernelOf("sum", set, r)
	x, n := g.arg("x"), g.arg("n")
	sums, rest := g.vecs(2), g.XMM()
	g.zero(append(sums, rest)...)
	g.pairs(n, func(k reg.GPVirtual) {
		for i, sum := range sums {
			g.VADDPD(r.load(g, r.at(g, x, k, i)), sum, sum)
		}
	}, func(k reg.GPVirtual) {
		g.VADDSD(r.one(g, r.at(g, x, k, 0)), rest, rest)
	})
	g.VMOVSD(g.total(sums, rest), g.result(0))
	g.ret()
}

func deviations(g *gen, set isa, r row) {
	g.kernelOf("deviations", set, r)
	x, n, mean := g.arg("x"), g.arg("n"), g.vec()
	g.VBROADCASTSD(g.paramAt("mean"), mean)
	sums, squares, rest := g.vecs(2), g.vecs(2), []reg.VecVirtual{g.XMM(), g.XMM()}
	g.zero(append(append(sums, squares...), rest...)...)
	g.pairs(n, func(k reg.GPVirtual) {
		for i := range sums {
			d := r.load(g, r.at(g, x, k, i))
			g.VSUBPD(mean, d, d)
			g.VADDPD(d, sums[i], sums[i])
			g.VFMADD231PD(d, d, squares[i])
		}
	}, func(k reg.GPVirtual) {
		d := r.one(g, r.at(g, x, k, 0))
		g.VSUBSD(mean.AsX(), d, d)
		g.VADDSD(d, rest[0], rest[0])
		g.VFMADD231SD(d, d, rest[1])
	})
	g.VMOVSD(g.total(sums, rest[0]), g.result(0))
	g.VMOVSD(g.total(squares, rest[1]), g.result(1))
	g.ret()
}

// normalise has a loop for each of what may be there and may be not. Its products are rounded before they are added, as
// Go's are.
func normalise(g *gen, set isa, r row) {
	g.kernelOf("normalise", set, r)
	dst, src, gamma, beta, n := g.arg("dst"), g.arg("src"), g.arg("gamma"), g.arg("beta"), g.arg("n")
	mean, by := g.vec(), g.vec()
	g.VBROADCASTSD(g.paramAt("mean"), mean)
	g.VBROADCASTSD(g.paramAt("by"), by)
	loop := func(name string, withGamma, withBeta bool) {
		g.pairsOf(name, n, func(k reg.GPVirtual) {
			for i := range 2 {
				v := r.load(g, r.at(g, src, k, i))
				g.VSUBPD(mean, v, v)
				g.VMULPD(by, v, v)
				if withGamma {
					g.VMULPD(r.load(g, r.at(g, gamma, k, i)), v, v)
				}
				if withBeta {
					g.VADDPD(r.load(g, r.at(g, beta, k, i)), v, v)
				}
				switch to := r.at(g, dst, k, i); {
				case r.size == 8:
					g.VMOVUPD(v, to)
				case set == avx512:
					g.VCVTPD2PS(v, v.AsY())
					g.VMOVUPS(v.AsY(), to)
				default:
					g.VCVTPD2PSY(v, v.AsX())
					g.VMOVUPS(v.AsX(), to)
				}
			}
		}, func(k reg.GPVirtual) {
			x := r.one(g, r.at(g, src, k, 0))
			g.VSUBSD(mean.AsX(), x, x)
			g.VMULSD(by.AsX(), x, x)
			if withGamma {
				g.VMULSD(r.one(g, r.at(g, gamma, k, 0)), x, x)
			}
			if withBeta {
				g.VADDSD(r.one(g, r.at(g, beta, k, 0)), x, x)
			}
			if r.size == 8 {
				g.VMOVSD(x, r.at(g, dst, k, 0))
			} else {
				g.VCVTSD2SS(x, x, x)
				g.VMOVSS(x, r.at(g, dst, k, 0))
			}
		})
		g.ret()
	}
	g.TESTQ(gamma, gamma)
	g.JZ(LabelRef("noGamma"))
	g.TESTQ(beta, beta)
	g.JZ(LabelRef("noBeta"))
	loop("both", true, true)
	g.Label("noBeta")
	loop("gamma", true, false)
	g.Label("noGamma")
	g.TESTQ(beta, beta)
	g.JZ(LabelRef("neither"))
	loop("beta", false, true)
	g.Label("neither")
	loop("plain", false, false)
}
