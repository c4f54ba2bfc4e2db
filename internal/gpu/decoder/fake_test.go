//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package decoder

import (
	"math/rand/v2"
	"strings"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// fakeGPU is a machine without a GPU, and what does the work of its kernels that choose tokens.
func fakeGPU(t testing.TB, capability, sms, shared int) (*machine, *fakedriver.Library, *sampleTwin) {
	t.Helper()
	k := &sampleTwin{t: t, rng: reftest.Rand(t), capability: capability}
	d, lib := testgpu.Fake(t, capability, sms, shared, k.run)
	s := lib.State()
	s.Argument("linear_", int(unsafe.Sizeof(linearParams{})))
	s.Argument("batch_", int(unsafe.Sizeof(skinnyParams{})))
	s.Argument("matrix_operands", int(unsafe.Sizeof(operandParams{})))
	s.Argument("matrix_", int(unsafe.Sizeof(gemmParams{})))
	s.Argument("gemm_", int(unsafe.Sizeof(gemmParams{})))
	s.Argument("chain_", int(unsafe.Sizeof(decodeLaunch{})))
	s.Argument("sample_", int(unsafe.Sizeof(sampleParams{})))
	s.Argument("lean_", 8) // and more, which nobody looks at
	m := machineOf(t, d)
	m.engine.Eager = true
	return m, lib, k
}

// sampleTwin does what the kernels do that choose tokens, and complains where one would go wrong.
type sampleTwin struct {
	t          testing.TB
	rng        *rand.Rand
	capability int
}

func (k *sampleTwin) run(l testgpu.Launch) {
	k.t.Helper()
	switch {
	case l.Overlap != (k.capability >= 90):
		k.t.Errorf("%s: overlaps: %v", l.Kernel, l.Overlap)
	case !strings.HasPrefix(l.Kernel, "sample_"):
		k.t.Fatalf("nobody does the work of %s", l.Kernel)
	}
	k.sample(&l)
}
