package ptx

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// Errors name the line.
func TestParseErrors(t *testing.T) {
	entry := func(body string) string { return ".version 8.4\n.visible .entry k()\n{\n" + body + "\n}\n" }
	for _, c := range []struct {
		text, says string
		line       int
	}{
		{"hello", `"hello"`, 1}, {"\n\n.entry k() {", "ends too early", 3}, {".entry", "ends too early", 1}, {".visible .entry k(.reg .b32 x) { }", `".reg", want ".param"`, 1}, {".version", "ends too early", 1},
		{".global .align 4 .u32 x", "ends too early", 1}, {".shared .b32 x", "ends too early", 1}, {"\n.shared .b99 x;", `type ".b99"`, 2}, {".shared .align 3 .b8 x[4];", "alignment of 3", 1}, {".shared .align 0 .b8 x[4];", "alignment of 0", 1}, {".shared .align -4 .b8 x[4];", "-4 of them", 1},
		{".shared .b8 x[-1];", "-1 of them", 1}, {".shared .b8 x[99999999999];", "99999999999 of them", 1}, {".shared .b8 x[4;", `want "]"`, 1}, {".shared .b8 x[y];", "invalid syntax", 1}, {".shared .b8 x[99999999999999999999];", "out of range", 1},
		{entry("add.s32 %r0, %r1, %r2"), "ends too early", 5}, {entry("\nadd..s32 %r0, %r1, %r2;"), `"add..s32"`, 5}, {entry(".reg .b32 %r<2000000000>;"), "2000000000 of them", 4}, {entry(".reg .b32 %r<-1>;"), "-1 of them", 4}, {entry(".reg .b32 %r<x>;"), "invalid syntax", 4},
		{entry(".loc 1 2 3\nadd.s32 %r0, %r1, %r2;"), `".loc"`, 4}, {entry("mov.u32 %r0, [%r1;"), `want "]"`, 4}, {entry("mov.u32 {%r0, %r1;"), "ends too early", 5}, {entry(strings.Repeat("{", 200)), "scopes within scopes", 4},
		{entry("mov.u32 %r0, " + strings.Repeat("{", 1000)), "lists within lists", 4}, {entry("@;"), "ends too early", 5}, {entry("[%r0] x;"), "", 4},
		// What compiling finds.
		{entry(".reg .b99 %r0;"), "registers of this kind", 4}, {entry("\n\nmov.u32 %r0, 1;"), "%r0 is not declared", 6}, {entry(".reg .b32 %r<200000>;\n.reg .b32 %q<200000>;"), "more than 262144 registers", 5}, {entry("x:\nx:"), "a second x", 5},
		{entry(".reg .b32 x;\nx:"), "a second x", 5}, {entry("{ x: }\nbra x;"), "no such label", 5}, {entry(".local .b32 x;"), "memory of this space", 4}, {entry("@p ret;"), "p is not declared", 4},
	} {
		m, err := Parse(c.text)
		if err == nil {
			_, err = m.Kernel("k")
		}
		fails(t, c.text, err, c.says, fmt.Sprintf("line %d: ", c.line))
	}
	for _, text := range []string{entry(".param .b8 p[1048576];\n.param .b8 q[1];"), ".shared .b8 x[1048576]; " + strings.Repeat(".shared .b64 x[1048576];", 3) + entry(""), ".entry k(.param .b64 p[1048576]) { }"} {
		m, err := Parse(text)
		if err == nil {
			_, err = m.Kernel("k")
		}
		fails(t, text, err, "bytes")
	}
	m, err := Parse(entry(""))
	if err != nil {
		t.Fatal(err)
	}
	_, err = m.Kernel("x")
	fails(t, "x", err, "no entry x")
	if m, err = Parse(".func f() { ret; }"); err != nil {
		t.Fatal(err)
	}
	_, err = m.Kernel("f")
	fails(t, "a function", err, "no entry f")
}

// Texts as they come: with comments, texts in quotation marks, zeros behind the end, and
// what does not matter here.
func TestParse(t *testing.T) {
	m, err := Parse("// hello\n" + header + `
.global .align 4 .u32 ROWS = 16;
.const .align 4 .f32 table[2] = {0f3f800000, 0f40000000};
.weak .func empty();
.func empty() { }
.visible .entry k(
	.param .align 8 .b8 k_param_0[24], // three
	.param .u8 k_param_1
)
.maxntid 256, 1, 1
.minnctapersm 1
{
	.reg .pred 	%p<2>;
	.reg .b32 	%r<3>, %q, %s<2>;
	.pragma "nounroll";
$L__BB0_1: mov.u32 %r2,1;mov.u32 %q , %r2; // ;
	mov.u32 %s1, %q;
	setp.ne.s32 %p1, %s1, 1;
	@%p1 bra $L__BB0_1;
	@!%p1 bra.uni $L__BB0_2;
	trap;
$L__BB0_2:
	{ // callseq 1, 0
	call.uni
	empty,
	(
	);
	}
	exit;
}` + "\x00\x00")
	if err != nil {
		t.Fatal(err)
	}
	k, err := m.Kernel("k")
	if err != nil {
		t.Fatal(err)
	}
	if k.ParamBytes() != 25 {
		t.Errorf("%d bytes of parameters", k.ParamBytes())
	}
	if err := k.Run(Launch{Grid: 1, Block: 32, Params: make([]byte, 25)}, nil); err != nil {
		t.Error(err)
	}
}

// What the end of a function and labels there are.
func TestEnds(t *testing.T) {
	for _, body := range []string{"", "bra END;\ntrap;\nEND:", "setp.eq.u32 %p0, %t, 1;\n@%p0 ret;", "setp.eq.u32 %p0, %t, 1;\n@%p0 bra END;\nret;\nEND:", "{ .param .b32 p; }\n{ call f; }"} {
		text := strings.Replace(program(0, body), "\nret;\n}", "\n}\n.func g() { trap; }\n.func f() { }\n", 1)
		if err := compile(t, text).Run(Launch{Grid: 1, Block: 32, Most: 1000}, nil); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
}

// FuzzParse: any text gives a module, whose entries compile, or an error.
func FuzzParse(f *testing.F) {
	f.Add(header)
	f.Add(program(2, sums))
	f.Add(strings.Replace(program(1, "{ .param .b32 p; .param .b32 q; st.param.b32 [p], %t; st.param.b32 [q], 1; call (q), far, (p, q); }"), ".visible .entry", twice, 1))
	f.Add(program(3, copied(64, tensorCopy)))
	f.Add(grouped(8, "f16", "wgmma.wait_group.sync.aligned 0;\n"))
	f.Add(program(1, "shfl.sync.idx.b32 %r0|%p0, %r1, 0, 31, -1;\nvote.sync.ballot.b32 %r0, !%p0, -1;\ncvt.rn.f16x2.f32 %r0, %f0, %f1;\nmov.b64 {%r0, %r1}, %rd0;\nbar.sync 1, 64;"))
	f.Add(".entry k(.param .b8 p[4]) { .reg .b32 %r<20>; .shared .align 8 .b64 s[2]; ld.param.v2.u8 {%r1, _}, [p+-2]; }")
	f.Fuzz(func(t *testing.T, text string) {
		m, err := Parse(text)
		if err != nil {
			return
		}
		for name, g := range m.functions {
			if g.entry {
				if k, err := m.Kernel(name); (k == nil) == (err == nil) {
					t.Errorf("%v, %v", k, err)
				}
			}
		}
	})
}

// Programs with words that are missing, or are others, end with an error or without,
// but they end.
func TestMangled(t *testing.T) {
	rng := reftest.Rand(t)
	call := strings.Replace(program(3, "{ .param .b32 p; .param .b32 q; st.param.b32 [p], %t; st.param.b32 [q], 1; call (q), far, (p, q); }"), ".visible .entry", twice, 1)
	exchange := program(3, "shfl.sync.idx.b32 %r0|%p0, %r1, 0, 31, -1;\nvote.sync.ballot.b32 %r0, !%p0, -1;\nredux.sync.max.u32 %r1, %t, -1;\ncvt.rn.f16x2.f32 %r0, %f0, %f1;\nmov.b64 {%r0, %r1}, %rd0;\nmov.b64 %rd0, {%r0, %r1};\nbfi.b32 %r0, %r1, %r2, %r3, %r4;\nbar.warp.sync -1;\n"+
		"selp.b32 %r0, %r1, %r2, %p1;\nsetp.lt.f32 %p0, %f0, %f1;\ncvt.rzi.s32.f32 %r1, %f1;\ncvta.shared.u64 %rd0, %rd1;\nbar.sync 1, 64;\nbar.arrive 2, 128;\nld.shared.v4.u8 {%r0, %r1, _, %r3}, [memory+4];\natom.global.inc.u32 %r0, [%g1], 7;\ncp.async.ca.shared.global [memory], [%g1], 8, 3;\ncp.async.wait_all;\n"+
		"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1, %r2, %r3}, [memory];\nmma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f8, %f9, %f10, %f11}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f8, %f9, %f10, %f11};")
	texts := []string{call, exchange, strings.Replace(program(3, sums), "shared .align 1024", "shared .align 16", 1), program(3, copied(64, "mov.u32 %r0, 0;\nmov.u32 %r1, 0;\nmov.u32 %r2, 0;\n"+tensorCopy)),
		program(3, copied(64, "mapa.shared::cluster.u32 %r2, %r10, 0;\nst.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%r2], {%f0, %f1}, [%r11];")), grouped(8, "f16", "wgmma.wait_group.sync.aligned 0;\n")}
	var tokens [][]token
	for _, s := range texts {
		tokens = append(tokens, scan(s))
	}
	x := memory[uint64](1 << 12)
	m := tensorMap(rangeOf(x), 1, [3]uint64{64, 8, 4}, [2]uint64{128, 1024}, [3]uint64{32, 1, 1}, 0)
	compiled := 0
	for range 1500 {
		which := rng.IntN(len(tokens))
		words := make([]string, len(tokens[which]))
		for i, w := range tokens[which] {
			words[i] = w.text
		}
		for range 1 + rng.IntN(2) {
			i := rng.IntN(len(words))
			other := tokens[rng.IntN(len(tokens))]
			switch rng.IntN(5) {
			case 0:
				words[i] = ""
			case 1:
				words[i] = other[rng.IntN(len(other))].text
			case 2:
				words[i] += " " + other[rng.IntN(len(other))].text
			case 3:
				words[i] = []string{"0", "-1", "4294967295", "0x7fffffffffffffff", "_", "%p0", "%rd0", "%r0", "1.5", "{ }", "{ %r0 }", "memory"}[rng.IntN(12)]
			default: // a part of a name
				parts := strings.Split(words[i], ".")
				at := rng.IntN(len(parts))
				words[i] = strings.Join(append(parts[:at:at], parts[at+1:]...), ".")
			}
		}
		m2, err := Parse(strings.Join(words, " "))
		if err != nil {
			continue
		}
		k, err := m2.Kernel("k")
		if err != nil {
			continue
		}
		compiled++
		l := Launch{Grid: 2, Cluster: 1 + rng.IntN(2), Block: 128, Shared: 2048, Seed: rng.Uint64(), Most: 3000, Params: make([]byte, k.ParamBytes())}
		for i, b := range []Range{rangeOf(x), rangeOf(m), rangeOf(x)} {
			if len(l.Params) >= 8*i+8 {
				binary.LittleEndian.PutUint64(l.Params[8*i:], b.Address)
			}
		}
		all := []Range{rangeOf(x), rangeOf(m)}
		slices.SortFunc(all, func(a, b Range) int { return cmp.Compare(a.Address, b.Address) })
		_ = k.Run(l, all)
	}
	if compiled < 100 {
		t.Errorf("only %d have compiled", compiled)
	}
}
