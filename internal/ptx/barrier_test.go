package ptx

import (
	"strconv"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// Numbers go round a ring of warps, by barriers of two warps each: who writes
// arrives, who reads waits.
func TestProducersConsumers(t *testing.T) {
	body := `mov.u64 %rd0, memory;
cvt.u32.u64 %r10, %rd0;
and.b32 %r11, %t, 31;
mad.lo.s32 %r12, %r11, 4, %r10;
setp.lt.u32 %p0, %t, 32;
mov.u32 %r1, 0;
mov.u32 %r0, 0;
@%p0 bra CONSUMER;
PRODUCER:
bar.sync 2, 64;
mad.lo.s32 %r2, %r1, 100, %r11;
st.shared.u32 [%r12], %r2;
bar.arrive 1, 64;
add.s32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, 20;
@%p1 bra PRODUCER;
bra DONE;
CONSUMER:
bar.arrive 2, 64;
bar.sync 1, 64;
xor.b32 %r3, %r12, 124;
ld.shared.u32 %r2, [%r3];
add.s32 %r0, %r0, %r2;
add.s32 %r1, %r1, 1;
setp.lt.u32 %p1, %r1, 20;
@%p1 bra CONSUMER;
DONE:
`
	for seed := range uint64(10) {
		got := results(t, Launch{Grid: 2, Block: 64, Shared: 128, Seed: seed}, body+result("%r0"))
		same32(t, "consumed", got, func(i int) uint32 {
			if i%64 >= 32 {
				return 0
			}
			return uint32(20*(i%64^31) + 19*20/2*100)
		})
	}
}

// The third warp does not take part; the barrier is of a register.
func TestBarrierOfSome(t *testing.T) {
	body := `setp.ge.u32 %p0, %t, 64;
mov.u32 %r0, 5;
mov.u32 %r9, 15;
mov.u32 %r8, 64;
@%p0 bra DONE;
shl.b32 %r1, %t, 2;
mov.u64 %rd0, memory;
cvt.u32.u64 %r2, %rd0;
add.s32 %r1, %r1, %r2;
st.shared.u32 [%r1], %t;
bar.sync %r9, %r8;
xor.b32 %r1, %r1, 128;
ld.shared.u32 %r0, [%r1];
DONE:
`
	for seed := range uint64(10) {
		got := results(t, Launch{Block: 96, Shared: 256, Seed: seed}, body+result("%r0"))
		same32(t, "some", got, func(i int) uint32 {
			if i >= 64 {
				return 5
			}
			return uint32(i ^ 32)
		})
	}
}

// Threads that have ended are waited for no more, when they end before the others
// arrive or after.
func TestBarriersOfEnded(t *testing.T) {
	for n, sync := range []string{"bar.sync 3;\n", "barrier.sync 3;\n", clusterSync, "bar.sync 3;\n", clusterSync} {
		most := 40
		if n > 2 { // whole warps
			most = 32
		}
		body := `mov.u32 %r0, 1;
` + result("%r0") + `
setp.ge.u32 %p0, %t, ` + strconv.Itoa(most) + `;
@%p0 ret;
` + sync + `
sub.s32 %r5, %i, %t;
mad.wide.u32 %rd5, %r5, 4, %g0;
ld.global.u32 %r0, [%rd5+160];
add.s32 %r0, %r0, 1;
` + sync + result("%r0")
		for seed := range uint64(20) {
			got := results(t, Launch{Grid: 2, Cluster: 2, Block: 64, Seed: seed}, body)
			same32(t, sync, got, func(i int) uint32 {
				if i%64 >= most {
					return 1
				}
				return 2
			})
		}
	}
	// Who has arrived before it ends counts once.
	body := "barrier.cluster.arrive.relaxed.aligned;\nsetp.ge.u32 %p0, %t, 32;\n@%p0 ret;\nbarrier.cluster.wait.acquire.aligned;\n" + clusterSync + clusterSync + "mov.u32 %r0, 4;\n" + result("%r0")
	for seed := range uint64(20) {
		got := results(t, Launch{Grid: 4, Cluster: 2, Block: 64, Seed: seed}, body)
		same32(t, "arrived and ended", got, func(i int) uint32 {
			if i%64 >= 32 {
				return 0xdeadbeef
			}
			return 4
		})
	}
}

// Between arriving and waiting others may go on by a phase, but not by two.
func TestClusterPhases(t *testing.T) {
	body := `mov.u32 %r0, 0;
mov.u32 %r1, 0;
setp.eq.u32 %p1, %t, 0;
LOOP:
@%p1 red.relaxed.gpu.global.add.u32 [%g1], 1;
barrier.cluster.arrive.release.aligned;
barrier.cluster.wait.acquire.aligned;
ld.relaxed.gpu.global.u32 %r2, [%g1];
shr.u32 %r3, %r1, 0;
mad.lo.s32 %r3, %r3, 3, 3;
sub.s32 %r2, %r2, %r3;
setp.gt.u32 %p0, %r2, 3;
@%p0 trap;
add.s32 %r1, %r1, 1;
setp.lt.u32 %p0, %r1, 10;
@%p0 bra LOOP;
` + result("%r1")
	for seed := range uint64(5) {
		out, n := memory[uint32](3*64), memory[uint32](1)
		if err := launch(compile(t, program(2, body)), Launch{Grid: 3, Cluster: 3, Block: 64, Seed: seed}, rangeOf(out), rangeOf(n)); err != nil {
			t.Fatal(err)
		}
		if n[0] != 30 {
			t.Errorf("%d arrivals, want 30", n[0])
		}
	}
}

// wait is a thread's, for a phase of a barrier.
func wait(label, at, parity string) string {
	return label + ": mbarrier.try_wait.parity.shared::cta.b64 %p15, [" + at + "], " + parity + ";\n@%p15 bra " + label + "_DONE;\nbra " + label + ";\n" + label + "_DONE:\n"
}

// A ring of two places, of a warp that fills them and two that empty them.
func TestBarrierObjects(t *testing.T) {
	body := `.shared .align 8 .b64 full[2];
.shared .align 8 .b64 empty[2];
.shared .align 4 .b32 place[2];
setp.ne.s32 %p0, %t, 0;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [full], 1;
mbarrier.init.shared::cta.b64 [full+8], 1;
mbarrier.init.shared::cta.b64 [empty], 64;
mbarrier.init.shared::cta.b64 [empty+8], 64;
fence.mbarrier_init.release.cluster;
READY:
bar.sync 0;
mov.u64 %rd0, full;
cvt.u32.u64 %r10, %rd0;
mov.u64 %rd0, empty;
cvt.u32.u64 %r11, %rd0;
mov.u64 %rd0, place;
cvt.u32.u64 %r12, %rd0;
mov.u32 %r0, 0;
mov.u32 %r1, 0;
setp.lt.u32 %p1, %t, 32;
@%p1 bra CONSUMER;
setp.ge.u32 %p1, %t, 64;
@%p1 bra CONSUMER;
setp.ne.s32 %p1, %t, 45;
@%p1 bra DONE;
PRODUCER:
and.b32 %r2, %r1, 1;
shr.u32 %r3, %r1, 1;
and.b32 %r3, %r3, 1;
xor.b32 %r5, %r3, 1;
mad.lo.s32 %r4, %r2, 8, %r11;
` + wait("EMPTY", "%r4", "%r5") + `
mad.lo.s32 %r6, %r2, 4, %r12;
mad.lo.s32 %r7, %r1, %r1, 1;
st.shared.u32 [%r6], %r7;
mad.lo.s32 %r4, %r2, 8, %r10;
mbarrier.arrive.shared::cta.b64 _, [%r4];
add.s32 %r1, %r1, 1;
setp.lt.u32 %p2, %r1, 11;
@%p2 bra PRODUCER;
bra DONE;
CONSUMER:
and.b32 %r2, %r1, 1;
shr.u32 %r3, %r1, 1;
and.b32 %r3, %r3, 1;
mad.lo.s32 %r4, %r2, 8, %r10;
` + wait("FULL", "%r4", "%r3") + `
mad.lo.s32 %r6, %r2, 4, %r12;
ld.shared.u32 %r7, [%r6];
mad.lo.s32 %r0, %r0, 3, %r7;
mad.lo.s32 %r4, %r2, 8, %r11;
mbarrier.arrive.shared::cta.b64 _, [%r4];
add.s32 %r1, %r1, 1;
setp.lt.u32 %p2, %r1, 11;
@%p2 bra CONSUMER;
DONE:
`
	want := uint32(0)
	for i := range uint32(11) {
		want = want*3 + i*i + 1
	}
	rng := reftest.Rand(t)
	for range 10 {
		got := results(t, Launch{Grid: 2, Block: 96, Seed: rng.Uint64()}, body+result("%r0"))
		same32(t, "ring", got, func(i int) uint32 {
			if i%96/32 == 1 {
				return 0
			}
			return want
		})
	}
}

// What the parity of a phase says, before and after; arrivals count, and bytes that
// are expected keep a phase from its end.
func TestParities(t *testing.T) {
	const init = ".shared .b64 bar;\nsetp.ne.s32 %p0, %t, 0;\n@%p0 ret;\nmbarrier.init.shared::cta.b64 [bar], 3;\nmov.u32 %r0, 0;\n"
	probe := func(op string) string {
		s := ""
		for _, parity := range []string{"0", "1"} {
			s += "mbarrier." + op + ".parity.shared::cta.b64 %p1, [bar], " + parity + ";\nselp.b32 %r1, 1, 0, %p1;\nmad.lo.s32 %r0, %r0, 2, %r1;\n"
		}
		return s
	}
	const arrive = "mbarrier.arrive.shared::cta.b64 _, [bar];\n"
	const cluster = "mapa.shared::cluster.u32 %r5, %r4, 0;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];\n"
	const copied = "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];\n"
	for _, c := range []struct {
		body string
		want uint32
	}{
		{copied + copied + probe("try_wait"), 0b01},
		{copied + arrive + copied + probe("try_wait"), 0b10},
		{probe("try_wait"), 0b01},
		{arrive + arrive + probe("test_wait"), 0b01},
		{arrive + arrive + arrive + probe("try_wait"), 0b10},
		{"mbarrier.arrive.shared::cta.b64 _, [bar], 2;\n" + probe("try_wait") + arrive + probe("try_wait"), 0b0110},
		{strings.Repeat(arrive, 6) + probe("try_wait"), 0b01},
		{strings.Repeat(arrive, 9) + probe("test_wait"), 0b10},
		{"mov.u64 %rd0, bar;\ncvt.u32.u64 %r4, %rd0;\n" + strings.Repeat(cluster, 3) + probe("try_wait"), 0b10},
		{"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 16;\n" + arrive + arrive + probe("try_wait"), 0b01},
		{"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 0;\n" + arrive + arrive + probe("try_wait"), 0b10},
		{arrive + arrive + arrive + "mbarrier.init.shared::cta.b64 [bar], 1;\n" + probe("try_wait") + arrive + probe("try_wait"), 0b0110},
	} {
		got := results(t, Launch{Block: 32}, init+c.body+result("%r0"))
		if got[0] != c.want {
			t.Errorf("%s: %b, want %b", c.body, got[0], c.want)
		}
	}
	for body, says := range map[string]string{
		strings.Repeat(arrive, 2) + copied + "mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 8;\n" + strings.Repeat(copied, 3): "more arrivals than 3",
		strings.Repeat(arrive, 2) + "mbarrier.arrive.shared::cta.b64 _, [bar], 2;":                                                  "more arrivals than 3",
		"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 8;\n" + strings.Repeat(arrive, 3):                                      "more arrivals than 3",
		"mbarrier.arrive.shared::cta.b64 _, [bar], 0;":                                                                              "no arrival",
		"mbarrier.arrive.shared::cta.b64 _, [bar+-8];":                                                                              "8 bytes at",
		"mbarrier.arrive.shared::cta.b64 _, [memory];":                                                                              "there is no barrier at",
		"mbarrier.try_wait.parity.shared::cta.b64 %p1, [memory], 0;":                                                                "there is no barrier at",
		"mbarrier.init.shared::cta.b64 [bar+4], 1;":                                                                                 "8 bytes at",
		"mbarrier.init.shared::cta.b64 [bar], 0;":                                                                                   "a barrier of 0 arrivals",
		"mbarrier.init.shared::cta.b64 [bar], 1048576;":                                                                             "a barrier of 1048576 arrivals",
		wait("HERE", "bar", "0"):                                                                                                    "all threads wait",
		"mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 8;\n" + arrive + arrive + wait("W", "bar", "0"):                        "threads 00000001: line ",
	} {
		bodyFails(t, Launch{Shared: 64}, init+body, says, "line ")
	}
	for _, text := range []string{
		"mbarrier.init.b64 [%r0], 1;", "mbarrier.init.shared::cluster.b64 [%r0], 1;", "mbarrier.init.shared::cta.b64 [%r0];", "mbarrier.arrive.shared::cta.b64 %rd0, [%r0];", "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0];", "mbarrier.arrive.noComplete.shared::cta.b64 _, [%r0], 1;",
		"mbarrier.arrive_drop.shared::cta.b64 _, [%r0];", "mbarrier.try_wait.shared::cta.b64 %p0, [%r0], %rd0;", "mbarrier.inval.shared::cta.b64 [%r0];", "mbarrier;", "mbarrier.arrive.shared::cta.b64;", "mbarrier.try_wait.parity.shared::cta.b64 %p0, [%r0];",
		"bar;", "bar.sync;", "bar.arrive 1;", "bar.red.popc.u32 %r0, 1, %p0;", "barrier;", "barrier.cluster;", "barrier.cluster.sync;", "bar.sync %rd0;",
	} {
		compileFails(t, text, "")
	}
}

func TestBarrierErrors(t *testing.T) {
	for body, says := range map[string][]string{
		"bar.sync 16;": {"barrier 16"}, "bar.sync 0, 33;": {"a barrier of 33 threads"}, "bar.sync 0, 0;": {"a barrier of 0 threads"}, "bar.sync 0, 96;": {"a barrier of 96 threads"},
		"setp.lt.u32 %p0, %t, 5;\n@%p0 bar.sync 0;": {"only threads 0000001f of ffffffff take part"},
		// Half of them wait at another one.
		"setp.lt.u32 %p0, %t, 32;\n@%p0 bra OTHER;\nbar.sync 1;\nret;\nOTHER: bar.sync 2;":                                                    {"all threads wait", "ret;", "warp 1 threads ffffffff"},
		"bar.arrive 0, 64;\nbar.arrive 0, 64;\nbar.sync 1, 64;\nsetp.lt.u32 %p0, %t, 32;\n@%p0 bra L;\nbar.arrive 0, 64;\nL: bar.sync 0, 32;": {"64 threads at barrier 0 of 32"},
		"barrier.cluster.wait.acquire.aligned;":                                            {"no arrival before", "barrier.cluster.wait"},
		"barrier.cluster.arrive.release.aligned;\nbarrier.cluster.arrive.release.aligned;": {"a second arrival"},
		"setp.eq.u32 %p0, %b, 0;\nsetp.lt.u32 %p1, %t, 64;\n@%p0 bra L;\nbarrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\nret;\nL: bar.sync 1;\nLOOP: ld.volatile.global.u32 %r0, [%g0];\nbra LOOP;": {"all threads wait", "block 1 warp"},
	} {
		bodyFails(t, Launch{Grid: 2, Cluster: 2, Block: 64}, body, says...)
	}
}
