package system

import (
	"testing"

	"gorgonia.org/leanattention/internal/cuda/fakedriver"
)

// Failing is Emulate for a test in which calls of the driver fail, which ends without LEANATTENTION_GPU=emulated.
func Failing(t testing.TB) *fakedriver.Library {
	t.Helper()
	lib := Emulate(t)
	if lib == nil {
		t.Skip("calls fail on demand on an emulated GPU only: LEANATTENTION_GPU=emulated")
	}
	return lib
}
