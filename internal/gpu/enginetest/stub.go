//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package enginetest

import (
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
)

// Stub is a driver of one GPU whose kernels do nothing, for measurements that are only to run. When the test ends
// nothing may be left in it.
func Stub(t *testing.T, capability int32) *fakedriver.Library {
	t.Helper()
	lib := fakedriver.New(t)
	s := lib.State()
	s.Total, s.Major, s.Minor, s.SMs, s.Shared = 1<<32, capability/10, capability%10, 4, 232448
	s.Argument("append_rows", 32)
	s.Argument("lean_", 8)
	for _, family := range []string{"prefill_", "linear_", "matrix_", "batch_", "gemm_"} {
		s.Argument(family, 8)
	}
	s.Argument("read_ceiling", 32)
	s.Argument("read_pages", 72)
	t.Cleanup(func() {
		if lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d objects left in the driver, %d calls that would have crashed", lib.Live(), lib.Defects())
		}
	})
	return lib
}

// PrepareModules loads modules that have no kernels.
func PrepareModules(d *cuda.Device) error {
	for _, unit := range []string{"lean", "prefill", "ceiling", "decoder", "matrix", "gemm"} {
		if _, err := d.Module(unit, func() ([]byte, error) { return []byte("image"), nil }); err != nil {
			return err
		}
	}
	return nil
}
