package ptx

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"
)

// The PTX ISA's pseudo code of shfl.
func shuffled(mode string, lane, b, c int) (from int, ok bool) {
	segment := c >> 8 & 31
	maxLane := lane&segment | c&31&^segment
	minLane := lane & segment
	j := 0
	switch mode {
	case "up":
		j = lane - b&31
		ok = j >= maxLane
	case "down":
		j = lane + b&31
		ok = j <= maxLane
	case "bfly":
		j = lane ^ b&31
		ok = j <= maxLane
	case "idx":
		j = minLane | b&31&^segment
		ok = j <= maxLane
	}
	if !ok {
		j = lane
	}
	return j, ok
}

func TestShuffle(t *testing.T) {
	rng := reftest.Rand(t)
	for range 200 {
		mode := []string{"up", "down", "bfly", "idx"}[rng.IntN(4)]
		clamp := rng.IntN(1 << 13)
		switch rng.IntN(3) {
		case 0:
			clamp = map[bool]int{true: 0, false: 31}[mode == "up"]
		case 1: // segments of a power of two
			n := 1 << rng.IntN(6)
			clamp = (32-n)<<8 | map[bool]int{true: 0, false: 31}[mode == "up"]
		}
		same, by := rng.IntN(2) == 0, rng.IntN(64)
		body := fmt.Sprintf("mad.lo.s32 %%r1, %%t, 1000, 7;\nmov.u32 %%r2, %d;\n", by)
		if !same && mode == "idx" { // each lane has its own
			body += "mad.lo.s32 %r2, %t, 7, %r2;\n"
		}
		body += fmt.Sprintf("shfl.sync.%s.b32 %%r0|%%p0, %%r1, %%r2, %d, 0xffffffff;\nselp.b32 %%r3, 1, 0, %%p0;\nshl.b32 %%r3, %%r3, 31;\nor.b32 %%r0, %%r0, %%r3;\n", mode, clamp)
		got := results(t, Launch{Block: 32}, body+result("%r0"))
		same32(t, fmt.Sprintf("%s by %d, clamp %#x", mode, by, clamp), got, func(i int) uint32 {
			b := by
			if !same && mode == "idx" {
				b += i * 7
			}
			from, ok := shuffled(mode, i, b, clamp)
			return uint32(from*1000+7) | uint32(truth(ok))<<31
		})
	}
}

// parted has a mask for the lanes of each half, who go different ways, or do not.
func parted(apart bool, body string) string {
	if !apart {
		return "and.b32 %r10, %t, 31;\nsetp.lt.u32 %p8, %r10, 16;\nselp.b32 %r9, 0xffff, 0xffff0000, %p8;\n" + body
	}
	return "and.b32 %r10, %t, 31;\nsetp.lt.u32 %p8, %r10, 16;\n@%p8 bra LOW;\nmov.u32 %r9, 0xffff0000;\n" + body + "bra DONE;\nLOW: mov.u32 %r9, 0xffff;\n" + body + "DONE:\n"
}

func TestVotes(t *testing.T) {
	rng := reftest.Rand(t)
	for range 60 {
		mask, apart, seed := rng.Uint32()|rng.Uint32(), rng.IntN(2) == 0, rng.Uint64()
		if rng.IntN(3) == 0 {
			mask = []uint32{0, all, 0xffff, 0xffff0000}[rng.IntN(4)]
		}
		vote := fmt.Sprintf(`mov.u32 %%r1, %d;
shr.u32 %%r1, %%r1, %%t;
and.b32 %%r1, %%r1, 1;
setp.ne.s32 %%p0, %%r1, 0;
vote.sync.any.pred %%p1, %%p0, %%r9;
vote.sync.all.pred %%p2, %%p0, %%r9;
vote.sync.any.pred %%p3, !%%p0, %%r9;
vote.sync.all.pred %%p4, !%%p0, %%r9;
vote.sync.ballot.b32 %%r2, %%p0, %%r9;
vote.sync.ballot.b32 %%r3, !%%p0, %%r9;
selp.b32 %%r4, 1, 0, %%p1;
selp.b32 %%r5, 2, 0, %%p2;
or.b32 %%r4, %%r4, %%r5;
selp.b32 %%r5, 4, 0, %%p3;
or.b32 %%r4, %%r4, %%r5;
selp.b32 %%r5, 8, 0, %%p4;
or.b32 %%r4, %%r4, %%r5;
`, mask)
		for n, want := range []func(in, who uint32) uint32{
			func(in, who uint32) uint32 {
				return uint32(truth(in != 0) | truth(in == who)<<1 | truth(in != who)<<2 | truth(in == 0)<<3)
			},
			func(in, who uint32) uint32 { return in },
			func(in, who uint32) uint32 { return who &^ in },
		} {
			got := results(t, Launch{Block: 32, Seed: seed}, parted(apart, vote)+result([]string{"%r4", "%r2", "%r3"}[n]))
			same32(t, fmt.Sprintf("votes of %08x", mask), got, func(i int) uint32 {
				who := uint32(0xffff) << (i / 16 * 16)
				return want(mask&who, who)
			})
		}
	}
}

func TestReductions(t *testing.T) {
	rng := reftest.Rand(t)
	for name, f := range map[string]func(a, b uint32) uint32{
		"add.s32": func(a, b uint32) uint32 { return a + b }, "add.u32": func(a, b uint32) uint32 { return a + b },
		"and.b32": func(a, b uint32) uint32 { return a & b }, "or.b32": func(a, b uint32) uint32 { return a | b }, "xor.b32": func(a, b uint32) uint32 { return a ^ b },
		"min.s32": func(a, b uint32) uint32 { return uint32(min(int32(a), int32(b))) }, "max.s32": func(a, b uint32) uint32 { return uint32(max(int32(a), int32(b))) },
		"min.u32": func(a, b uint32) uint32 { return min(a, b) }, "max.u32": func(a, b uint32) uint32 { return max(a, b) },
	} {
		for _, apart := range []bool{false, true} {
			factor := rng.Uint32()
			body := parted(apart, fmt.Sprintf("mul.lo.s32 %%r1, %%r10, %d;\nredux.sync.%s %%r0, %%r1, %%r9;\n", factor, name))
			got := results(t, Launch{Block: 64}, body+result("%r0"))
			same32(t, name, got, func(i int) uint32 {
				from := i % 32 / 16 * 16
				x := uint32(from) * factor
				for l := from + 1; l < from+16; l++ {
					x = f(x, uint32(l)*factor)
				}
				return x
			})
		}
	}
}

// Lanes of a mask wait for each other, in whatever order they come; others do not matter.
func TestPartialMasks(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 30 {
		mask := rng.Uint32() | 1<<5
		body := fmt.Sprintf(`mov.u32 %%r1, 1;
shl.b32 %%r1, %%r1, %%t;
and.b32 %%r1, %%r1, %d;
mov.u32 %%r0, 0;
setp.eq.s32 %%p0, %%r1, 0;
@%%p0 bra DONE;
mov.u32 %%r3, 0;
LOOP: setp.ge.u32 %%p1, %%r3, %%t;
@%%p1 bra OUT;
add.s32 %%r3, %%r3, 3;
bra LOOP;
OUT:
shl.b32 %%r4, %%t, 2;
mov.u64 %%rd0, memory;
cvt.u32.u64 %%r5, %%rd0;
add.s32 %%r5, %%r5, %%r4;
st.shared.u32 [%%r5], %%t;
bar.warp.sync %d;
shfl.sync.idx.b32 %%r6, %%t, 5, 31, %d;
ld.shared.u32 %%r7, [memory+20];
add.s32 %%r6, %%r6, %%r7;
vote.sync.ballot.b32 %%r0, %%p1, %d;
add.s32 %%r0, %%r0, %%r6;
DONE:
`, mask, mask, mask, mask)
		got := results(t, Launch{Block: 32, Shared: 128, Seed: rng.Uint64()}, body+result("%r0"))
		same32(t, fmt.Sprintf("mask %08x", mask), got, func(i int) uint32 {
			if mask>>i&1 == 0 {
				return 0
			}
			return mask + 5 + 5
		})
	}
}

// Threads that have ended are waited for no more.
func TestEndedLanes(t *testing.T) {
	got := results(t, Launch{Block: 32}, "mov.u32 %r0, 9;\n"+result("%r0")+"setp.gt.u32 %p0, %t, 11;\n@%p0 exit;\nsetp.ge.u32 %p1, %t, 2;\nvote.sync.ballot.b32 %r0, %p1, -1;\n"+result("%r0"))
	same32(t, "ended", got, func(i int) uint32 {
		if i > 11 {
			return 9
		}
		return 0xffc
	})
}

// One of the threads that ask is told that it is, and all of them which one.
func TestElect(t *testing.T) {
	for _, mask := range []uint32{1 << 31, 1, 0xffffffff, 0x00ffff00, 0x80000001} {
		for _, d := range []string{"%r0", "_"} {
			body := fmt.Sprintf("mov.u32 %%r0, -1;\nmov.u32 %%r1, %d;\nshl.b32 %%r2, 1, %%t;\nand.b32 %%r2, %%r2, %%r1;\nsetp.eq.s32 %%p1, %%r2, 0;\nmov.u32 %%r3, 0;\n@%%p1 bra DONE;\nelect.sync %s|%%p0, %%r1;\nselp.b32 %%r3, 1, 0, %%p0;\nDONE:\n", int32(mask), d)
			leaders := results(t, Launch{Block: 32}, body+result("%r3"))
			which := results(t, Launch{Block: 32}, body+result("%r0"))
			leader := slices.Index(leaders, 1)
			if leader < 0 || mask>>leader&1 == 0 {
				t.Fatalf("of %#x: %v", mask, leaders)
			}
			for i := range leaders {
				want := ^uint32(0)
				if mask>>i&1 != 0 && d != "_" {
					want = uint32(leader)
				}
				if which[i] != want || (leaders[i] == 1) != (i == leader) {
					t.Errorf("of %#x: thread %d is told %d, and %#x: %d is the one", mask, i, leaders[i], which[i], leader)
				}
			}
		}
	}
}

func TestExchangeErrors(t *testing.T) {
	half := "setp.lt.u32 %p0, %t, 16;\nmov.u32 %r1, 0xffff0000;\n@%p0 bra LOW;\nbra DONE;\nLOW:\n"
	for _, op := range []string{"shfl.sync.idx.b32 %r0, %t, 0, 31, %r1;", "vote.sync.ballot.b32 %r0, %p0, %r1;", "redux.sync.add.s32 %r0, %t, %r1;", "bar.warp.sync %r1;", "elect.sync %r0|%p0, %r1;"} {
		bodyFails(t, Launch{}, half+op+"\nDONE:\nbar.warp.sync -1;", "not among ffff0000", strings.Fields(op)[0])
		// Some of them only.
		bodyFails(t, Launch{}, "setp.lt.u32 %p0, %t, 16;\nmov.u32 %r1, -1;\n@%p0 "+op, "only threads 0000ffff of ffffffff take part")
		// Another lane of the mask has a mask of its own.
		bodyFails(t, Launch{}, "setp.lt.u32 %p0, %t, 16;\nselp.b32 %r1, 0x0001ffff, 0xffff0000, %p0;\n"+op, "")
	}
	bodyFails(t, Launch{}, "setp.lt.u32 %p0, %t, 16;\n@!%p0 bra DONE;\nshfl.sync.bfly.b32 %r0, %t, 16, 31, 0xffff;\nDONE:", "thread 0 asks thread 16")
	// The others never come.
	bodyFails(t, Launch{}, "setp.eq.u32 %p0, %t, 31;\n@%p0 bra LOOP;\nbar.warp.sync -1;\nret;\nLOOP: ld.volatile.global.u32 %r0, [%g0];\nsetp.eq.s32 %p1, %r0, 0;\n@%p1 bra LOOP;", "all threads wait", "bar.warp.sync - 1;", "threads 7fffffff", "threads 80000000")
	for _, text := range []string{
		"shfl.sync.idx.b32 %r0, %r1, 0, 31;", "shfl.idx.b32 %r0, %r1, 0, 31;", "shfl.sync.rotate.b32 %r0, %r1, 0, 31, -1;", "shfl.sync;", "vote.sync.uni.pred %p0, %p1, -1;", "vote.sync.ballot.b32 %r0, %r1, -1;", "vote;",
		"redux.sync.div.s32 %r0, %r1, -1;", "redux.sync.min.b32 %r0, %r1, -1;", "redux.sync;", "match.any.sync.b32 %r0, %r1, -1;", "elect.sync %r0, -1;", "elect.sync %r0|%p0;", "elect %r0|%p0, -1;", "bar.warp.sync;", "vote.sync.any.pred %p0, %p1, 0fz;",
	} {
		compileFails(t, text, "")
	}
}
