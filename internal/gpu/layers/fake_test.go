//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// fakeGPU is a machine without a GPU, whose launches do nothing.
func fakeGPU(t testing.TB, capability, sms, shared int) (*machine, *fakedriver.Library) {
	t.Helper()
	d, lib := enginetest.Fake(t, capability, sms, shared, func(enginetest.Launch) {})
	s := lib.State()
	s.Argument("linear_", int(unsafe.Sizeof(linearParams{})))
	s.Argument("batch_", int(unsafe.Sizeof(skinnyParams{})))
	s.Argument("matrix_operands", int(unsafe.Sizeof(operandParams{})))
	s.Argument("matrix_", int(unsafe.Sizeof(gemmParams{})))
	s.Argument("gemm_", int(unsafe.Sizeof(gemmParams{})))
	s.Argument("megakernel_", int(unsafe.Sizeof(decodeLaunch{})))
	s.Argument("sample_", int(unsafe.Sizeof(sampleParams{})))
	s.Argument("lean_", 8) // and more, which nobody looks at
	m := machineOf(t, d)
	m.engine.Eager = true
	return m, lib
}
