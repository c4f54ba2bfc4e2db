package layers

import (
	"errors"
	"testing"

	"gorgonia.org/leanattention/internal/gpu/attention"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/kernels"
)

var (
	noError   = enginetest.NoError
	wantError = enginetest.WantError
	isError   = enginetest.IsError
)

// machine is where a test's layers run, with attention between them.
type machine struct {
	*enginetest.Device
	engine *attention.Engine
}

func realGPU(t testing.TB) *machine { return machineOf(t, enginetest.Real(t)) }

func machineOf(t testing.TB, d *enginetest.Device) *machine {
	t.Helper()
	e, err := attention.New(d.Dev)
	if errors.Is(err, kernels.ErrNoImage) {
		t.Skipf("no kernels: %v", err)
	}
	noError(t, err)
	return &machine{Device: d, engine: e}
}
