package ptx

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// matrix is of small integers, which all types have, and whose sums are exact.
type matrix struct {
	rows, columns int
	x             []float32
}

func randomMatrix(rng *rand.Rand, rows, columns int) matrix {
	m := matrix{rows, columns, make([]float32, rows*columns)}
	for i := range m.x {
		m.x[i] = float32(rng.IntN(33) - 16)
	}
	return m
}

func (m *matrix) at(row, column int) *float32 { return &m.x[row*m.columns+column] }

// times is m by the transpose of b, plus c.
func (m *matrix) times(b, c matrix) matrix {
	d := matrix{m.rows, b.rows, make([]float32, m.rows*b.rows)}
	for i := range m.rows {
		for j := range b.rows {
			sum := *c.at(i, j)
			for k := range m.columns {
				sum += *m.at(i, k) * *b.at(j, k)
			}
			*d.at(i, j) = sum
		}
	}
	return d
}

func narrow(x float32, kind string) uint32 {
	switch kind {
	case "f16":
		return uint32(half.FromFloat32(x))
	case "bf16":
		return uint32(half.BFromFloat32(x))
	}
	return math.Float32bits(x)
}

func TestLoadMatrix(t *testing.T) {
	in := memory[uint16](4 * 64)
	for i := range in {
		in[i] = uint16(i)
	}
	for _, trans := range []string{"", ".trans"} {
		// Rows lie in another order than their threads.
		body := fmt.Sprintf(`mov.u64 %%rd0, memory;
cvt.u32.u64 %%r1, %%rd0;
mul.wide.u32 %%rd1, %%t, 16;
add.s64 %%rd1, %%rd1, %%g1;
ld.global.v4.u32 {%%r4, %%r5, %%r6, %%r7}, [%%rd1];
xor.b32 %%r2, %%t, 13;
mad.lo.s32 %%r1, %%r2, 16, %%r1;
st.shared.v4.u32 [%%r1], {%%r4, %%r5, %%r6, %%r7};
bar.warp.sync -1;
ldmatrix.sync.aligned.m8n8.x4%s.shared.b16 {%%r4, %%r5, %%r6, %%r7}, [%%r1];
mul.wide.u32 %%rd1, %%t, 16;
add.s64 %%rd1, %%rd1, %%g0;
st.global.v4.u32 [%%rd1], {%%r4, %%r5, %%r6, %%r7};
`, trans)
		out := memory[uint32](4 * 32)
		if err := launch(compile(t, program(2, body)), Launch{Grid: 1, Block: 32, Shared: 512}, rangeOf(out), rangeOf(in)); err != nil {
			t.Fatal(err)
		}
		same32(t, "ldmatrix"+trans, out, func(i int) uint32 {
			lane, which := i/4, i%4
			at := func(e int) uint32 {
				row, column := lane/4, lane%4*2+e
				if trans != "" {
					row, column = column, row
				}
				return uint32(in[which*64+row*8+column])
			}
			return at(0) | at(1)<<16
		})
	}
	bodyFails(t, Launch{Shared: 512}, "mov.u64 %rd0, memory;\ncvt.u32.u64 %r1, %rd0;\nldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r1+8];", "16 bytes at")
	bodyFails(t, Launch{Shared: 512}, "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [memory+512];", "of shared memory")
	bodyFails(t, Launch{Shared: 512}, "setp.eq.u32 %p0, %t, 1;\n@%p0 ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [memory];", "take part")
}

// A matrix's transposition, in place; all threads of a warp take part.
func TestMoveMatrix(t *testing.T) {
	in := memory[uint32](32)
	for i := range in {
		in[i] = rand.Uint32()
	}
	body := `mul.wide.u32 %rd0, %t, 4;
add.s64 %rd1, %rd0, %g1;
ld.global.u32 %r4, [%rd1];
movmatrix.sync.aligned.m8n8.trans.b16 %r4, %r4;
add.s64 %rd1, %rd0, %g0;
st.global.u32 [%rd1], %r4;
`
	out := memory[uint32](32)
	if err := launch(compile(t, program(2, body)), Launch{Grid: 1, Block: 32}, rangeOf(out), rangeOf(in)); err != nil {
		t.Fatal(err)
	}
	same32(t, "movmatrix", out, func(i int) uint32 {
		at := func(row, column int) uint32 { return in[row*4+column/2] >> (16 * (column % 2)) & 0xffff }
		return at(i%4*2, i/4) | at(i%4*2+1, i/4)<<16
	})
	bodyFails(t, Launch{}, "setp.eq.u32 %p0, %t, 1;\n@%p0 movmatrix.sync.aligned.m8n8.trans.b16 %r4, %r4;", "take part")
}

func TestMatrixProducts(t *testing.T) {
	rng := reftest.Rand(t)
	for _, kind := range []string{"f16", "bf16", "tf32"} {
		depth, per := 16, 2 // elements of a register
		name := fmt.Sprintf("mma.sync.aligned.m16n8k16.row.col.f32.%s.%s.f32", kind, kind)
		if kind == "tf32" {
			depth, per, name = 8, 1, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
		}
		a, b, c := randomMatrix(rng, 16, depth), randomMatrix(rng, 8, depth), randomMatrix(rng, 16, 8)
		d := a.times(b, c)
		// Registers of a thread, as the PTX ISA has them: four of a, two of b, four of c.
		in := memory[uint32](32 * 12)
		for lane := range 32 {
			group, thread := lane/4, lane%4
			r := in[12*lane:]
			for i := range 4 * per {
				row, column := group, thread*2+i&1
				if kind == "tf32" {
					column = thread
					if i >= 2 {
						column += 4
					}
					if i&1 != 0 {
						row += 8
					}
				} else {
					if i/2&1 != 0 {
						row += 8
					}
					if i >= 4 {
						column += 8
					}
				}
				r[i/per] |= narrow(*a.at(row, column), kind) << (16 * (i % per))
			}
			for i := range 2 * per {
				k := thread*2 + i&1
				if kind == "tf32" {
					k = thread + 4*i
				} else if i >= 2 {
					k += 8
				}
				r[4+i/per] |= narrow(*b.at(group, k), kind) << (16 * (i % per))
			}
			for i := range 4 {
				r[8+i] = math.Float32bits(*c.at(group+i/2*8, thread*2+i&1))
			}
			if kind == "tf32" { // bits that it does not have
				for i := range 6 {
					r[i] |= uint32(rng.IntN(1 << 13))
				}
			}
		}
		body := "mad.wide.u32 %rd1, %t, 48, %g1;\n"
		for i := range 12 {
			register := fmt.Sprintf("%%r%d", i)
			if i >= 8 {
				register = fmt.Sprintf("%%f%d", i)
			}
			body += fmt.Sprintf("ld.global.b32 %s, [%%rd1+%d];\n", register, 4*i)
		}
		// Half of the warp comes later.
		body += "setp.lt.u32 %p0, %t, 16;\n@%p0 bra NOW;\nmov.u32 %r20, 0;\nLATER: add.s32 %r20, %r20, 1;\nsetp.lt.u32 %p1, %r20, 9;\n@%p1 bra LATER;\nNOW:\n"
		for _, into := range []string{"f8", "f2"} { // the sums, or others
			result := "{%f8, %f9, %f10, %f11}"
			if into == "f2" {
				result = "{%f2, %f3, %f4, %f5}"
			}
			k := compile(t, program(2, body+name+" "+result+", {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f8, %f9, %f10, %f11};\nmad.wide.u32 %rd1, %t, 16, %g0;\nst.global.v4.f32 [%rd1], "+result+";"))
			out := memory[float32](128)
			if err := launch(k, Launch{Grid: 1, Block: 32}, rangeOf(out), rangeOf(in)); err != nil {
				t.Fatal(err)
			}
			for i, got := range out {
				lane := i / 4
				if want := *d.at(lane/4+i%4/2*8, lane%4*2+i%2); got != want {
					t.Fatalf("%s: register %d of thread %d is %g, want %g", name, i%4, lane, got, want)
				}
			}
		}
	}
}

// grouped is a warp group's product, by n columns and of a depth of 64, of operands
// that are copied to shared memory.
func grouped(n int, kind, wait string) string {
	var d []string
	for i := range n / 2 {
		d = append(d, fmt.Sprintf("%%f%d", i))
	}
	name := fmt.Sprintf("wgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s", n, kind, kind)
	body := fmt.Sprintf(`mov.u64 %%rd0, memory;
cvt.u32.u64 %%r10, %%rd0;
mov.u32 %%r1, %%t;
FILL:
shl.b32 %%r2, %%r1, 2;
cvt.u64.u32 %%rd1, %%r2;
add.s64 %%rd1, %%g1, %%rd1;
ld.global.u32 %%r3, [%%rd1];
add.s32 %%r2, %%r2, %%r10;
st.shared.u32 [%%r2], %%r3;
add.s32 %%r1, %%r1, %%n;
setp.lt.u32 %%p0, %%r1, %d;
@%%p0 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %%r4, %%r10, 4;
cvt.u64.u32 %%rd2, %%r4;
or.b64 %%rd2, %%rd2, 0x4000004000010000;
add.s64 %%rd3, %%rd2, 512;
setp.ne.s32 %%p1, %%n, 0;
setp.eq.s32 %%p2, %%n, 0;
wgmma.fence.sync.aligned;
`, (64+n)*32)
	for i := range 4 {
		more := "%p1"
		if i == 0 {
			more = "%p2"
		}
		body += fmt.Sprintf("%s {%s}, %%rd2, %%rd3, %s, 1, 1, 0, 0;\nadd.s64 %%rd2, %%rd2, 2;\nadd.s64 %%rd3, %%rd3, 2;\n", name, strings.Join(d, ", "), more)
	}
	body += "wgmma.commit_group.sync.aligned;\n" + wait
	body += fmt.Sprintf("mad.wide.u32 %%rd4, %%t, %d, %%g0;\n", 2*n)
	for i, r := range d {
		body += fmt.Sprintf("st.global.f32 [%%rd4+%d], %s;\n", 4*i, r)
	}
	return program(2, body)
}

func TestGroupProducts(t *testing.T) {
	rng := reftest.Rand(t)
	for _, kind := range []string{"f16", "bf16"} {
		for _, n := range []int{8, 16, 32, 64, 128, 256} {
			a, b := randomMatrix(rng, 64, 64), randomMatrix(rng, n, 64)
			d := a.times(b, matrix{64, n, make([]float32, 64*n)})
			in := memory[uint16]((64 + n) * 64)
			for i := range 64 + n { // a's rows, then b's columns, with 16 bytes at place j^i%8 instead of j
				for k := range 64 {
					x := &a
					row := i
					if i >= 64 {
						x, row = &b, i-64
					}
					in[i*64+(k/8^i%8)*8+k%8] = uint16(narrow(*x.at(row, k), kind))
				}
			}
			out := memory[float32](64 * n)
			l := Launch{Grid: 1, Block: 128, Shared: (64 + n) * 128, Seed: rng.Uint64()}
			if err := launch(compile(t, grouped(n, kind, "wgmma.wait_group.sync.aligned 0;\n")), l, rangeOf(out), rangeOf(in)); err != nil {
				t.Fatal(err)
			}
			for i, got := range out {
				thread, j := i/(n/2), i%(n/2)
				warp, lane := thread/32, thread%32
				if want := *d.at(warp*16+lane/4+j/2%2*8, j/4*8+lane%4*2+j%2); got != want {
					t.Fatalf("%s, n %d: register %d of thread %d is %g, want %g", kind, n, j, thread, got, want)
				}
			}
		}
	}
	in, out := memory[uint16](128*64), memory[float32](64*32)
	for wait, says := range map[string]string{
		"setp.eq.u32 %p3, %t, 0;\n@%p3 st.shared.u16 [memory+24], 1;\nwgmma.wait_group.sync.aligned 0;\n":                                   "an operand has changed",
		"st.shared.u16 [memory+8200], 1;\nwgmma.wait_group.sync.aligned 0;\n":                                                               "an operand has changed",
		"wgmma.wait_group.sync.aligned 1;\nsetp.eq.u32 %p3, %t, 0;\n@%p3 st.shared.u16 [memory+24], 1;\nwgmma.wait_group.sync.aligned 0;\n": "an operand has changed",
		"wgmma.wait_group.sync.aligned 0;\nbar.sync 0;\nst.shared.u16 [memory+24], 1;\n":                                                    "",
		"":                                   "ends with products that it has not waited for",
		"wgmma.wait_group.sync.aligned 1;\n": "ends with products that it has not waited for",
		"wgmma.wait_group.sync.aligned 0;\nmov.u64 %rd5, 0x4000004000010000;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd5, %rd3, %p1, 1, 1, 0, 0;\nwgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n": "of shared memory",
		"wgmma.wait_group.sync.aligned 0;\nand.b64 %rd2, %rd2, 0xffff;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd2, %rd3, %p1, 1, 1, 0, 0;\n":                                                                           "an operand of another kind",
		"wgmma.wait_group.sync.aligned 0;\nadd.s64 %rd2, %rd2, %i4;\nwgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd2, %rd3, %p1, 1, 1, 0, 0;\n":                                                                              "threads differ",
	} {
		err := launch(compile(t, grouped(32, "f16", wait)), Launch{Grid: 1, Block: 128, Shared: 96 * 128}, rangeOf(out), rangeOf(in))
		if says != "" {
			fails(t, wait, err, says, "line ")
		} else if err != nil {
			t.Errorf("%s: %v", wait, err)
		}
	}
	for _, text := range []string{
		"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2}, %rd0, %rd1, %p0, 1, 1, 0, 0;", "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd0, %rd1, %p0, -1, 1, 0, 0;",
		"wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd0, %rd1, %p0, 1, 1, 0, 2;", "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd0, %rd1, %p0, 1, 1, 2, 0;", "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd0, %rd1, %p0, 1, 1;", "wgmma.mma_async.sync.aligned.m64n0k16.f32.f16.f16 {}, %rd0, %rd1, %p0, 1, 1, 0, 0;",
		"wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 {%f0, %f1, %f2, %f3}, %rd0, %rd1, %p0, 1, 1, 0, 0;", "wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f0, %f1, %f2, %f3}, %rd0, %rd1, %p0, 1, 1, 0, 0;", "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {1, 2, 3, 4}, %rd0, %rd1, %p0, 1, 1, 0, 0;",
		"wgmma.wait_group.sync.aligned;", "wgmma.wait_group.sync.aligned -1;", "wgmma;", "mma;", "ldmatrix;", "movmatrix;", "movmatrix.sync.aligned.m8n8.b16 %r0, %r1;", "movmatrix.sync.aligned.m8n8.trans.b16 %rd0, %r1;", "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r0, %r1}, {%r0, %r1, %r2, %r3}, {%r0, %r1}, {%r0, %r1};",
		"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r0, %r1};", "ldmatrix.sync.aligned.m8n8.x4.b16 {%r0, %r1, %r2, %r3}, [%rd0];", "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0, %r1}, [%r4];", "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r0, %r1}, [%r4];",
	} {
		compileFails(t, text, "")
	}
}

// Products of a left operand in registers, and of a right one whose rows are summed over.
func TestGroupProductsOfRegisters(t *testing.T) {
	rng := reftest.Rand(t)
	for _, kind := range []string{"f16", "bf16"} {
		for i, n := range []int{64, 64, 128, 128} {
			more, before := i%2, "7fc00000" // what was in the sums before counts, or does not
			if more == 1 {
				before = "00000000"
			}
			a, b := randomMatrix(rng, 64, 16), randomMatrix(rng, n, 16)
			d := a.times(b, matrix{64, n, make([]float32, 64*n)})
			// a: four registers of each thread; b: 16 rows of 64 columns, and the next 64 behind them.
			left, right := memory[uint32](128*4), memory[uint16](16*n)
			for i := range left {
				thread, r := i/4, i%4
				row, k := thread/32*16+thread%32/4+r%2*8, thread%4*2+r/2*8
				left[i] = narrow(*a.at(row, k), kind) | narrow(*a.at(row, k+1), kind)<<16
			}
			for column := range n {
				for k := range 16 {
					in := column % 64
					right[column/64*16*64+k*64+(in/8^k%8)*8+in%8] = uint16(narrow(*b.at(column, k), kind))
				}
			}
			var sums []string
			for i := range n / 2 {
				sums = append(sums, fmt.Sprintf("%%f%d", i))
			}
			body := fmt.Sprintf(`mul.wide.u32 %%rd0, %%t, 16;
add.s64 %%rd1, %%rd0, %%g1;
ld.global.v4.u32 {%%r4, %%r5, %%r6, %%r7}, [%%rd1];
mov.u64 %%rd2, memory;
cvt.u32.u64 %%r10, %%rd2;
mad.lo.s32 %%r11, %%t, %d, %%r10;
mad.wide.u32 %%rd3, %%t, %d, %%g2;
mov.u32 %%r12, 0;
more:
ld.global.u16 %%h0, [%%rd3];
st.shared.u16 [%%r11], %%h0;
add.s64 %%rd3, %%rd3, 2;
add.u32 %%r11, %%r11, 2;
add.u32 %%r12, %%r12, 1;
setp.lt.u32 %%p1, %%r12, %d;
@%%p1 bra more;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %%r13, %%r10, 4;
cvt.u64.u32 %%rd4, %%r13;
or.b64 %%rd4, %%rd4, 0x4000004000800000;
`, n/4, n/4, n/8)
			for _, r := range sums {
				body += fmt.Sprintf("mov.f32 %s, 0f%s;\n", r, before)
			}
			body += fmt.Sprintf("wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n%dk16.f32.%s.%s {%s}, {%%r4, %%r5, %%r6, %%r7}, %%rd4, %d, 1, 1, 1;\n", n, kind, kind, strings.Join(sums, ", "), more)
			body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
			body += fmt.Sprintf("mad.wide.u32 %%rd5, %%t, %d, %%g0;\n", 2*n)
			for i, r := range sums {
				body += fmt.Sprintf("st.global.f32 [%%rd5+%d], %s;\n", 4*i, r)
			}
			out := memory[float32](64 * n)
			l := Launch{Grid: 1, Block: 128, Shared: n * 32, Seed: rng.Uint64()}
			if err := launch(compile(t, program(3, body)), l, rangeOf(out), rangeOf(left), rangeOf(right)); err != nil {
				t.Fatal(err)
			}
			for i, got := range out {
				thread, j := i/(n/2), i%(n/2)
				if want := *d.at(thread/32*16+thread%32/4+j/2%2*8, j/4*8+thread%4*2+j%2); got != want {
					t.Fatalf("%s, n %d: register %d of thread %d is %g, want %g", kind, n, j, thread, got, want)
				}
			}
		}
	}
	for _, more := range []string{"2, 1, 1, 1", "-1, 1, 1, 1", "1, -1, 1, 1", "0, 0, 1, 1", "1, 1, 1, 2", "1, 1, 1"} {
		compileFails(t, "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, %rd1, "+more+";", "")
	}
}

// Products of operands in shared memory whose rows are summed over: 16 of 64 columns, swizzled, and 16 of eight.
func TestGroupProductsTransposed(t *testing.T) {
	rng := reftest.Rand(t)
	for _, kind := range []string{"f16", "bf16"} {
		a, b := randomMatrix(rng, 64, 16), randomMatrix(rng, 8, 16)
		d := a.times(b, matrix{64, 8, make([]float32, 64*8)})
		in := memory[uint16](16*64 + 16*8)
		for k := range 16 {
			for row := range 64 {
				in[k*64+(row/8^k%8)*8+row%8] = uint16(narrow(*a.at(row, k), kind))
			}
			for column := range 8 {
				in[16*64+k*8+column] = uint16(narrow(*b.at(column, k), kind))
			}
		}
		body := func(right string) string {
			return fmt.Sprintf(`mov.u64 %%rd0, memory;
cvt.u32.u64 %%r10, %%rd0;
mov.u32 %%r1, %%t;
FILL:
shl.b32 %%r2, %%r1, 2;
cvt.u64.u32 %%rd1, %%r2;
add.s64 %%rd1, %%g1, %%rd1;
ld.global.u32 %%r3, [%%rd1];
add.s32 %%r2, %%r2, %%r10;
st.shared.u32 [%%r2], %%r3;
add.s32 %%r1, %%r1, %%n;
setp.lt.u32 %%p0, %%r1, %d;
@%%p0 bra FILL;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %%r4, %%r10, 4;
cvt.u64.u32 %%rd2, %%r4;
add.s64 %%rd3, %%rd2, %d;
or.b64 %%rd2, %%rd2, 0x4000004000010000;
or.b64 %%rd3, %%rd3, %s;
setp.eq.s32 %%p1, %%n, 0;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.%s.%s {%%f0, %%f1, %%f2, %%f3}, %%rd2, %%rd3, %%p1, 1, 1, 1, 1;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
mad.wide.u32 %%rd4, %%t, 16, %%g0;
st.global.v4.f32 [%%rd4], {%%f0, %%f1, %%f2, %%f3};
`, len(in)/2, 16*128/16, right, kind, kind)
		}
		out := memory[float32](64 * 8)
		l := Launch{Grid: 1, Block: 128, Shared: 2 * len(in), Seed: rng.Uint64()}
		if err := launch(compile(t, program(2, body("0x0000000800080000"))), l, rangeOf(out), rangeOf(in)); err != nil {
			t.Fatal(err)
		}
		for i, got := range out {
			thread, j := i/4, i%4
			if want := *d.at(thread/32*16+thread%32/4+j/2*8, thread%4*2+j%2); got != want {
				t.Fatalf("%s: register %d of thread %d is %g, want %g", kind, j, thread, got, want)
			}
		}
		for _, right := range []string{"0x0000000800100000", "0x8000000800080000"} { // rows whose distance nobody knows, another swizzle
			err := launch(compile(t, program(2, body(right))), l, rangeOf(out), rangeOf(in))
			fails(t, right, err, "an operand of another kind", "line ")
		}
	}
}
