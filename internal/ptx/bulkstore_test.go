package ptx

import (
	"fmt"
	"testing"
)

// Bulk copies and additions to global memory: they read shared memory until a wait for reads, and have arrived after a wait for
// writes. Before these there may be what was there before, or not.
func TestBulkStores(t *testing.T) {
	for _, add := range []bool{false, true} {
		op := "cp.async.bulk.global.shared::cta.bulk_group"
		if add {
			op = "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32"
		}
		k := compile(t, program(2, fmt.Sprintf(`mov.u64 %%rd0, memory;
cvt.u32.u64 %%r1, %%rd0;
mad.lo.s32 %%r2, %%t, 4, %%r1;
cvt.rn.f32.u32 %%f0, %%t;
st.shared.f32 [%%r2], %%f0;
bar.sync 0;
setp.ne.s32 %%p0, %%t, 0;
@%%p0 bra END;
fence.proxy.async;
%s [%%g0], [%%r1], 128;
cp.async.bulk.commit_group;
ld.global.f32 %%f1, [%%g0+4];
cp.async.bulk.wait_group.read 0;
mov.f32 %%f0, 0f42C80000;
st.shared.f32 [%%r1+4], %%f0;
ld.global.f32 %%f2, [%%g0+4];
cp.async.bulk.wait_group 0;
st.global.f32 [%%g1], %%f1;
st.global.f32 [%%g1+4], %%f2;
END:
`, op)))
		late, later, done := 0, 0, 0
		for seed := range uint64(40) {
			out, saw := memory[float32](32), memory[float32](2)
			for i := range out {
				out[i] = 1000
			}
			if err := launch(k, Launch{Grid: 1, Block: 32, Shared: 128, Seed: seed}, rangeOf(out), rangeOf(saw)); err != nil {
				t.Fatal(err)
			}
			for i, x := range out {
				want := float32(i)
				if add {
					want += 1000
				}
				if x != want {
					t.Fatalf("add %v: number %d is %v, want %v", add, i, x, want)
				}
			}
			for i, x := range saw {
				switch {
				case x == out[1]:
					done++
				case x != 1000:
					t.Fatalf("%v, neither before nor after", x)
				case i == 0:
					late++
				default:
					later++
				}
			}
		}
		if late == 0 || later == 0 || done == 0 {
			t.Errorf("add %v: of 40 each, %d are late after the copy and %d after the wait for reads; %d are done", add, late, later, done)
		}
	}
	const at = "mov.u64 %rd0, memory;\ncvt.u32.u64 %r1, %rd0;\nsetp.ne.s32 %p0, %t, 0;\n@%p0 bra END;\n"
	const store = "cp.async.bulk.global.shared::cta.bulk_group "
	for body, says := range map[string]string{
		store + "[%g0], [%r1], 16;": "has not waited for",
		store + "[%g0], [%r1], 16;\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group 1;":      "has not waited for",
		store + "[%g0], [%r1], 16;\ncp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;": "has not waited for",
		store + "[%g0], [%r1], 24;":     "24 bytes from",
		store + "[%g0+8], [%r1], 16;":   "16 bytes from",
		store + "[%g0], [%r1+8], 16;":   "16 bytes from",
		store + "[%g0], [%r1+512], 16;": "of 512 bytes of shared memory",
		store + "[%g0+256], [%r1], 16;": "are in no buffer",
	} {
		bodyFails(t, Launch{Shared: 512}, at+body+"\nEND:\n", says, "line ")
	}
}
