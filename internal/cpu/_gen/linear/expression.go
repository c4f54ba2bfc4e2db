package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"

	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// expressions makes the operations of expressions, for tiers from AVX2 on: vectors of eight lanes suffice, since the
// operations wait for loads and stores.
func expressions(g *gen) {
	g.kernel("step", avx2, "step.go", "stepGo", "")
	code, dst, a, b, c, n := g.arg("code"), g.arg("dst"), g.arg("a"), g.arg("b"), g.arg("c"), g.arg("n")
	one, sign, inf, zero := g.YMM(), g.YMM(), g.YMM(), g.YMM()
	for _, x := range []struct {
		bits uint32
		to   reg.VecVirtual
	}{{1, one}, {1 << 31, sign}, {0xff800000, inf}} {
		bits := g.GP32()
		g.MOVL(U32(x.bits), bits)
		g.VMOVD(bits, x.to.AsX())
		g.VPBROADCASTD(x.to.AsX(), x.to)
	}
	g.VPXOR(zero, zero, zero)
	x, y, z := g.YMM(), g.YMM(), g.YMM()
	two := func(op func(...Op)) func(k reg.GPVirtual) { // dst = a op b
		return func(k reg.GPVirtual) {
			g.VMOVUPS(at(a, k), x)
			op(at(b, k), x, x)
		}
	}
	floats := func(predicate int) func(k reg.GPVirtual) {
		return func(k reg.GPVirtual) {
			g.VMOVUPS(at(a, k), x)
			g.VCMPPS(Imm(uint64(predicate)), at(b, k), x, x)
			g.VPAND(one, x, x)
		}
	}
	one1 := func(f func()) func(k reg.GPVirtual) {
		return func(k reg.GPVirtual) {
			g.VMOVUPS(at(a, k), x)
			f()
		}
	}
	steps := map[string]func(k reg.GPVirtual){
		"addF": two(g.VADDPS), "subtractF": two(g.VSUBPS), "multiplyF": two(g.VMULPS), "divideF": two(g.VDIVPS),
		"lessF": floats(0x11), "lessEqualF": floats(0x12), "equalF": floats(0),
		"addI": two(g.VPADDD), "subtractI": two(g.VPSUBD), "multiplyI": two(g.VPMULLD), "minI": two(g.VPMINSD), "maxI": two(g.VPMAXSD),
		"lessI": func(k reg.GPVirtual) {
			g.VMOVDQU(at(b, k), x)
			g.VPCMPGTD(at(a, k), x, x)
			g.VPAND(one, x, x)
		},
		"lessEqualI": func(k reg.GPVirtual) {
			g.VMOVDQU(at(a, k), x)
			g.VPCMPGTD(at(b, k), x, x)
			g.VPANDN(one, x, x)
		},
		"equalI": func(k reg.GPVirtual) {
			g.VMOVDQU(at(a, k), x)
			g.VPCMPEQD(at(b, k), x, x)
			g.VPAND(one, x, x)
		},
		"and": two(func(o ...Op) { g.VPAND(o[0], o[1], o[2]) }), "or": two(func(o ...Op) { g.VPOR(o[0], o[1], o[2]) }),
		"not":     one1(func() { g.VPSUBD(x, one, x) }),
		"negateF": one1(func() { g.VXORPS(sign, x, x) }),
		"absF":    one1(func() { g.VANDNPS(x, sign, x) }),
		"negateI": one1(func() { g.VPSUBD(x, zero, x) }),
		"absI":    one1(func() { g.VPABSD(x, x) }),
		"toFloat": one1(func() { g.VCVTDQ2PS(x, x) }),
		"shift": func(k reg.GPVirtual) {
			g.VMOVDQU(at(a, k), x)
			g.VPSRAVD(at(b, k), x, x)
		},
		"choose": func(k reg.GPVirtual) {
			g.VPCMPEQD(at(c, k), zero, y)
			g.VMOVUPS(at(a, k), x)
			g.VBLENDVPS(y, at(b, k), x, x)
		},
		"spread": func(k reg.GPVirtual) {
			g.VPBROADCASTD(Mem{Base: a}, x)
		},
		"gather": func(k reg.GPVirtual) { // of elements of a by the indices b
			g.VMOVDQU(at(b, k), z)
			g.VPCMPEQD(y, y, y)
			g.VPXOR(x, x, x)
			g.VPGATHERDD(y, Mem{Base: a, Index: z, Scale: 4}, x)
		},
		"hide": func(k reg.GPVirtual) {
			g.VPCMPEQD(at(b, k), zero, y)
			g.VMOVUPS(at(a, k), x)
			g.VBLENDVPS(y, inf, x, x)
		},
	}
	codes, err := constantNames(filepath.Join(g.dir, "step.go"), "stepCode")
	if err != nil {
		g.fail(err)
	}
	if len(codes) != len(steps)+1 { // the first is none
		g.fail(fmt.Errorf("%d codes and %d steps", len(codes), len(steps)))
	}
	for i, name := range codes[1:] {
		g.CMPQ(code, U32(i+1))
		g.JE(LabelRef(name))
	}
	g.JMP(LabelRef("end"))
	k := g.GP64()
	for _, name := range codes[1:] {
		step := steps[name]
		if step == nil {
			g.fail(fmt.Errorf("no step %s", name))
		}
		g.Label(name)
		g.XORQ(k, k)
		g.Label(name + "Next")
		step(k)
		g.VMOVUPS(x, at(dst, k))
		g.ADDQ(Imm(8), k)
		g.CMPQ(k, n)
		g.JL(LabelRef(name + "Next"))
		g.JMP(LabelRef("end"))
	}
	g.Label("end")
	g.ret()
}

// constantNames returns the names of the constants in the block of a file whose first has the given type.
func constantNames(file, of string) (names []string, err error) {
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		return nil, err
	}
	for _, d := range f.Decls {
		block, ok := d.(*ast.GenDecl)
		if !ok || block.Tok != token.CONST {
			continue
		}
		first := block.Specs[0].(*ast.ValueSpec)
		if id, ok := first.Type.(*ast.Ident); !ok || id.Name != of {
			continue
		}
		for _, s := range block.Specs {
			for _, name := range s.(*ast.ValueSpec).Names {
				names = append(names, name.Name)
			}
		}
	}
	return names, nil
}
