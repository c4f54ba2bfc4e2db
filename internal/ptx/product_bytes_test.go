package ptx

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/half"
	"gorgonia.org/leanattention/internal/reftest"
)

// Products of warp groups whose elements have a byte: a left operand in registers, four bytes of a row in each, and a right one in swizzled rows.
// Integers have sums of 32 bits, which wrap.
func TestGroupProductsOfBytes(t *testing.T) {
	rng := reftest.Rand(t)
	for kind, number := range map[string]func(b byte) float64{
		"f32.e4m3.e4m3": func(b byte) float64 { return float64(half.E4M3(b).Float32()) },
		"s32.s8.s8":     func(b byte) float64 { return float64(int8(b)) },
	} {
		integers := strings.HasPrefix(kind, "s32")
		for i, n := range []int{8, 64, 128, 64} {
			more := i % 2
			random := func() byte {
				for {
					if b := byte(rng.Uint32()); integers || !half.E4M3(b).IsNaN() {
						return b
					}
				}
			}
			left, right := memory[byte](64*32), memory[byte](n*128) // rows; of each row of the right operand, 32 bytes are multiplied
			for _, m := range [][]byte{left, right} {
				for i := range m {
					m[i] = random()
				}
			}
			registers, sums, before := memory[uint32](128*4), []string{}, uint32(1)<<31-100
			for i := range registers {
				thread, r := i/4, i%4
				row, k := thread/32*16+thread%32/4+r%2*8, thread%4*4+r/2*16
				for j := range 4 {
					registers[i] |= uint32(left[row*32+k+j]) << (8 * j)
				}
			}
			for i := range n / 2 {
				sums = append(sums, fmt.Sprintf("%%f%d", i))
			}
			body := fmt.Sprintf(`mul.wide.u32 %%rd0, %%t, 16;
add.s64 %%rd1, %%rd0, %%g1;
ld.global.v4.u32 {%%r4, %%r5, %%r6, %%r7}, [%%rd1];
mov.u64 %%rd2, memory;
cvt.u32.u64 %%r10, %%rd2;
mov.u32 %%r12, %%t;
more:
mul.wide.u32 %%rd3, %%r12, 4;
add.s64 %%rd3, %%rd3, %%g2;
ld.global.u32 %%r11, [%%rd3];
shl.b32 %%r13, %%r12, 2;
add.u32 %%r13, %%r13, %%r10;
st.shared.u32 [%%r13], %%r11;
add.u32 %%r12, %%r12, 128;
setp.lt.u32 %%p1, %%r12, %d;
@%%p1 bra more;
fence.proxy.async.shared::cta;
bar.sync 0;
shr.u32 %%r13, %%r10, 4;
cvt.u64.u32 %%rd4, %%r13;
or.b64 %%rd4, %%rd4, 0x4000004000010000;
`, n*32)
			for _, r := range sums {
				body += fmt.Sprintf("mov.b32 %s, %d;\n", r, before)
			}
			factors := ", 1, 1"
			if integers {
				factors = ""
			}
			body += fmt.Sprintf("wgmma.fence.sync.aligned;\nwgmma.mma_async.sync.aligned.m64n%dk32.%s {%s}, {%%r4, %%r5, %%r6, %%r7}, %%rd4, %d%s;\n", n, kind, strings.Join(sums, ", "), more, factors)
			body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
			body += fmt.Sprintf("mad.wide.u32 %%rd5, %%t, %d, %%g0;\n", 2*n)
			for i, r := range sums {
				body += fmt.Sprintf("st.global.b32 [%%rd5+%d], %s;\n", 4*i, r)
			}
			out := memory[uint32](64 * n)
			if err := launch(compile(t, program(3, body)), Launch{Grid: 1, Block: 128, Shared: n * 128, Seed: rng.Uint64()}, rangeOf(out), rangeOf(registers), rangeOf(right)); err != nil {
				t.Fatal(err)
			}
			for i, got := range out {
				thread, j := i/(n/2), i%(n/2)
				row, column := thread/32*16+thread%32/4+j/2%2*8, j/4*8+thread%4*2+j%2
				sum := 0.0
				for k := range 32 {
					sum += number(left[row*32+k]) * number(right[column*128+(k/16^column%8)*16+k%16])
				}
				want := uint32(int32(sum))
				if more == 1 {
					want += before
				}
				if !integers {
					if more == 1 {
						sum += float64(math.Float32frombits(before))
					}
					want = math.Float32bits(float32(sum))
				}
				if got != want {
					t.Fatalf("%s, n %d, more %d: register %d of thread %d is %#x, want %#x", kind, n, more, j, thread, got, want)
				}
			}
		}
	}
	for _, text := range []string{
		"m64n8k32.f32.e4m3.e4m3 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, %rd1, 1;", "m64n8k32.f32.e4m3.e4m3 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, %rd1, 2, 1, 1;",
		"m64n8k32.f32.e4m3.e4m3 {%f0, %f1, %f2, %f3}, %rd0, %rd1, 1, 1, 1;", "m64n8k32.f32.s8.s8 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, %rd1, 1;",
		"m64n8k16.s32.s8.s8 {%r8, %r9, %r10, %r11}, {%r0, %r1, %r2, %r3}, %rd1, 1;", "m64n8k32.s32.s8.s8 {%r8, %r9, %r10, %r11}, {%r0, %r1, %r2, %r3}, %rd1, 1, 1, 1;",
	} {
		compileFails(t, "wgmma.mma_async.sync.aligned."+text, "")
	}
}

// Conversion of two float32 to E4M3: the first operand is the upper byte, and magnitudes above 448 are 448.
func TestConvertToE4M3(t *testing.T) {
	rng := reftest.Rand(t)
	e4m3 := func(x uint64) uint64 { return uint64(half.E4M3FromFloat64(float64(math.Float32frombits(uint32(x))))) }
	try(t, rng, operation{"cvt.rn.satfinite.e4m3x2.f32 %d16, %a32, %b32", func(a, b, _, _ uint64) uint64 { return e4m3(a)<<8 | e4m3(b) }}, "f32", nil)
	for _, text := range []string{"cvt.rn.e4m3x2.f32 %h0, %f0, %f1;", "cvt.rn.satfinite.e4m3x2.f32 %h0, %f0;", "cvt.rn.satfinite.e5m2x2.f32 %h0, %f0, %f1;"} {
		compileFails(t, text, "")
	}
}

// TestMatrixProductsOfBytes: products of bytes have sums that wrap, in place and in other registers. Bytes of the left operand are signed or not.
func TestMatrixProductsOfBytes(t *testing.T) {
	rng := reftest.Rand(t)
	left, right, registers := make([]int8, 16*32), make([]int8, 8*32), memory[uint32](32*10)
	for _, m := range [][]int8{left, right} {
		for i := range m {
			m[i] = int8(rng.Uint32())
		}
	}
	want, wantUnsigned := make([]uint32, 32*4), make([]uint32, 32*4)
	for lane := range 32 {
		r := registers[10*lane:]
		for j := range 4 {
			for i := range 4 {
				r[i] |= uint32(uint8(left[(lane/4+i%2*8)*32+i/2*16+lane%4*4+j])) << (8 * j)
			}
			for i := range 2 {
				r[4+i] |= uint32(uint8(right[lane/4*32+i*16+lane%4*4+j])) << (8 * j)
			}
		}
		for i := range 4 {
			r[6+i] = 1<<31 - 1000 + rng.Uint32N(2000)
			sum := int64(r[6+i])
			for k := range 32 {
				sum += int64(left[(lane/4+i/2*8)*32+k]) * int64(right[(lane%4*2+i%2)*32+k])
			}
			want[4*lane+i] = uint32(sum)
			for k := range 32 {
				if x := left[(lane/4+i/2*8)*32+k]; x < 0 {
					sum += 256 * int64(right[(lane%4*2+i%2)*32+k])
				}
			}
			wantUnsigned[4*lane+i] = uint32(sum)
		}
	}
	for i, into := range []int{6, 10, 6} {
		name, want := "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 ", want
		if i > 0 {
			name, want = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 ", wantUnsigned
		}
		body, result := "mad.wide.u32 %rd1, %t, 40, %g1;\n", fmt.Sprintf("{%%r%d, %%r%d, %%r%d, %%r%d}", into, into+1, into+2, into+3)
		for i := range 10 {
			body += fmt.Sprintf("ld.global.b32 %%r%d, [%%rd1+%d];\n", i, 4*i)
		}
		body += name + result + ", {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%r6, %r7, %r8, %r9};\nmad.wide.u32 %rd1, %t, 16, %g0;\nst.global.v4.u32 [%rd1], " + result + ";"
		out := memory[uint32](128)
		if err := launch(compile(t, program(2, body)), Launch{Grid: 1, Block: 32}, rangeOf(out), rangeOf(registers)); err != nil {
			t.Fatal(err)
		}
		same32(t, "mma", out, func(i int) uint32 { return want[i] })
	}
}
