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

// onPeers runs a body on several GPUs at once. Each has one memory of words; %g0 is its
// own, %g1, %g2... are those of the others in turn, and %r31 is its number.
func onPeers(t *testing.T, seed uint64, body string, block int, memories ...[]uint64) error {
	t.Helper()
	n := len(memories)
	k := compile(t, program(n+1, fmt.Sprintf("cvt.u32.u64 %%r31, %%g%d;\n", n)+body))
	return runOnPeers(k, seed, block, memories)
}

func runOnPeers(k *Kernel, seed uint64, block int, memories [][]uint64) error {
	var starts []Start
	for i := range memories {
		l := Launch{Grid: 1, Block: block, Seed: seed + uint64(i), Most: 1 << 22}
		var all Memory
		for j := range memories {
			m := memories[(i+j)%len(memories)]
			r := rangeOf(m)
			r.Peer = j > 0
			l.Params = binary.LittleEndian.AppendUint64(l.Params, r.Address)
			all = append(all, r)
		}
		l.Params = binary.LittleEndian.AppendUint64(l.Params, uint64(i))
		slices.SortFunc(all, func(a, b Range) int { return cmp.Compare(a.Address, b.Address) })
		starts = append(starts, Start{k, l, all})
	}
	return RunTogether(starts...)
}

func memories(gpus, words int) (all [][]uint64) {
	for range gpus {
		all = append(all, memory[uint64](words))
	}
	return all
}

// GPUs hand numbers round and round in tagged words: a word has what it is the turn of, and
// nothing orders it. In a ring one may be some turns ahead of the next: there are eight places.
func TestPeersTagged(t *testing.T) {
	rng := reftest.Rand(t)
	for gpus := 2; gpus <= 4; gpus++ {
		all := memories(gpus, 9*32)
		// Thread t sends the sum of what it has had and its GPU's number + t to the next GPU.
		if err := onPeers(t, rng.Uint64(), `
add.s32 %r1, %r31, %t;
mov.u32 %r2, 0;
TURN:
add.s32 %r2, %r2, 1;
and.b32 %r3, %r2, 7;
mad.lo.s32 %r3, %r3, 32, %t;
mul.wide.u32 %rd1, %r3, 8;
cvt.u64.u32 %rd2, %r2;
shl.b64 %rd2, %rd2, 32;
cvt.u64.u32 %rd3, %r1;
or.b64 %rd2, %rd2, %rd3;
add.s64 %rd4, %g1, %rd1;
st.relaxed.sys.global.u64 [%rd4], %rd2;
add.s64 %rd5, %g0, %rd1;
WAIT:
ld.relaxed.sys.global.u64 %rd6, [%rd5];
shr.u64 %rd7, %rd6, 32;
cvt.u32.u64 %r4, %rd7;
setp.ne.s32 %p0, %r4, %r2;
@%p0 bra WAIT;
cvt.u32.u64 %r5, %rd6;
add.s32 %r1, %r1, %r5;
add.s32 %r1, %r1, 1;
setp.lt.s32 %p1, %r2, 20;
@%p1 bra TURN;
add.s32 %r3, %t, 256;
mul.wide.u32 %rd1, %r3, 8;
add.s64 %rd5, %g0, %rd1;
cvt.u64.u32 %rd3, %r1;
st.global.u64 [%rd5], %rd3;
`, 32, all...); err != nil {
			t.Fatal(err)
		}
		want := make([]uint32, gpus)
		for thread := range uint32(32) {
			for i := range want {
				want[i] = uint32(i) + thread
			}
			for range 20 {
				next := make([]uint32, gpus)
				for i := range want {
					next[i] = want[i] + want[(i+gpus-1)%gpus] + 1
				}
				want = next
			}
			for i := range want {
				if got := uint32(all[i][256+thread]); got != want[i] {
					t.Fatalf("%d GPUs, GPU %d, thread %d: %d, want %d", gpus, i, thread, got, want[i])
				}
			}
		}
	}
}

// message is a block that stores numbers to the other GPU, then a flag, for which that one
// waits before it reads them.
const message = `
mul.wide.u32 %rd1, %t, 8;
add.s64 %rd2, %g1, %rd1;
cvt.u64.u32 %rd3, %t;
add.s64 %rd3, %rd3, 1000;
st.global.u64 [%rd2+64], %rd3;
bar.sync 0;
setp.ne.s32 %p0, %t, 0;
@%p0 bra SENT;
FENCE
FLAG
SENT:
LOOK:
ld.acquire.sys.global.u64 %rd5, [%g0];
setp.eq.s64 %p1, %rd5, 0;
@%p1 bra LOOK;
bar.sync 0;
add.s64 %rd2, %g0, %rd1;
ld.global.u64 %rd6, [%rd2+64];
st.global.u64 [%rd2+1024], %rd6;
`

func TestPeersFence(t *testing.T) {
	const relaxed = "mov.u64 %rd4, 1;\nst.relaxed.sys.global.u64 [%g1], %rd4;"
	for _, c := range []struct {
		fence, flag string
		orders      bool
	}{
		{"fence.acq_rel.sys;", relaxed, true},
		{"fence.sc.sys;", relaxed, true},
		{"membar.sys;", relaxed, true},
		{"", "mov.u64 %rd4, 1;\nst.release.sys.global.u64 [%g1], %rd4;", true},
		{"fence.acq_rel.sys;", "mov.u64 %rd4, 1;\nred.relaxed.sys.global.max.u64 [%g1], %rd4;", true},
		{"", "mov.u64 %rd4, 1;\nred.release.sys.global.max.u64 [%g1], %rd4;", true},
		{"", relaxed, false},
		{"fence.acq_rel.gpu;", relaxed, false},
		{"membar.gl;", relaxed, false},
		{"", "mov.u64 %rd4, 1;\nred.relaxed.sys.global.max.u64 [%g1], %rd4;", false},
	} {
		rng := reftest.Rand(t)
		wrong := 0
		body := strings.Replace(strings.Replace(message, "FENCE", c.fence, 1), "FLAG", c.flag, 1)
		for range 40 {
			all := memories(2, 256)
			if err := onPeers(t, rng.Uint64(), body, 64, all...); err != nil {
				t.Fatal(err)
			}
			for _, m := range all {
				for i, x := range m[128 : 128+64] {
					if x != 1000+uint64(i) {
						wrong++
					}
				}
				for i, x := range m[8 : 8+64] { // at the end all have arrived
					if x != 1000+uint64(i) {
						t.Errorf("%s %s: %d has not arrived", c.fence, c.flag, i)
					}
				}
			}
		}
		if c.orders != (wrong == 0) {
			t.Errorf("%q, %q: %d numbers were read before they had arrived", c.fence, c.flag, wrong)
		}
	}
}

// What has an order there has it in the system scope; stores to one address keep theirs, and
// the GPU that makes them sees them.
func TestPeersScope(t *testing.T) {
	for _, c := range []struct{ body, says string }{
		{"mov.u64 %rd1, 1;\nst.relaxed.gpu.global.u64 [%g1], %rd1;", "no .sys"},
		{"ld.acquire.gpu.global.u64 %rd1, [%g1];", "no .sys"},
		{"mov.u64 %rd1, 1;\nred.global.max.u64 [%g1], %rd1;", "no .sys"},
		{"mov.u64 %rd1, 1;\nst.relaxed.gpu.global.u64 [%g0], %rd1;", ""},
		{"mov.u64 %rd1, 1;\nst.volatile.global.u64 [%g1], %rd1;", ""},
		{"mov.u64 %rd1, 1;\nst.global.u64 [%g1+4096], %rd1;", "are in no buffer"},
		{"LOOK: ld.relaxed.sys.global.u64 %rd1, [%g0];\nsetp.eq.s64 %p0, %rd1, 0;\n@%p0 bra LOOK;", "all threads wait"},
	} {
		err := onPeers(t, 1, c.body, 32, memories(2, 64)...)
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) {
			t.Errorf("%s: %v, want %q", c.body, err, c.says)
		}
	}
	for seed := range uint64(50) {
		all := memories(2, 64)
		if err := onPeers(t, seed, `
mul.wide.u32 %rd1, %t, 8;
add.s64 %rd2, %g1, %rd1;
mov.u64 %rd3, 5;
st.global.u64 [%rd2], %rd3;
ld.global.u64 %rd4, [%rd2];
add.s64 %rd4, %rd4, 1;
st.global.u64 [%rd2], %rd4;
add.s64 %rd4, %rd4, 1;
st.global.v2.u32 [%rd2], {%t, %t};
st.global.u64 [%rd2], %rd4;
`, 32, all...); err != nil {
			t.Fatal(err)
		}
		for i, x := range all[1][:32] {
			if x != 7 {
				t.Fatalf("seed %d, thread %d: %d, want 7", seed, i, x)
			}
		}
	}
}

// Who waits for what never comes looks at the time: it goes on, also where nobody does anything else.
func TestPeersTime(t *testing.T) {
	all := memories(2, 64)
	if err := onPeers(t, 1, `
mov.u64 %rd1, %globaltimer;
LOOK:
ld.relaxed.sys.global.u64 %rd2, [%g0];
mov.u64 %rd3, %globaltimer;
sub.s64 %rd3, %rd3, %rd1;
mov.u64 %rd4, 10000000000;
setp.lt.u64 %p0, %rd3, %rd4;
@%p0 bra LOOK;
st.global.u64 [%g0+8], %rd3;
`, 32, all...); err != nil {
		t.Fatal(err)
	}
	for i, m := range all {
		if ns := m[1]; ns < 10e9 || ns > 20e9 {
			t.Errorf("GPU %d has waited for %d ns, not for 10 s", i, ns)
		}
	}
	compileFails(t, "mov.u32 %r0, %globaltimer;", "")
}
