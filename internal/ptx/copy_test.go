package ptx

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// Copies of threads: what is behind the live bytes becomes 0, and before they are
// waited for there may be what was there before, or not.
func TestAsyncCopies(t *testing.T) {
	rng := reftest.Rand(t)
	in := memory[uint32](32 * 4)
	for i := range in {
		in[i] = rng.Uint32() | 1
	}
	for _, n := range []int{4, 8, 16} {
		for _, ignore := range []bool{false, true} {
			kind, live, count := []string{"ca.shared.global", "ca.shared.global.L2::128B", "cg.shared.global"}[rng.IntN(2+n/16)], "", "mov.u32 %r5, "+fmt.Sprint(n)
			if ignore {
				live, count = ", %r5", fmt.Sprintf("rem.u32 %%r5, %%t, %d", n+1)
			}
			for _, end := range []string{"cp.async.commit_group;\ncp.async.wait_group 0;", "cp.async.wait_all;", "cp.async.commit_group;\ncp.async.wait_all;", "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [memory+512];"} {
				k := compile(t, program(2, fmt.Sprintf(`setp.eq.u32 %%p0, %%t, 0;
@%%p0 mbarrier.init.shared::cta.b64 [memory+512], 32;
bar.sync 0;
mov.u64 %%rd0, memory;
cvt.u32.u64 %%r1, %%rd0;
mad.lo.s32 %%r1, %%t, 16, %%r1;
st.shared.v4.u32 [%%r1], {-1, -1, -1, -1};
mad.wide.u32 %%rd1, %%t, 16, %%g1;
%s;
cp.async.%s [%%r1], [%%rd1], %d%s;
ld.shared.u32 %%r2, [%%r1];
%s
ld.shared.v4.u32 {%%r6, %%r7, %%r8, %%r9}, [%%r1];
mad.wide.u32 %%rd1, %%t, 32, %%g0;
st.global.v4.u32 [%%rd1], {%%r6, %%r7, %%r8, %%r9};
st.global.u32 [%%rd1+16], %%r2;
`, count, kind, n, live, end)))
				before, after := false, false
				for seed := range uint64(3) {
					out := memory[uint32](32 * 8)
					if err := launch(k, Launch{Grid: 1, Block: 32, Shared: 520, Seed: seed}, rangeOf(out), rangeOf(in)); err != nil {
						t.Fatal(err)
					}
					for i := range 32 {
						want := slices.Repeat([]byte{255}, 16)
						bytes := n
						if ignore {
							bytes = i % (n + 1)
						}
						var from [16]byte
						for j := range 4 {
							binary.LittleEndian.PutUint32(from[4*j:], in[4*i+j])
						}
						clear(want[:n])
						copy(want, from[:bytes])
						for j := range 4 {
							if w := binary.LittleEndian.Uint32(want[4*j:]); out[8*i+j] != w {
								t.Fatalf("%d of %d bytes, thread %d: word %d is %#x, want %#x", bytes, n, i, j, out[8*i+j], w)
							}
						}
						switch out[8*i+4] {
						case all:
							before = true
						case out[8*i]:
							after = true
						default:
							t.Fatalf("%#x, neither before nor after", out[8*i+4])
						}
					}
				}
				if !before || !after {
					t.Errorf("before %v, after %v", before, after)
				}
			}
		}
	}
}

// wait_group n is for all but the last n groups.
func TestAsyncGroups(t *testing.T) {
	body := "mov.u64 %rd0, memory;\ncvt.u32.u64 %r1, %rd0;\nmad.lo.s32 %r1, %t, 16, %r1;\nst.shared.v4.u32 [%r1], {0, 0, 0, 0};\n"
	for i := range 4 {
		body += fmt.Sprintf("cp.async.ca.shared.global [%%r1+%d], [%%g1+%d], 4;\ncp.async.commit_group;\n", 4*i, 4*i)
	}
	for i := range 4 {
		body += fmt.Sprintf("cp.async.wait_group %d;\nld.shared.v4.u32 {%%r4, %%r5, %%r6, %%r7}, [%%r1];\nmad.wide.u32 %%rd1, %%t, 64, %%g0;\nst.global.v4.u32 [%%rd1+%d], {%%r4, %%r5, %%r6, %%r7};\n", 3-i, 16*i)
	}
	k := compile(t, program(2, body))
	early := 0
	for seed := range uint64(5) {
		out, in := memory[uint32](32*16), memory[uint32](4)
		copy(in, []uint32{1, 2, 3, 4})
		if err := launch(k, Launch{Grid: 1, Block: 32, Shared: 520, Seed: seed}, rangeOf(out), rangeOf(in)); err != nil {
			t.Fatal(err)
		}
		for i := range 32 {
			for waited := range 4 {
				for j, x := range out[16*i+4*waited:][:4] {
					if x != uint32(j+1) && (x != 0 || j <= waited) {
						t.Fatalf("%d groups have been waited for, and copy %d is %d", waited+1, j, x)
					}
					if x == 0 {
						early++
					}
				}
			}
		}
	}
	if early < 32 {
		t.Errorf("%d copies of 960 were late", early)
	}
}

func TestAsyncCopyErrors(t *testing.T) {
	const at = "mov.u64 %rd0, memory;\ncvt.u32.u64 %r1, %rd0;\n"
	for body, says := range map[string]string{
		"cp.async.ca.shared.global [%r1], [%g0], 4;":                                                 "has not waited for",
		"cp.async.ca.shared.global [%r1], [%g0], 4;\ncp.async.commit_group;\ncp.async.wait_group 1;": "has not waited for",
		"cp.async.ca.shared.global [%r1], [%g0], 4;\ncp.async.wait_group 0;":                         "has not waited for",
		"cp.async.cg.shared.global [%r1], [%g0+4], 16;":                                              "16 bytes, 16 of them from",
		"cp.async.cg.shared.global [%r1+4], [%g0], 16;":                                              "16 bytes at",
		"cp.async.cg.shared.global [%r1], [%g0], 16, 17;":                                            "16 bytes, 17 of them from",
		"cp.async.cg.shared.global [%r1], [%g0], 16, -1;":                                            "16 bytes, 4294967295 of them",
		"cp.async.cg.shared.global [%r1+512], [%g0], 16;":                                            "of 512 bytes of shared memory",
		"cp.async.cg.shared.global [%r1], [%g0+256], 16;":                                            "are in no buffer",
	} {
		bodyFails(t, Launch{Shared: 512}, at+body, says, "line ")
	}
	// What is not read may be anywhere.
	if err := launch(compile(t, program(1, at+"cp.async.cg.shared.global [%r1], [%g0+256], 16, 0;\ncp.async.wait_all;\ncp.async.commit_group;")), Launch{Grid: 1, Block: 32, Shared: 16}, rangeOf(memory[uint32](64))); err != nil {
		t.Error(err)
	}
	for _, text := range []string{
		"cp.async.ca.shared.global [%r1], [%g0], 3;", "cp.async.ca.shared.global [%r1], [%g0], 0;", "cp.async.cg.shared.global [%r1], [%g0], 8;", "cp.async.ca.shared.global [%r1], [%g0], %r2;", "cp.async.ca.shared.global [%r1], [%g0];", "cp.async.ca.shared.global;",
		"cp.async.wait_group -1;", "cp.async.wait_group;", "cp.async.mbarrier.arrive.shared.b64 [%r1];", "cp.async.mbarrier.arrive.noinc.b64 [%r1];", "cp.async.mbarrier.arrive.noinc.shared.b64;", "cp.async.mbarrier.test.noinc.shared.b64 [%r1];", "cp.async;", "cp;", "cp.reduce.async.bulk [%r1];", "cp.async.ca.global.shared [%g0], [%r1], 4;",
		"cp.async.bulk.wait_group;", "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r0];", "cp.reduce.async.bulk.global.shared::cta.bulk_group.min.u32 [%rd0], [%r0], 16;", "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r0], [%rd0], 16, [%r1], %h0;",
		"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0], 16;", "cp.async.bulk;", "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0, {%r1, %r2}], [%r3];",
		"cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd0, {%r1, %r2, %r3}], [%r0];", "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0, {%r1, %r2}], [%r3];", "cp.async.bulk.tensor;",
		"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%r0], {%f0}, [%r1];", "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%r0], %rd0, [%r1];", "st.async;", "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%r0], %f0;",
	} {
		compileFails(t, text, "")
	}
}

// copied has a barrier in the last bytes of shared memory, which the first thread
// initializes, and then begins copies of some bytes; all wait for them, and bring what
// is there to the output.
func copied(bytes int, begin string) string {
	return fmt.Sprintf(`.shared .align 8 .b64 bar;
mov.u64 %%rd0, memory;
cvt.u32.u64 %%r10, %%rd0;
mov.u64 %%rd0, bar;
cvt.u32.u64 %%r11, %%rd0;
mov.u32 %%r12, %d;
setp.ne.s32 %%p0, %%t, 0;
@%%p0 bra READY;
mbarrier.init.shared::cta.b64 [bar], 1;
fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], %%r12;
READY:
%sbar.sync 0;
setp.ne.s32 %%p0, %%t, 0;
@%%p0 bra BEGUN;
%s
BEGUN:
%smov.u32 %%r20, %%t;
mul.lo.s32 %%r22, %%b, %%r12;
OUT:
shl.b32 %%r21, %%r20, 2;
setp.ge.u32 %%p1, %%r21, %%r12;
@%%p1 bra END;
add.s32 %%r23, %%r21, %%r10;
ld.shared.u32 %%r24, [%%r23];
add.s32 %%r23, %%r21, %%r22;
cvt.u64.u32 %%rd20, %%r23;
add.s64 %%rd20, %%rd20, %%g0;
st.global.u32 [%%rd20], %%r24;
add.s32 %%r20, %%r20, %%n;
bra OUT;
END:
%s`, bytes, clusterSync, begin, wait("WAIT", "bar", "0"), clusterSync)
}

func TestBulkCopies(t *testing.T) {
	in := memory[uint32](256)
	for i := range in {
		in[i] = uint32(i * i)
	}
	for seed := range uint64(5) {
		// In two parts, which change places.
		out := memory[uint32](2 * 64)
		body := copied(256, `shl.b32 %r0, %b, 8;
cvt.u64.u32 %rd1, %r0;
add.s64 %rd1, %g1, %rd1;
createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r10+96], [%rd1], 160, [%r11], %rd2;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%rd1+160], 96, [bar];`)
		if err := launch(compile(t, program(2, body)), Launch{Grid: 2, Block: 64, Shared: 256, Seed: seed}, rangeOf(out), rangeOf(in)); err != nil {
			t.Fatal(err)
		}
		same32(t, "parts", out, func(i int) uint32 {
			b, j := i/64*64, i%64
			if j < 24 {
				return in[b+40+j]
			}
			return in[b+j-24]
		})
		// Each block of a cluster to the other one, behind its own.
		body = copied(64, `mov.u32 %r0, 1;
mov.u32 %r1, %cluster_ctarank;
sub.s32 %r0, %r0, %r1;
mapa.shared::cluster.u32 %r2, %r10, %r0;
mapa.shared::cluster.u32 %r3, %r11, %r0;
mov.u32 %r4, 0;
FILL:
mad.lo.s32 %r5, %b, 1000, %r4;
add.s32 %r6, %r10, %r4;
st.shared.u32 [%r6+64], %r5;
add.s32 %r4, %r4, 4;
setp.lt.u32 %p3, %r4, 64;
@%p3 bra FILL;
fence.proxy.async.shared::cta;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r2], [%r10+64], 64, [%r3];`)
		out = memory[uint32](4 * 16)
		if err := launch(compile(t, program(2, body)), Launch{Grid: 4, Cluster: 2, Block: 32, Shared: 128, Seed: seed}, rangeOf(out), rangeOf(in)); err != nil {
			t.Fatal(err)
		}
		same32(t, "the other's", out, func(i int) uint32 { return uint32((i/16^1)*1000 + i%16*4) })
		// Stores that arrive at a barrier.
		body = copied(32, `mov.u32 %r0, 1;
mov.u32 %r1, %cluster_ctarank;
sub.s32 %r0, %r0, %r1;
mapa.shared::cluster.u32 %r2, %r10, %r0;
mapa.shared::cluster.u32 %r3, %r11, %r0;
mov.f32 %f0, 0f3f800000;
cvt.rn.f32.u32 %f1, %b;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%r2], {%f0, %f1}, [%r3];
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r2+8], 7, [%r3];
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r2+12], %b, [%r3];
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r2+16], {1, 2, %b, 4}, [%r3];`)
		out = memory[uint32](4 * 8)
		if err := launch(compile(t, program(2, body)), Launch{Grid: 4, Cluster: 2, Block: 32, Shared: 32, Seed: seed}, rangeOf(out), rangeOf(in)); err != nil {
			t.Fatal(err)
		}
		same32(t, "stored", out, func(i int) uint32 {
			b := uint32(i/8 ^ 1)
			return []uint32{0x3f800000, uint32(bits32(float32(b))), 7, b, 1, 2, b, 4}[i%8]
		})
	}
}

// Before the barrier says so, what is copied may be there or not.
func TestCopiesAreLate(t *testing.T) {
	begin := "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%g1], 64, [%r11];\nmov.u32 %r0, 0;\nLATER: add.s32 %r0, %r0, 1;\nsetp.lt.u32 %p3, %r0, 60;\n@%p3 bra LATER;\nld.shared.u32 %r9, [%r10];\nst.global.u32 [%g0+64], %r9;"
	k := compile(t, program(2, copied(64, begin)))
	seen := map[uint32]int{}
	for seed := range uint64(60) {
		out, in := memory[uint32](17), memory[uint32](16)
		in[0] = 5
		if err := launch(k, Launch{Grid: 1, Block: 32, Shared: 64, Seed: seed}, rangeOf(out), rangeOf(in)); err != nil {
			t.Fatal(err)
		}
		seen[out[16]]++
	}
	if len(seen) != 2 || seen[all] == 0 || seen[5] == 0 {
		t.Errorf("%v", seen)
	}
}

// tensorMap is what the fake driver makes of one.
func tensorMap(x Range, kind uint64, dims [3]uint64, strides [2]uint64, box [3]uint64, swizzle uint64) []uint64 {
	m := memory[uint64](16)
	copy(m, []uint64{x.Address, kind, dims[0], dims[1], dims[2], strides[0], strides[1], box[0], box[1], box[2], 0, swizzle, 2, 0})
	return m
}

const tensorCopy = "prefetch.tensormap [%g1];\ncp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%g1, {%r0, %r1, %r2}], [%r11];"

// toSeveral is tensorCopy to blocks of a cluster.
func toSeveral(ranks int) string {
	return fmt.Sprintf("mov.u16 %%h0, %d;\n", ranks) + strings.Replace(strings.Replace(tensorCopy, "complete_tx::bytes", "complete_tx::bytes.multicast::cluster", 1), "[%r11];", "[%r11], %h0;", 1)
}

func TestTensorCopies(t *testing.T) {
	rng := reftest.Rand(t)
	for trial := range 40 {
		kind, size := uint64(1), 2
		if trial%4 == 3 {
			kind, size = 2, 4
		}
		swizzle := uint64(0)
		if rng.IntN(2) == 0 {
			swizzle = 3
		}
		box := [3]uint64{uint64(128 / size), uint64(1 + rng.IntN(12)), uint64(1 + rng.IntN(3))}
		if swizzle == 0 {
			box[0] = uint64((1 + rng.IntN(10)) * 16 / size)
		}
		dims := [3]uint64{uint64(1 + rng.IntN(150)), uint64(1 + rng.IntN(20)), uint64(1 + rng.IntN(5))}
		row := (int(dims[0])*size+15)/16*16 + 16*rng.IntN(2)
		plane := row * (int(dims[1]) + rng.IntN(2))
		x := memory[byte](plane*(int(dims[2])-1) + row*(int(dims[1])-1) + int(dims[0])*size) // to the last element
		for i := range x {
			x[i] = byte(1 + rng.IntN(255))
		}
		var at [3]int
		for i := range at {
			at[i] = rng.IntN(int(dims[i]+2*box[i])) - int(box[i])
		}
		if trial%8 == 0 {
			at = [3]int{}
		}
		bytes := int(box[0]*box[1]*box[2]) * size
		m := tensorMap(rangeOf(x), kind, dims, [2]uint64{uint64(row), uint64(plane)}, box, swizzle)
		out := memory[byte](bytes)
		body := copied(bytes, fmt.Sprintf("mov.u32 %%r0, %d;\nmov.u32 %%r1, %d;\nmov.u32 %%r2, %d;\n", at[0], at[1], at[2])+tensorCopy)
		text := strings.Replace(program(3, body), "memory[];", "memory[];\n.shared .align 1024 .b8 pad[1024];", 1)
		if err := launch(compile(t, text), Launch{Grid: 1, Block: 64, Shared: bytes, Seed: rng.Uint64()}, rangeOf(out), rangeOf(m), rangeOf(x)); err != nil {
			t.Fatal(err)
		}
		for z := range int(box[2]) {
			for y := range int(box[1]) {
				for i := range int(box[0]) * size {
					gx, gy, gz := at[0]+i/size, at[1]+y, at[2]+z
					want := byte(0)
					if gx >= 0 && gx < int(dims[0]) && gy >= 0 && gy < int(dims[1]) && gz >= 0 && gz < int(dims[2]) {
						want = x[gz*plane+gy*row+gx*size+i%size]
					}
					r := z*int(box[1]) + y
					place := r*int(box[0])*size + i
					if swizzle != 0 {
						place = r*128 + (i/16^r%8)*16 + i%16
					}
					if out[place] != want {
						t.Fatalf("box %v at %v of %v, swizzle %d: byte %d of row %d is %d, want %d", box, at, dims, swizzle, i, r, out[place], want)
					}
				}
			}
		}
	}
}

// A box may go to several blocks of a cluster at once: here each has a part for all.
func TestTensorCopiesToEach(t *testing.T) {
	const blocks, box = 3, 128
	x := memory[byte](blocks * box)
	rng := reftest.Rand(t)
	for i := range x {
		x[i] = byte(rng.IntN(256))
	}
	m := tensorMap(rangeOf(x), 1, [3]uint64{64, blocks, 1}, [2]uint64{box, blocks * box}, [3]uint64{64, 1, 1}, 0)
	for seed := range uint64(5) {
		body := "mov.u32 %r0, 0;\nmov.u32 %r1, %cluster_ctarank;\nmov.u32 %r2, 0;\nmul.lo.s32 %r3, %r1, 128;\nadd.s32 %r3, %r3, %r10;\n" + strings.Replace(toSeveral(0b111), "[%r10]", "[%r3]", 1)
		out := memory[byte](blocks * blocks * box)
		text := strings.Replace(program(3, copied(blocks*box, body)), "memory[];", "memory[];\n.shared .align 1024 .b8 pad[1024];", 1)
		if err := launch(compile(t, text), Launch{Grid: blocks, Cluster: blocks, Block: 32, Shared: blocks * box, Seed: seed}, rangeOf(out), rangeOf(m), rangeOf(x)); err != nil {
			t.Fatal(err)
		}
		for i := range out {
			if out[i] != x[i%len(x)] {
				t.Fatalf("byte %d of block %d is %d, want %d", i%len(x), i/len(x), out[i], x[i%len(x)])
			}
		}
	}
}

func TestCopyErrors(t *testing.T) {
	x := memory[byte](4096)
	bulk := func(to, from, n, bar string) string {
		return copied(256, fmt.Sprintf("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%s], %s, [%s];", to, from, n, bar))
	}
	ahead := func(from, n string) string {
		return copied(256, fmt.Sprintf("cp.async.bulk.prefetch.L2.global [%s], %s;\ncp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%%r10], [%%g2], 256, [%%r11];", from, n))
	}
	zero := "mov.u32 %r0, 0;\nmov.u32 %r1, 0;\nmov.u32 %r2, 0;\n"
	dims, strides, box := [3]uint64{64, 8, 4}, [2]uint64{128, 1024}, [3]uint64{64, 2, 1}
	good := tensorMap(rangeOf(x), 1, dims, strides, box, 3)
	other := "mov.u32 %r0, 1;\nmapa.shared::cluster.u32 %r2, %r10, %r0;\nmapa.shared::cluster.u32 %r3, %r11, %r0;\n"
	for _, c := range []struct {
		body, says string
		m          []uint64
	}{
		{bulk("%r10", "%g2", "256", "%r11"), "", good},
		{ahead("%g2", "4096"), "", good}, {ahead("%g2+16", "4096"), "are in no buffer", good}, {ahead("%g2", "24"), "24 bytes from", good}, {ahead("%g2+8", "16"), "16 bytes from", good}, {ahead("%g2", "0"), "0 bytes from", good},
		{bulk("%r10", "%g2", "248", "%r11"), "248 bytes from", good}, {bulk("%r10+8", "%g2", "16", "%r11"), "16 bytes from", good}, {bulk("%r10", "%g2+8", "16", "%r11"), "16 bytes from", good}, {bulk("%r10", "%g2", "0", "%r11"), "0 bytes from", good},
		{bulk("%r10", "%g2+4080", "32", "%r11"), "are in no buffer", good}, {bulk("%r10+16", "%g2", "256", "%r11"), "of shared memory", good}, {bulk("%r10", "%g2", "256", "%r10"), "there is no barrier", good},
		{bulk("%r10", "%g2", "128", "%r11"), "all threads wait", good},
		{copied(256, "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r10], [%r10+64], 64, [%r11];"), "a copy within a block", good},
		{copied(256, other+"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%g2], 64, [%r11];"), "a barrier of another block", good},
		{copied(256, other+"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r2], 1, [%r11];"), "a barrier of another block", good},
		{copied(256, other+"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%r2+256], 1, [%r3];"), "of shared memory", good},
		{copied(256, other+"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r2+4], {1, 2}, [%r3];"), "8 bytes at", good},
		{copied(256, zero+tensorCopy), "", good},
		{copied(256, zero+strings.Replace(tensorCopy, "[%r10]", "[%r10+64]", 1)), "a box at", good}, {copied(256, zero+strings.Replace(tensorCopy, "[%r10]", "[%r10+128]", 1)), "of shared memory", good},
		{copied(256, zero+strings.Replace(tensorCopy, "[%r11]", "[%r10]", 1)), "there is no barrier", good}, {copied(256, zero+strings.Replace(tensorCopy, "[%g1, ", "[%g1+32, ", 1)), "a tensor map at", good},
		{copied(256, zero+strings.Replace(tensorCopy, "[%r11]", "[%r3]", 1)), "a barrier of another block", good},
		{copied(256, zero+toSeveral(0)), "blocks 0b0 of a cluster of 2", good}, {copied(256, zero+toSeveral(4)), "blocks 0b100 of a cluster of 2", good}, {copied(256, zero+toSeveral(7)), "blocks 0b111 of a cluster of 2", good},
		{copied(256, zero+strings.Replace(toSeveral(3), "[%r10]", "[%r10+128]", 1)), "of shared memory", good},
		{copied(256, zero+tensorCopy), "no tensor map", tensorMap(rangeOf(x), 3000, dims, strides, box, 3)}, {copied(256, zero+tensorCopy), "no tensor map", tensorMap(rangeOf(x), 1, dims, strides, box, 2)},
		{copied(256, zero+tensorCopy), "no tensor map", tensorMap(rangeOf(x), 1, dims, strides, [3]uint64{72, 2, 1}, 3)}, {copied(256, zero+tensorCopy), "no tensor map", tensorMap(rangeOf(x), 1, dims, strides, [3]uint64{4, 2, 1}, 0)},
		{copied(256, zero+tensorCopy), "no tensor map", tensorMap(rangeOf(x), 1, dims, strides, [3]uint64{64, 257, 1}, 3)}, {copied(256, zero+tensorCopy), "no tensor map", tensorMap(rangeOf(x), 1, dims, strides, [3]uint64{64, 0, 1}, 3)},
		{copied(256, zero+tensorCopy), "no tensor map", tensorMap(rangeOf(x), 1, [3]uint64{64, 8, 1 << 40}, strides, box, 3)}, {copied(256, zero+tensorCopy), "no tensor map", tensorMap(rangeOf(x), 1, dims, strides, [3]uint64{8, 3, 1}, 3)},
		// The map says more than there is.
		{copied(256, zero+tensorCopy), "are in no buffer", tensorMap(Range{Address: rangeOf(x).Address + 4096 - 192}, 1, dims, strides, box, 3)},
	} {
		body := strings.Replace(c.body, "setp.ne.s32 %p0, %t, 0;\n@%p0 bra BEGUN;", "setp.ne.s32 %p0, %i, 0;\n@%p0 bra BEGUN;\nmov.u32 %r3, 1;\nmapa.shared::cluster.u32 %r3, %r11, %r3;", 1)
		if c.says == "" {
			body = c.body
		}
		for seed := range uint64(2) {
			out := memory[uint32](2 * 64)
			err := launch(compile(t, program(3, body)), Launch{Grid: 2, Cluster: 2, Block: 32, Shared: 256, Seed: seed}, rangeOf(out), rangeOf(c.m), rangeOf(x))
			if c.says == "" {
				if err != nil {
					t.Errorf("%s: %v", c.body, err)
				}
				continue
			}
			fails(t, c.body, err, c.says, "line ")
			if c.says == "are in no buffer" || c.says == "of shared memory" {
				fails(t, c.body, err, "warp 0, line ")
				if err != nil && !strings.Contains(err.Error(), "cp.async.bulk") && !strings.Contains(err.Error(), "st.async") {
					t.Errorf("%v: does not name the copy", err)
				}
			}
		}
	}
	// Nobody waits for it.
	body := strings.Replace(copied(64, "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r10], [%g1], 64, [%r11];\nret;"), "BEGUN:\n", "ret;\nBEGUN:\nret;\n", 1)
	k, found := compile(t, program(2, body)), 0
	for seed := range uint64(20) {
		if err := launch(k, Launch{Grid: 1, Block: 32, Shared: 64, Seed: seed}, rangeOf(memory[uint32](16)), rangeOf(x)); err != nil {
			found++
			if !strings.Contains(err.Error(), "copies that nobody has waited for") && !strings.Contains(err.Error(), "which has ended") {
				t.Error(err)
			}
		}
	}
	if found < 5 {
		t.Errorf("%d of 20 seeds found a copy that nobody waits for", found)
	}
}
