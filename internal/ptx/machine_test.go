package ptx

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/reftest"
)

const header = ".version 8.4\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 memory[];\n"

// program is an entry k of n addresses, which are in %g0, %g1...; %t is the thread in
// its block %b, %i of all, and %i4 and %i8 what it has to add to an address.
func program(n int, body string) string {
	var params, loads []string
	for i := range n {
		params = append(params, fmt.Sprintf(".param .u64 k_param_%d", i))
		loads = append(loads, fmt.Sprintf("ld.param.u64 %%g%d, [k_param_%d];", i, i))
	}
	return header + ".visible .entry k(" + strings.Join(params, ", ") + `)
{
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .f32 %f<160>;
.reg .b32 %r<32>, %t, %b, %i, %n;
.reg .b64 %rd<32>, %g<8>, %i4, %i8, %out;
mov.u32 %t, %tid.x;
mov.u32 %b, %ctaid.x;
mov.u32 %n, %ntid.x;
mad.lo.s32 %i, %b, %n, %t;
mul.wide.u32 %i4, %i, 4;
mul.wide.u32 %i8, %i, 8;
` + strings.Join(loads, "\n") + "\n" + body + "\nret;\n}\n"
}

// result stores a register of each thread at the first address.
func result(register string) string {
	return "add.s64 %out, %g0, %i4;\nst.global.b32 [%out], " + register + ";\n"
}

func compile(t testing.TB, text string) *Kernel {
	t.Helper()
	m, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	k, err := m.Kernel("k")
	if err != nil {
		t.Fatal(err)
	}
	return k
}

var heap [64]any // the last memory: what is reachable from here stays where it is

// memory is n elements, at an address that 256 divides.
func memory[T any](n int) []T {
	var one T
	size := int(unsafe.Sizeof(one))
	x := make([]T, n+256/size)
	copy(heap[1:], heap[:])
	heap[0] = x
	if over := int(uintptr(unsafe.Pointer(&x[0])) % 256); over > 0 {
		x = x[(256-over)/size:]
	}
	return x[:n:n]
}

func rangeOf[T any](x []T) Range {
	return Range{Address: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(x)))), Bytes: int64(len(x)) * int64(unsafe.Sizeof(x[0]))}
}

// launch runs a kernel whose parameters are the addresses of buffers.
func launch(k *Kernel, l Launch, buffers ...Range) error {
	for _, b := range buffers {
		l.Params = binary.LittleEndian.AppendUint64(l.Params, b.Address)
	}
	all := slices.Clone(buffers)
	slices.SortFunc(all, func(a, b Range) int { return cmp.Compare(a.Address, b.Address) })
	return k.Run(l, all)
}

// results runs a body that stores a number of each thread.
func results(t testing.TB, l Launch, body string) []uint32 {
	t.Helper()
	return resultsOf(t, l, program(1, body))
}

func resultsOf(t testing.TB, l Launch, text string) []uint32 {
	t.Helper()
	l.Grid = max(l.Grid, 1)
	out := memory[uint32](l.Grid * l.Block)
	for i := range out {
		out[i] = 0xdeadbeef
	}
	if err := launch(compile(t, text), l, rangeOf(out)); err != nil {
		t.Fatal(err)
	}
	return out
}

// same32 compares what threads have stored.
func same32(t testing.TB, what string, got []uint32, want func(i int) uint32) {
	t.Helper()
	for i, x := range got {
		if x != want(i) {
			t.Fatalf("%s: thread %d has %d (%#x), want %d", what, i, int32(x), x, int32(want(i)))
		}
	}
}

// fails wants an error that says something.
func fails(t testing.TB, what string, err error, says ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s: no error", what)
		return
	}
	for _, s := range says {
		if !strings.Contains(err.Error(), s) {
			t.Errorf("%s: %v: does not say %q", what, err, s)
		}
	}
}

// bodyFails wants an error of a body that gets a buffer of 64 numbers.
func bodyFails(t testing.TB, l Launch, body string, says ...string) {
	t.Helper()
	l.Grid, l.Block = max(l.Grid, 1), max(l.Block, 32)
	fails(t, body, launch(compile(t, program(1, body)), l, rangeOf(memory[uint32](64))), says...)
}

func TestSpecialRegisters(t *testing.T) {
	for _, s := range []struct {
		name string
		want func(i int) uint32
	}{
		{"%tid.x", func(i int) uint32 { return uint32(i % 64) }},
		{"%ntid.x", func(i int) uint32 { return 64 }},
		{"%ctaid.x", func(i int) uint32 { return uint32(i / 64) }},
		{"%nctaid.x", func(i int) uint32 { return 6 }},
		{"%laneid", func(i int) uint32 { return uint32(i % 32) }},
		{"%warpid", func(i int) uint32 { return uint32(i / 32 % 2) }},
		{"%cluster_ctarank", func(i int) uint32 { return uint32(i / 64 % 3) }},
		{"%cluster_nctarank", func(i int) uint32 { return 3 }},
		{"%cluster_ctaid.x", func(i int) uint32 { return uint32(i / 64 % 3) }},
		{"%cluster_nctaid.x", func(i int) uint32 { return 3 }},
		{"%clusterid.x", func(i int) uint32 { return uint32(i / 192) }},
		{"%nclusterid.x", func(i int) uint32 { return 2 }},
		{"%dynamic_smem_size", func(i int) uint32 { return 48 }},
	} {
		got := results(t, Launch{Grid: 6, Block: 64, Cluster: 3, Shared: 48}, "mov.u32 %r0, "+s.name+";\n"+result("%r0"))
		same32(t, s.name, got, s.want)
	}
}

func TestDivergence(t *testing.T) {
	for _, p := range []struct {
		name, body string
		want       func(i int) uint32
	}{
		{"if", `mov.u32 %r0, 1;
setp.lt.u32 %p0, %t, 7;
@%p0 bra YES;
add.s32 %r0, %r0, 10;
bra.uni DONE;
YES:
add.s32 %r0, %r0, 100;
DONE:
add.s32 %r0, %r0, 1000;`, func(i int) uint32 {
			if i < 7 {
				return 1101
			}
			return 1011
		}},
		{"nested", `mov.u32 %r0, 0;
and.b32 %r1, %t, 1;
setp.eq.s32 %p0, %r1, 0;
@!%p0 bra ODD;
and.b32 %r1, %t, 2;
setp.eq.s32 %p1, %r1, 0;
@%p1 bra EVEN;
add.s32 %r0, %r0, 2;
bra DONE;
EVEN: add.s32 %r0, %r0, 1;
bra DONE;
ODD:
and.b32 %r1, %t, 4;
setp.ne.s32 %p1, %r1, 0;
@%p1 bra DONE;
add.s32 %r0, %r0, 3;
DONE:`, func(i int) uint32 {
			switch {
			case i&3 == 2:
				return 2
			case i&1 == 0:
				return 1
			case i&4 != 0:
				return 0
			}
			return 3
		}},
		{"a loop as long as the lane's number", `mov.u32 %r0, 0;
mov.u32 %r1, 0;
LOOP:
setp.ge.u32 %p0, %r1, %t;
@%p0 bra DONE;
add.s32 %r1, %r1, 1;
add.s32 %r0, %r0, %r1;
bra LOOP;
DONE:`, func(i int) uint32 { return uint32(i * (i + 1) / 2) }},
		{"scopes with labels of the same name", `mov.u32 %r0, 0;
{ .reg .pred p; .reg .b32 x;
mov.u32 x, 5;
setp.gt.u32 p, %t, 3;
@p bra again;
add.s32 %r0, %r0, x;
again: }
{ .reg .pred p; .reg .b32 x, y<2>;
mov.u32 y1, 7;
mov.u32 x, 70;
again: setp.gt.u32 p, %t, 5;
@p bra done;
add.s32 %r0, %r0, x;
done: add.s32 %r0, %r0, y1; }`, func(i int) uint32 {
			x := uint32(7)
			if i <= 3 {
				x += 5
			}
			if i <= 5 {
				x += 70
			}
			return x
		}},
	} {
		for seed := range uint64(5) {
			same32(t, p.name, results(t, Launch{Block: 64, Seed: seed}, p.body+"\n"+result("%r0")), p.want)
		}
	}
}

// The loop's threads are together again behind it.
func TestReconvergence(t *testing.T) {
	body := `mov.u32 %r1, 0;
LOOP: add.s32 %r1, %r1, 1;
setp.lt.u32 %p0, %r1, %t;
@%p0 bra LOOP;
shfl.sync.bfly.b32 %r0, %r1, 31, 31, -1;
` + result("%r0")
	same32(t, "the other end's", results(t, Launch{Block: 32}, body), func(i int) uint32 { return uint32(max(31-i, 1)) })
}

// A thread waits for another one of its warp, which is behind or before it.
func TestLanesWait(t *testing.T) {
	for _, way := range []string{`TELLS: mov.u32 %r0, 1;
st.relaxed.gpu.global.u32 [%g0+128], 77;
bra DONE;
WAITS: ld.relaxed.gpu.global.u32 %r0, [%g0+128];
setp.ne.s32 %p1, %r0, 77;
@%p1 bra WAITS;
DONE:
`, `WAITS: ld.global.u32 %r0, [%g0+128];
setp.ne.s32 %p1, %r0, 77;
@%p1 bra WAITS;
bra DONE;
TELLS: mov.u32 %r0, 1;
st.global.u32 [%g0+128], 77;
DONE:
`} {
		k := compile(t, program(1, "setp.eq.u32 %p0, %t, 9;\n@%p0 bra TELLS;\nbra WAITS;\n"+way+result("%r0")))
		for seed := range uint64(5) {
			out := memory[uint32](33)
			if err := launch(k, Launch{Grid: 1, Block: 32, Seed: seed}, rangeOf(out)); err != nil {
				t.Fatal(err)
			}
			same32(t, way, out[:32], func(i int) uint32 {
				if i == 9 {
					return 1
				}
				return 77
			})
		}
	}
}

// twice has a function that leaves by three returns, and one that calls it.
const twice = `
.func (.param .b32 result) far(.param .b32 far_0, .param .b32 far_1);
.func (.param .b32 result) far(.param .b32 far_0, .param .b32 far_1)
{
.reg .b32 %r<8>; .reg .pred %p<4>;
ld.param.u32 %r0, [far_0];
ld.param.u32 %r1, [far_1];
setp.gt.s32 %p0, %r0, 10;
@%p0 bra LARGE;
setp.eq.s32 %p1, %r0, 4;
st.param.b32 [result+0], 1000;
@%p1 ret;
mul.lo.s32 %r2, %r0, %r1;
st.param.b32 [result+0], %r2;
ret;
LARGE: add.s32 %r2, %r0, %r1;
st.param.b32 [result+0], %r2;
}
.func (.param .align 8 .b8 pair[16]) both(.param .b32 both_0)
{
.reg .b32 %r<8>; .reg .b64 %rd<4>;
ld.param.u32 %r0, [both_0];
{ .param .b32 x; .param .b32 y; .param .b32 z;
st.param.b32 [x+0], %r0;
st.param.b32 [y], 3;
call.uni (z), far, (x, y);
ld.param.b32 %r1, [z+0]; }
cvt.u64.u32 %rd0, %r1;
st.param.b64 [pair+8], %rd0;
cvt.u64.u32 %rd0, %r0;
st.param.b64 [pair], %rd0;
ret;
}
.visible .entry`

func TestCalls(t *testing.T) {
	body := `and.b32 %r0, %t, 3;
mov.u32 %r3, 0;
setp.eq.s32 %p0, %r0, 2;
@%p0 bra OTHER;
{ .param .b32 p0; .param .b32 p1; .param .b32 back;
st.param.b32 [p0], %t;
st.param.b32 [p1], 7;
call (back), far, (p0, p1);
ld.param.u32 %r3, [back]; }
bra DONE;
OTHER:
{ .param .b32 p0; .param .align 8 .b8 back[16];
st.param.b32 [p0], %t;
call.uni (back), both, (p0);
ld.param.v2.u64 {%rd0, %rd1}, [back];
cvt.u32.u64 %r3, %rd1;
cvt.u32.u64 %r4, %rd0;
shl.b32 %r4, %r4, 16;
or.b32 %r3, %r3, %r4; }
DONE:
` + result("%r3")
	text := strings.Replace(program(1, body), ".visible .entry", twice, 1)
	far := func(x, y int) uint32 {
		switch {
		case x > 10:
			return uint32(x + y)
		case x == 4:
			return 1000
		}
		return uint32(x * y)
	}
	for seed := range uint64(8) {
		same32(t, "calls", resultsOf(t, Launch{Block: 64, Seed: seed}, text), func(i int) uint32 {
			if i&3 == 2 {
				return far(i, 3) | uint32(i)<<16
			}
			return far(i, 7)
		})
	}
}

// Threads that have ended take part in nothing any more; exit ends them within a call, too.
func TestEnded(t *testing.T) {
	function := `
.func last(.param .b32 last_0)
{
.reg .b32 %r<2>; .reg .pred %p<2>;
ld.param.u32 %r0, [last_0];
setp.lt.u32 %p0, %r0, 5;
@%p0 exit;
}
.visible .entry`
	body := "mov.u32 %r0, 3;\n" + result("%r0") + `setp.gt.u32 %p0, %t, 20;
@%p0 ret;
{ .param .b32 p0;
st.param.b32 [p0], %t;
call last, (p0); }
bar.warp.sync -1;
vote.sync.ballot.b32 %r0, %p0, -1;
redux.sync.add.s32 %r0, %t, -1;
` + result("%r0")
	got := resultsOf(t, Launch{Block: 32}, strings.Replace(program(1, body), ".visible .entry", function, 1))
	same32(t, "ended", got, func(i int) uint32 {
		if i < 5 || i > 20 {
			return 3
		}
		return (5 + 20) * 16 / 2
	})
}

func TestCallErrors(t *testing.T) {
	for _, c := range []struct{ functions, body, says string }{
		{".func f() { call f; }", "call f;", "calls itself"},
		{".func f(); .func g() { call f; } .func f() { call g; }", "call f;", "calls itself"},
		{".func f();", "call f;", "no function f"},
		{"", "call k;", "no function k"},
		{".func f(.param .b32 x) { }", "call f;", "0 parameters"},
		{".func f(.param .b32 x) { }", "call f, (%r0);", "%r0 is no parameter"},
		{".func f() { }", "call (%r0), f;", "0 parameters and 1 results"},
		{".func f() { }", "call (f);", "no function"},
	} {
		m, err := Parse(strings.Replace(program(1, c.body), ".visible", c.functions+"\n.visible", 1))
		if err == nil {
			_, err = m.Kernel("k")
		}
		fails(t, c.functions+c.body, err, c.says)
	}
	fails(t, "five calls deep", launch(compile(t, strings.Replace(program(1, "call f4;"), ".visible",
		".func f0() { }\n.func f1() { call f0; }\n.func f2() { call f1; }\n.func f3() { call f2; }\n.func f4() { call f3; }\n.visible", 1)),
		Launch{Grid: 1, Block: 32}, rangeOf(memory[uint32](1))), "calls within calls")
}

func TestBadLaunch(t *testing.T) {
	k := compile(t, program(0, ""))
	for _, l := range []Launch{
		{}, {Grid: 1}, {Block: 32}, {Grid: -1, Block: 32}, {Grid: 1, Block: 33}, {Grid: 1, Block: 1056}, {Grid: 1, Block: -32},
		{Grid: 3, Block: 32, Cluster: 2}, {Grid: 2, Block: 32, Cluster: -1}, {Grid: 1, Block: 32, Shared: -1},
		{Grid: 1, Block: 32, Shared: 1 << 30}, {Grid: 1, Block: 32, Params: make([]byte, 8)}, {Grid: 1, Block: 32, Resident: -1}, {Grid: 1, Block: 32, Most: -1},
	} {
		fails(t, fmt.Sprintf("%+v", l), k.Run(l, nil), "ptx: k")
	}
	if err := k.Run(Launch{Grid: 4, Block: 1024, Cluster: 2, Resident: 1}, nil); err != nil {
		t.Error(err)
	}
	if _, err := new(Module).Kernel("k"); err == nil {
		t.Error("an entry of nothing")
	}
	if n := compile(t, program(3, "")).ParamBytes(); n != 24 {
		t.Errorf("%d bytes of parameters, want 24", n)
	}
}

func TestNoEnd(t *testing.T) {
	bodyFails(t, Launch{Most: 10000}, "LOOP: add.s32 %r0, %r0, 1;\nst.global.u32 [%g0], %r0;\nbra LOOP;", "no end", "threads ffffffff")
	bodyFails(t, Launch{}, "LOOP: ld.volatile.global.u32 %r0, [%g0];\nsetp.eq.s32 %p0, %r0, 0;\n@%p0 bra LOOP;", "all threads wait", "line ")
	bodyFails(t, Launch{}, "setp.eq.u32 %p0, %t, 3;\n@%p0 trap;", "a trap", "block 0 of 1, warp 0, line ", "@ %p0 trap;")
}

// sums adds up what blocks have, one after the other by tickets, and by the last block.
const sums = `.reg .b32 s;
mov.u64 %rd0, memory;
cvt.u32.u64 s, %rd0;
shl.b32 %r1, %t, 2;
add.s32 %r1, s, %r1;
mul.lo.s32 %r0, %i, %i;
st.shared.u32 [%r1], %r0;
bar.sync 0;
mov.u32 %r2, 32;
HALF:
setp.ge.u32 %p0, %t, %r2;
@%p0 bra SKIP;
shl.b32 %r3, %r2, 2;
add.s32 %r3, %r1, %r3;
ld.shared.u32 %r4, [%r1];
ld.shared.u32 %r5, [%r3];
add.s32 %r4, %r4, %r5;
st.shared.u32 [%r1], %r4;
SKIP:
bar.sync 0;
shr.u32 %r2, %r2, 1;
setp.ne.s32 %p1, %r2, 0;
@%p1 bra HALF;
setp.ne.s32 %p2, %t, 0;
@%p2 ret;
ld.shared.u32 %r0, [s];
red.relaxed.gpu.global.add.u32 [%g1], %r0;
mov.u32 %r7, %nctaid.x;
add.s32 %r7, %r7, -1;
atom.inc.acq_rel.gpu.global.u32 %r6, [%g1+4], %r7;
setp.ne.s32 %p3, %r6, %r7;
@%p3 ret;
ld.relaxed.gpu.global.u32 %r0, [%g1];
st.global.u32 [%g0], %r0;
`

func TestSeeds(t *testing.T) {
	k := compile(t, program(2, sums))
	rng := reftest.Rand(t)
	for range 20 {
		l := Launch{Grid: 1 + rng.IntN(9), Block: 64, Shared: 256, Seed: rng.Uint64()}
		l.Resident = rng.IntN(l.Grid + 1)
		out, counters := memory[uint32](1), memory[uint32](2)
		if err := launch(k, l, rangeOf(out), rangeOf(counters)); err != nil {
			t.Fatal(err)
		}
		n := uint32(l.Grid * l.Block)
		if want := (n - 1) * n * (2*n - 1) / 6; out[0] != want || counters[1] != 0 {
			t.Fatalf("%+v: %d, want %d; %d", l, out[0], want, counters[1])
		}
	}
}

// Of those who write the same place without a barrier any one may be the last: warps,
// blocks, and lanes that go different ways.
func TestOrders(t *testing.T) {
	for what, body := range map[string]string{
		"warps":  "st.global.u32 [%g0], %t;",
		"blocks": "st.global.u32 [%g0], %b;",
		"lanes": `setp.lt.u32 %p0, %t, 16;
mov.u32 %r0, 1;
@%p0 bra LOW;
st.global.u32 [%g0], 1;
bra DONE;
LOW: st.global.u32 [%g0], 2;
DONE:`,
	} {
		k := compile(t, program(1, body))
		seen := map[uint32]bool{}
		for seed := range uint64(300) {
			out := memory[uint32](1)
			l := Launch{Grid: 2, Block: 64, Seed: seed}
			if what == "lanes" {
				l.Grid, l.Block = 1, 32
			}
			var again uint32
			for i := range 2 { // a seed is an order
				if err := launch(k, l, rangeOf(out)); err != nil {
					t.Fatal(err)
				}
				if i == 1 && out[0] != again {
					t.Fatalf("%s: seed %d: %d, and %d", what, seed, again, out[0])
				}
				again = out[0]
			}
			seen[out[0]] = true
		}
		if len(seen) < 2 {
			t.Errorf("%s: always %v", what, seen)
		}
	}
	// Blocks that do not run at once are after each other, in any order.
	k := compile(t, program(1, "bar.sync 0;\n"+sumsOrder))
	seen := map[uint32]bool{}
	for seed := range uint64(40) {
		out := memory[uint32](2)
		if err := launch(k, Launch{Grid: 3, Block: 32, Resident: 1, Seed: seed}, rangeOf(out)); err != nil {
			t.Fatal(err)
		}
		seen[out[0]] = true
	}
	if len(seen) != 6 {
		t.Errorf("%d orders of 3 blocks: %v", len(seen), seen)
	}
}

const sumsOrder = `setp.ne.s32 %p0, %t, 0;
@%p0 ret;
ld.global.u32 %r0, [%g0];
mad.lo.s32 %r0, %r0, 10, %b;
add.s32 %r0, %r0, 1;
st.global.u32 [%g0], %r0;`

// Warps that ask for more registers than their block has would wait for the others' forever.
func TestRegistersOfWarps(t *testing.T) {
	body := func(producer, consumers int) string {
		return fmt.Sprintf("setp.lt.u32 %%p0, %%t, 128;\n@%%p0 bra LESS;\nsetmaxnreg.inc.sync.aligned.u32 %d;\nbra END;\nLESS:\nsetmaxnreg.dec.sync.aligned.u32 %d;\nEND:\n", consumers, producer)
	}
	for _, most := range [][3]int{{24, 240, 384}, {32, 160, 512}, {40, 88, 768}} {
		if err := launch(compile(t, program(1, body(most[0], most[1]))), Launch{Grid: 2, Block: most[2]}, rangeOf(memory[uint32](64))); err != nil {
			t.Errorf("%v: %v", most, err)
		}
		bodyFails(t, Launch{Block: most[2]}, body(most[0]+8, most[1]), "registers more than there are", "")
	}
}
