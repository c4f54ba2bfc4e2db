package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"path/filepath"
	"strings"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/gotypes"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/pass"
	"github.com/mmcloughlin/avo/printer"
	"github.com/mmcloughlin/avo/reg"
	"gorgonia.org/leanattention/internal/cpu/_gen/amx"
)

// gen is the file of one family while it is being made.
type gen struct {
	*build.Context
	dir string
	isa isa // of the function at hand
	fn  string
}

// isa is an instruction set that kernels are made for, which the name of a kernel ends in.
type isa struct {
	name  string
	lanes int // float32 values of a vector
}

var (
	avx2   = isa{"AVX2", 8} // with FMA and F16C
	avx512 = isa{"AVX512", 16}
)

// failure is what fail panics with.
type failure struct{ error }

// generate returns the files of a family by path from root, which is where package cpu lies.
func generate(root string, of family) (files map[string][]byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			f, ok := r.(failure)
			if !ok {
				panic(r)
			}
			err = f.error
		}
	}()
	g := &gen{Context: build.NewContext(), dir: filepath.Join(root, of.dir)}
	g.ConstraintExpr("amd64")
	g.ConstraintExpr("gc")
	g.ConstraintExpr("!noasm")
	of.make(g)
	f, err := g.Result()
	if err != nil {
		return nil, err
	}
	if err := pass.Compile.Execute(f); err != nil {
		return nil, err
	}
	cfg := printer.Config{Name: "go -C internal/cpu/_gen run ./linear", Pkg: of.pkg()}
	asm, errAsm := printer.NewGoAsm(cfg).Print(f)
	stubs, errStubs := printer.NewStubs(cfg).Print(f)
	if err := errors.Join(errAsm, errStubs); err != nil {
		return nil, err
	}
	path := filepath.Join(of.dir, of.name)
	return map[string][]byte{path + "_amd64.s": []byte(amx.Encode(string(asm))), path + "_amd64.go": stubs}, nil
}

// pkg returns the name of the family's package.
func (f family) pkg() string {
	if f.dir == "" {
		return "cpu"
	}
	return f.dir
}

// kernel begins the function base+isa. Its signature is that of the function source in the package's file
// file, and so is its contract; types names the file that declares the structs of the signature, if
// there are any, and needs nothing but package unsafe.
func (g *gen) kernel(base string, set isa, file, source, types string) {
	g.isa, g.fn = set, base+set.name
	g.Function(g.fn)
	g.Attributes(attr.NOSPLIT)
	g.Pragma("noescape")
	decl, err := g.declaration(file, source)
	if err != nil {
		g.fail(err)
	}
	sig, err := g.signature(decl, types)
	if err != nil {
		g.fail(err)
	}
	g.Signature(sig)
	g.Doc(strings.Split(strings.TrimSpace(strings.Replace(decl.Doc.Text(), source, g.fn, 1)), "\n")...)
}

// fail ends the generation: what follows an error of this kind would make no sense.
func (g *gen) fail(err error) { panic(failure{fmt.Errorf("%s: %w", g.fn, err)}) }

// declaration returns the declaration of a function of the package.
func (g *gen) declaration(file, name string) (*ast.FuncDecl, error) {
	f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(g.dir, file), nil, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	for _, d := range f.Decls {
		if fn, ok := d.(*ast.FuncDecl); ok && fn.Recv == nil && fn.Name.Name == name && fn.Doc != nil {
			return fn, nil
		}
	}
	return nil, fmt.Errorf("%s declares no function %s with a contract", file, name)
}

// signature returns the signature of decl, with the types of the named file.
func (g *gen) signature(decl *ast.FuncDecl, file string) (*gotypes.Signature, error) {
	fset := token.NewFileSet()
	var files []*ast.File
	if file != "" {
		f, err := parser.ParseFile(fset, filepath.Join(g.dir, file), nil, 0)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	cfg := types.Config{Sizes: types.SizesFor("gc", "amd64"), Importer: onlyUnsafe{}}
	pkg, err := cfg.Check("cpu", fset, files, nil)
	if err != nil {
		return nil, err
	}
	return gotypes.ParseSignatureInPackage(pkg, types.ExprString(decl.Type))
}

type onlyUnsafe struct{}

func (onlyUnsafe) Import(path string) (*types.Package, error) {
	if path != "unsafe" {
		return nil, fmt.Errorf("a file of argument types imports %s", path)
	}
	return types.Unsafe, nil
}

// arg returns a parameter in a register.
func (g *gen) arg(name string) reg.GPVirtual { return g.Load(g.Param(name), g.GP64()).(reg.GPVirtual) }

// field returns a field of 8 bytes in a register, where of is a struct that was made by Dereference.
func (g *gen) field(of gotypes.Component, name string) reg.GPVirtual {
	r := g.GP64()
	g.MOVQ(g.fieldAt(of, name), r)
	return r
}

// fieldAt returns where a field lies.
func (g *gen) fieldAt(of gotypes.Component, name string) Mem {
	f, err := of.Field(name).Resolve()
	if err != nil {
		g.fail(err)
	}
	return f.Addr
}

// vec returns a vector register of the instruction set's width.
func (g *gen) vec() reg.VecVirtual {
	if g.isa.lanes == 16 {
		return g.ZMM()
	}
	return g.YMM()
}

func (g *gen) vecs(n int) []reg.VecVirtual {
	v := make([]reg.VecVirtual, n)
	for i := range v {
		v[i] = g.vec()
	}
	return v
}

// zero clears vector registers.
func (g *gen) zero(vs ...reg.VecVirtual) {
	for _, v := range vs {
		if v.Size() == 64 {
			g.VPXORD(v, v, v)
		} else {
			g.VXORPS(v, v, v)
		}
	}
}

// ret ends the function: code compiled by Go uses instructions that would wait for the upper halves.
func (g *gen) ret() {
	g.VZEROUPPER()
	g.RET()
}

// dtype is how numbers are stored.
type dtype struct {
	name string
	size int // bytes
}

var (
	f32  = dtype{"F32", 4}
	f16  = dtype{"F16", 2}
	bf16 = dtype{"BF16", 2}
)

// widen loads a vector of numbers of type t as float32.
func (g *gen) widen(t dtype, from Mem, to reg.VecVirtual) {
	switch t {
	case f32:
		g.VMOVUPS(from, to)
	case f16:
		g.VCVTPH2PS(from, to)
	case bf16:
		g.VPMOVZXWD(from, to)
		g.VPSLLD(Imm(16), to, to)
	}
}

// widenMasked is widen for the lanes in mask (AVX-512): the others become 0, and their memory is not
// touched.
func (g *gen) widenMasked(t dtype, from Mem, mask reg.OpmaskVirtual, to reg.VecVirtual) {
	switch t {
	case f32:
		g.VMOVUPS_Z(from, mask, to)
	case f16:
		g.VCVTPH2PS_Z(from, mask, to)
	case bf16:
		g.VPMOVZXWD_Z(from, mask, to)
		g.VPSLLD(Imm(16), to, to)
	}
}

// widenOne loads one number of type t as float32 into the lowest lane; the others become 0.
func (g *gen) widenOne(t dtype, from Mem, to reg.VecVirtual) {
	x := to.AsX()
	if t == f32 {
		g.VMOVSS(from, x)
		return
	}
	bits := g.GP32()
	g.MOVWLZX(from, bits)
	if t == bf16 {
		g.SHLL(Imm(16), bits)
	}
	g.VMOVD(bits, x)
	if t == f16 {
		g.VCVTPH2PS(x, x)
	}
}

// mask returns the mask of the lowest n lanes, 0 <= n < 16.
func (g *gen) mask(n reg.GPVirtual) reg.OpmaskVirtual {
	bits, k := g.GP32(), g.K()
	g.MOVL(U32(0xffffffff), bits)
	g.BZHIL(n.As32(), bits, bits)
	g.KMOVW(bits, k)
	return k
}
