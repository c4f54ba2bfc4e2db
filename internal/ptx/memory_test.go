package ptx

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// Loads of all types, into registers that have their bits or more.
func TestLoads(t *testing.T) {
	rng := reftest.Rand(t)
	for kind, size := range sizes {
		if kind == "f16" {
			continue
		}
		for at := 0; at < 8; at += size {
			want := func(a, _, _, _ uint64) uint64 {
				x := a >> (8 * at) << (64 - 8*size)
				if kind[0] == 's' {
					return uint64(int64(x) >> (64 - 8*size))
				}
				return x >> (64 - 8*size)
			}
			for _, width := range []int{16, 32, 64} {
				if width < 8*size {
					continue
				}
				for _, op := range []string{"ld.global", "ld", "ld.relaxed.gpu.global", "ld.volatile.global", "ld.global.nc"} {
					if rng.IntN(2) == 0 {
						try(t, rng, operation{fmt.Sprintf("%s.%s %%d%d, [%%pa+%d]", op, kind, width, at), want}, "int", nil)
					}
				}
			}
		}
	}
	part := func(n, at int) func(a, b, c, e uint64) uint64 {
		return func(a, _, _, _ uint64) uint64 { return a >> at & (1<<n - 1) }
	}
	for _, o := range []operation{
		{"ld.global.v2.u32 {%d32, %x32}, [%pa]", part(32, 0)}, {"ld.global.v2.f32 {%x32, %d32}, [%pa]", part(32, 32)}, {"ld.global.v2.f32 {_, %d32}, [%pa]", part(32, 32)},
		{"ld.global.v4.u16 {%x16, %y16, %d16, %z16}, [%pa]", part(16, 32)}, {"ld.global.v4.u8 {%x16, %y16, %z16, %d16}, [%pa]", part(8, 24)}, {"ld.global.v4.u8 {%x32, %d32, %z32, %y32}, [%pa]", part(8, 8)},
		{"ld.global.v2.s8 {%x64, %d64}, [%pa+2]", func(a, _, _, _ uint64) uint64 { return uint64(int8(a >> 24)) }},
		{"ld.global.v4.s16 {%x32, %y32, %z32, %d32}, [%pa]", func(a, _, _, _ uint64) uint64 { return uint64(int64(a) >> 48) }},
		// The address is one of the results.
		{"mov.b64 %d64, %pa; ld.global.b64 %d64, [%d64]", part(64, 0)},
		{"mov.b64 %x64, %pa; ld.global.v2.u32 {%x64, %d64}, [%x64]", part(32, 32)},
	} {
		try(t, rng, o, "int", nil)
	}
}

// Stores write their bytes only.
func TestStores(t *testing.T) {
	for _, s := range []struct {
		text string
		want func(old uint64, i int) uint64
	}{
		{"st.global.u8 [%rd1+3], %r0;", func(old uint64, i int) uint64 { return old&^0xff000000 | uint64(uint8(3*i+0x101))<<24 }},
		{"st.u16 [%rd1+2], %r0;", func(old uint64, i int) uint64 { return old&^0xffff0000 | uint64(uint16(3*i+0x101))<<16 }},
		{"st.global.b32 [%rd1+4], %r0;", func(old uint64, i int) uint64 { return old&0xffffffff | uint64(3*i+0x101)<<32 }},
		{"st.global.v2.b32 [%rd1], {%r0, 5};", func(old uint64, i int) uint64 { return uint64(3*i+0x101) | 5<<32 }},
		{"st.global.v4.u8 [%rd1+4], {1, %r0, 3, 4};", func(old uint64, i int) uint64 {
			return old&0xffffffff | 0x04030001<<32 | uint64(uint8(3*i+1))<<40
		}},
		{"cvt.u64.u32 %rd2, %r0;\nst.global.u16 [%rd1], %rd2;", func(old uint64, i int) uint64 { return old&^0xffff | uint64(uint16(3*i+0x101)) }},
		{"st.relaxed.gpu.global.b64 [%rd1], -2;", func(old uint64, i int) uint64 { return ^uint64(1) }},
		{"st.global.u32 [%rd1+-4], 9;", func(old uint64, i int) uint64 { return old }},
	} {
		out := memory[uint64](64)
		rng := rand.New(rand.NewPCG(3, 4))
		var old [64]uint64
		for i := range out {
			old[i] = rng.Uint64()
			out[i] = old[i]
		}
		body := "add.s64 %rd1, %g0, %i8;\nmad.lo.s32 %r0, %t, 3, 0x101;\nand.b32 %r1, %t, 3;\nsetp.ne.s32 %p0, %r1, 2;\n@%p0 bra DONE;\n" + s.text + "\nDONE:"
		if err := launch(compile(t, program(1, body)), Launch{Grid: 1, Block: 64}, rangeOf(out)); err != nil {
			t.Fatal(err)
		}
		for i, x := range out {
			want := old[i]
			if i%4 == 2 {
				want = s.want(want, i)
			}
			if s.text == "st.global.u32 [%rd1+-4], 9;" && i%4 == 1 {
				want = want&0xffffffff | 9<<32
			}
			if x != want {
				t.Fatalf("%s: thread %d has %#x, want %#x", s.text, i, x, want)
			}
		}
	}
}

func TestBounds(t *testing.T) {
	x := memory[uint32](96) // the kernel has the middle
	k := func(op, at string) *Kernel {
		return compile(t, program(1, ".shared .align 4 .u32 word;\n.shared .b8 bytes[12];\n"+fmt.Sprintf(op, at)))
	}
	for _, op := range []string{"ld.global.u32 %%r0, [%s];", "st.global.u32 [%s], %%r0;", "ld.u32 %%r0, [%s];", "st.u32 [%s], %%r0;", "atom.global.add.u32 %%r0, [%s], 1;", "red.global.add.u32 [%s], 1;"} {
		for at, ok := range map[string]bool{"%g0": true, "%g0+124": true, "%g0+-4": false, "%g0+128": false, "18446744073709551612": false, "0": false, "%g0+72057594037927936": false, "%g0+1": false} {
			err := launch(k(op, at), Launch{Grid: 1, Block: 32}, rangeOf(x[32:64]))
			if ok && err != nil {
				t.Errorf("%s of %s: %v", op, at, err)
			} else if !ok {
				fails(t, op+at, err, "block 0 of 1, warp 0, line ", ": ")
			}
		}
	}
	fails(t, "half within", launch(k("ld.global.u64 %%rd0, [%s];", "%g0+8"), Launch{Grid: 1, Block: 32}, Range{Address: rangeOf(x).Address, Bytes: 12}), "8 bytes at")
	fails(t, "a vector", launch(k("ld.global.v2.u32 {%%r0, %%r1}, [%s];", "%g0+4"), Launch{Grid: 1, Block: 32}, rangeOf(x)), "8 bytes at")
	fails(t, "no memory", launch(k("ld.global.u32 %%r0, [%s];", "0"), Launch{Grid: 1, Block: 32}, Range{Address: 16}), "are in no buffer")
	// Two buffers that touch are two.
	a := rangeOf(x)
	two := []Range{{Address: a.Address, Bytes: 64}, {Address: a.Address + 64, Bytes: 64}}
	if err := launch(compile(t, program(2, "ld.global.u32 %r0, [%g0+64];\nld.global.u32 %r0, [%g1+-4];")), Launch{Grid: 1, Block: 32}, two...); err != nil {
		t.Error(err)
	}
	two[0].Bytes = 60
	fails(t, "of two", launch(compile(t, program(2, "ld.global.u64 %rd0, [%g1+-8];")), Launch{Grid: 1, Block: 32}, two...), "8 bytes")

	// Shared memory, of 16 bytes, or up to 1024 and 32 of the launch.
	for _, c := range []struct {
		at     string
		shared int
		ok     bool
	}{
		{"word", 0, true}, {"word+12", 0, true}, {"word+16", 0, false}, {"word+-4", 0, false}, {"word+2", 0, false}, {"memory", 0, false}, {"memory", 32, true}, {"memory+28", 32, true}, {"memory+32", 32, false},
		{"0", 0, false}, {"0", 32, false}, {"word+16777216", 32, false},
	} {
		for _, op := range []string{"ld.shared.u32 %%r0, [%s];", "st.shared.u32 [%s], %%r0;", "ld.shared::cta.u32 %%r0, [%s];", "red.shared.max.u32 [%s], 1;"} {
			err := launch(k(op, c.at), Launch{Grid: 1, Block: 32, Shared: c.shared}, a)
			if c.ok && err != nil {
				t.Errorf("%s of %s: %v", op, c.at, err)
			} else if !c.ok {
				fails(t, op+c.at, err, "4 bytes at")
			}
		}
	}

	// Parameters of the kernel, and of functions.
	for at, ok := range map[string]bool{"[k_param_0+4]": true, "[k_param_0+8]": false, "[k_param_0+-4]": false, "[%rd0]": true} {
		err := launch(k("mov.u64 %%rd0, k_param_0;\nld.param.u32 %%r0, %s;", at), Launch{Grid: 1, Block: 32}, a)
		if ok && err != nil {
			t.Errorf("%s: %v", at, err)
		} else if !ok {
			fails(t, at, err, "of 8 bytes of parameters")
		}
	}
	bodyFails(t, Launch{}, ".param .b32 p;\nld.param.u64 %rd0, [p];", "of 4 bytes of parameters")
	bodyFails(t, Launch{}, "mov.u64 %rd0, k_param_0;\ncvta.param.u64 %rd0, %rd0;\nst.u32 [%rd0], 1;", "read only")
	for _, text := range []string{
		"st.param.u32 [k_param_0], 1;", "ld.shared.u32 %r0, [k_param_0];", "ld.param.u32 %r0, [memory];", "ld.u32 %r0, [memory];", "ld.global.u32 %r0, %rd0;", "ld.global.u32 %r0, [%p0];", "ld.global.u32 %r0, [nothing];", "ld.global.u32 %r0;",
		"ld.global.v2.u32 %r0, [%rd0];", "ld.global.v4.u32 {%r0, %r1}, [%rd0];", "ld.global.u32 {%r0, %r1}, [%rd0];", "ld.global.v2.u8 {%r0, %r1, %r2}, [%rd0];", "ld.global.v4.u8 {%r0, %r1, %r2, %r3, %r4}, [%rd0];", "ld.global.b128 %rd0, [%rd0];", "ld.global.u64 %r0, [%rd0];", "ld.global.pred %p0, [%rd0];",
		".local .b32 x;", ".param .b32 p;\nmov.u64 %rd0, p;", ".param .b32 p;\nmov.u32 %r0, p;", "atom.global.cas.b32 %r0, [%rd0], 1, 2;", "atom.global.inc.u64 %rd0, [%rd0], %rd1;", "atom.global.max.s32 %r0, [%rd0], 1;", "atom.global.add.f32 %f0, [%rd0], %f1;", "red.async.relaxed.cluster.global.add.u32 [%rd0], 1, [%rd1];",
		"atom.global.add.u32 %r0, [%rd0];", "atom.global.or.b32 %r0, [%rd0], 1;", "red;", "ld;", "st;",
	} {
		m, err := Parse(program(1, text))
		if err == nil {
			_, err = m.Kernel("k")
		}
		fails(t, text, err, "line ")
	}
}

// Generic addresses of all spaces, and how they become addresses within them again.
func TestSpaces(t *testing.T) {
	body := `.shared .align 8 .b8 here[256];
mov.u64 %rd1, here;
cvta.shared.u64 %rd2, %rd1;
add.s64 %rd2, %rd2, %i4;
mad.lo.s32 %r1, %t, 5, 1;
st.u32 [%rd2], %r1;
cvta.to.shared.u64 %rd3, %rd2;
ld.shared.u32 %r2, [%rd3];
cvt.u32.u64 %r3, %rd3;
ld.shared.u32 %r3, [%r3];
mov.u64 %rd4, k_param_0;
cvta.param.u64 %rd4, %rd4;
ld.u64 %rd5, [%rd4];
cvta.to.param.u64 %rd4, %rd4;
ld.param.u64 %rd6, [%rd4];
cvta.to.global.u64 %rd6, %rd6;
cvta.global.u64 %rd6, %rd6;
sub.s64 %rd5, %rd5, %rd6;
cvt.u32.u64 %r4, %rd5;
sub.s32 %r0, %r1, %r2;
or.b32 %r0, %r0, %r4;
mad.lo.s32 %r0, %r0, 1000, %r3;
`
	same32(t, "spaces", results(t, Launch{Block: 64}, body+result("%r0")), func(i int) uint32 { return uint32(i*5 + 1) })
	bodyFails(t, Launch{}, "mov.u64 %rd0, 0x400000000000000;\nld.u32 %r0, [%rd0];", "in no space")
	bodyFails(t, Launch{}, "mov.u64 %rd0, 0x300000000000400;\nld.u32 %r0, [%rd0];", "in no space")
}

func TestSharedBegins(t *testing.T) {
	same32(t, "shared memory", results(t, Launch{Block: 32, Shared: 128}, "cvt.u64.u32 %rd0, %t;\nshl.b64 %rd0, %rd0, 2;\nmov.u64 %rd1, memory;\nadd.s64 %rd0, %rd0, %rd1;\nld.shared.u32 %r0, [%rd0];\n"+result("%r0")), func(i int) uint32 { return all })
	// Each block's, also where the blocks are after one another.
	same32(t, "shared memory", results(t, Launch{Grid: 4, Block: 32, Shared: 128, Resident: 1}, "ld.shared.u32 %r0, [memory];\nbar.warp.sync -1;\nst.shared.u32 [memory], %b;\n"+result("%r0")), func(i int) uint32 { return all })
	same32(t, "NaN", results(t, Launch{Block: 32, Shared: 128}, "ld.shared.f32 %f0, [memory];\nsetp.nan.f32 %p0, %f0, %f0;\nselp.b32 %r0, 1, 0, %p0;\n"+result("%r0")), func(i int) uint32 { return 1 })
}

const clusterSync = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"

// Each block reads and writes the next one's shared memory.
func TestCluster(t *testing.T) {
	body := `mov.u64 %rd0, memory;
cvt.u32.u64 %r1, %rd0;
mad.lo.s32 %r1, %t, 4, %r1;
mad.lo.s32 %r2, %b, 100, %t;
st.shared.u32 [%r1], %r2;
` + clusterSync + `mov.u32 %r3, %cluster_ctarank;
mov.u32 %r4, %cluster_nctarank;
add.s32 %r3, %r3, 1;
rem.u32 %r3, %r3, %r4;
mapa.shared::cluster.u32 %r5, %r1, %r3;
ld.shared::cluster.u32 %r6, [%r5];
` + clusterSync + `atom.shared::cluster.add.u32 %r7, [%r5], 50000;
` + clusterSync + `ld.shared.u32 %r8, [%r1];
ld.shared::cluster.u32 %r9, [%r1];
mov.u32 %r11, 0;
sub.s32 %r9, %r9, %r8;
add.s32 %r0, %r6, %r8;
add.s32 %r0, %r0, %r9;
`
	for seed := range uint64(4) {
		got := results(t, Launch{Grid: 6, Block: 32, Cluster: 3, Shared: 128, Resident: 3, Seed: seed}, body+result("%r0"))
		same32(t, "cluster", got, func(i int) uint32 {
			b := i / 32
			next := b/3*3 + (b+1)%3
			return uint32(next*100 + i%32 + b*100 + i%32 + 50000)
		})
	}
	fails2 := func(body string, says string) {
		t.Helper()
		bodyFails(t, Launch{Grid: 2, Cluster: 2, Shared: 128}, body, says)
	}
	fails2("mapa.shared::cluster.u32 %r0, 1024, 2;", "block 2 of a cluster of 2")
	fails2("mapa.shared::cluster.u32 %r0, 1024, 1;\nmapa.shared::cluster.u32 %r0, %r0, 1;", "no address in this block")
	fails2("mapa.shared::cluster.u32 %r0, 1024, 1;\nld.shared.u32 %r0, [%r0];", "bytes of shared memory")
	fails2("mapa.shared::cluster.u32 %r0, 1024, 1;\nld.shared::cluster.u32 %r0, [%r0+128];", "bytes of shared memory")
	fails2("ld.shared::cluster.u32 %r0, [67109888];", "block 3 of a cluster of 2")
	// A block's shared memory ends with it.
	fails2("setp.eq.u32 %p0, %b, 0;\n@%p0 ret;\nmapa.shared::cluster.u32 %r0, 1024, 0;\nLOOP: ld.shared::cluster.u32 %r1, [%r0];\nbra LOOP;", "shared memory of block 0, which has ended")
}

func TestAtomics(t *testing.T) {
	for _, a := range []struct {
		op     string
		before uint32
		after  func(n uint32) uint32 // n threads
		olds   func(seen map[uint32]int, n uint32) bool
	}{
		{"add.u32 %%r0, [%s], 3;", 10, func(n uint32) uint32 { return 10 + 3*n }, func(seen map[uint32]int, n uint32) bool {
			return len(seen) == int(n) && seen[10] == 1 && seen[10+3*n-3] == 1
		}},
		{"add.s32 %%r0, [%s], -1;", 5, func(n uint32) uint32 { return 5 - n }, func(seen map[uint32]int, n uint32) bool { return len(seen) == int(n) }},
		{"inc.u32 %%r0, [%s], 6;", 0, func(n uint32) uint32 { return n % 7 }, func(seen map[uint32]int, n uint32) bool { return len(seen) == 7 }},
		{"inc.u32 %%r0, [%s], 6;", 70, func(n uint32) uint32 { return (n - 1) % 7 }, func(seen map[uint32]int, n uint32) bool { return len(seen) == 8 && seen[70] == 1 }},
		{"max.u32 %%r0, [%s], %%i;", 40, func(n uint32) uint32 { return max(n-1, 40) }, func(seen map[uint32]int, n uint32) bool { return seen[40] >= 1 }},
		{"min.u32 %%r0, [%s], %%i;", all, func(n uint32) uint32 { return 0 }, func(seen map[uint32]int, n uint32) bool { return seen[all] == 1 }},
		{"exch.b32 %%r0, [%s], 77;", 6, func(n uint32) uint32 { return 77 }, func(seen map[uint32]int, n uint32) bool { return seen[6] == 1 && seen[77] == int(n)-1 }},
	} {
		for _, space := range []string{"global.", "shared.", ""} {
			at := map[string]string{"global.": "%g1", "shared.": "memory", "": "%g1"}[space]
			grid := 3
			body := fmt.Sprintf("atom.acq_rel.gpu."+space+a.op+"\n", at) + result("%r0")
			if space == "shared." {
				grid = 1
				body = fmt.Sprintf("setp.ne.s32 %%p0, %%t, 0;\n@%%p0 bra GO;\nst.shared.u32 [memory], %d;\nGO: bar.sync 0;\n", a.before) + body + "bar.sync 0;\nld.shared.u32 %r1, [memory];\nst.global.u32 [%g1], %r1;"
			}
			out, x := memory[uint32](grid*64), memory[uint32](1)
			x[0] = a.before
			if err := launch(compile(t, program(2, body)), Launch{Grid: grid, Block: 64, Shared: 4}, rangeOf(out), rangeOf(x)); err != nil {
				t.Fatal(err)
			}
			seen := map[uint32]int{}
			for _, old := range out {
				seen[old]++
			}
			if n := uint32(grid * 64); x[0] != a.after(n) || !a.olds(seen, n) {
				t.Errorf("%s%s: %d, want %d; before: %v", space, a.op, x[0], a.after(n), seen)
			}
		}
	}
	x := memory[uint32](1)
	if err := launch(compile(t, program(1, "mul.lo.s32 %r0, %i, 7;\nand.b32 %r0, %r0, 63;\nred.global.max.u32 [%g0], %r0;")), Launch{Grid: 2, Block: 32}, rangeOf(x)); err != nil || x[0] != 63 {
		t.Errorf("red: %d, %v", x[0], err)
	}
}

// The greatest, the least and the sum of all are what is left; and what threads exchange is lost
// nowhere, and there once.
func TestAtomics64(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for _, space := range []string{"global.", ""} {
		const n = 3 * 64
		factor, x, out := rng.Uint64(), memory[uint64](4), memory[uint64](n)
		x[1], x[2] = rng.Uint64(), math.MaxUint64
		body := fmt.Sprintf("mul.wide.u32 %%rd0, %%i, 1;\nmul.lo.s64 %%rd0, %%rd0, %d;\nred.%smax.u64 [%%g1], %%rd0;\nadd.s64 %%rd3, %%rd0, 99;\nred.%smin.u64 [%%g1+16], %%rd3;\nred.%sadd.u64 [%%g1+24], %%rd3;\natom.relaxed.gpu.%sexch.b64 %%rd1, [%%g1+8], %%rd0;\n"+
			"mul.wide.u32 %%rd2, %%i, 8;\nadd.s64 %%rd2, %%rd2, %%g0;\nst.global.u64 [%%rd2], %%rd1;\n", int64(factor), space, space, space, space)
		want, greatest, least, sum := []uint64{x[1]}, uint64(0), uint64(math.MaxUint64), uint64(0)
		for i := range uint64(n) {
			sum += i*factor + 99
			want, greatest, least = append(want, i*factor), max(greatest, i*factor), min(least, i*factor+99)
		}
		if err := launch(compile(t, program(2, body)), Launch{Grid: 3, Block: 64}, rangeOf(out), rangeOf(x)); err != nil {
			t.Fatal(err)
		}
		got := append([]uint64{x[1]}, out...)
		slices.Sort(got)
		slices.Sort(want)
		if x[0] != greatest || x[2] != least || x[3] != sum || !slices.Equal(got, want) {
			t.Errorf("the greatest is %x, want %x; the least %x, want %x; the sum %x, want %x; exchanged: %x, want %x", x[0], greatest, x[2], least, x[3], sum, got, want)
		}
	}
}

// A variable of each function that has one, and of the module, lies apart from the others.
func TestSharedVariables(t *testing.T) {
	m, err := Parse(header + `.shared .align 16 .b8 first[20];
.shared .u16 second;
.func f(.param .b32 p) { .shared .u64 third; .reg .b32 %r0; ld.param.u32 %r0, [p]; st.shared.u32 [third+4], %r0; st.shared.u32 [third], %r0; }
.visible .entry other() { .shared .b8 large[4096]; ret; }
.visible .entry k(.param .u64 k_param_0)
{
.shared .f32 fourth[2];
.reg .b32 %r<4>; .reg .b64 %rd0;
st.shared.v4.u32 [first], {1, 2, 3, 4};
st.shared.u32 [first+16], 5;
st.shared.u16 [second], 6;
st.shared.u64 [fourth], 7;
st.shared.u32 [memory], 8;
{ .param .b32 p; st.param.b32 [p], 9; call f, (p); }
ld.shared.u32 %r0, [first+16];
ld.shared.u16 %r1, [second];
mad.lo.s32 %r0, %r0, 10, %r1;
ld.shared.u32 %r1, [fourth];
mad.lo.s32 %r0, %r0, 10, %r1;
ld.shared.u32 %r1, [memory];
mad.lo.s32 %r0, %r0, 10, %r1;
ld.param.u64 %rd0, [k_param_0];
st.global.u32 [%rd0], %r0;
}`)
	if err != nil {
		t.Fatal(err)
	}
	k, err := m.Kernel("k")
	if err != nil {
		t.Fatal(err)
	}
	out := memory[uint32](1)
	if err := launch(k, Launch{Grid: 1, Block: 32, Shared: 4}, rangeOf(out)); err != nil || out[0] != 5678 {
		t.Errorf("%d, %v", out[0], err)
	}
	if k.static > 64 {
		t.Errorf("%d bytes", k.static)
	}
}
