package devicetest

import (
	"errors"
	"os/exec"
	"runtime"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// An emulated GPU is there also for tests behind one that found no driver.
func TestEmulatedBehindNoDriver(t *testing.T) {
	if _, err := device.List(); !errors.Is(err, la.ErrNoDevice) {
		t.Skipf("this machine has a driver: %v", err)
	}
	if _, err := exec.LookPath("cc"); err != nil || runtime.GOOS != "linux" {
		t.Skip("the fake driver can't be built here")
	}
	t.Setenv("LEANATTENTION_GPU", "emulated")
	ran := false
	t.Run("behind", func(t *testing.T) {
		gpu := Open(t)
		ran = true
		x := tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{1, 2, 3}))
		d, err := gpu.Upload(x)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := d.Download(); err != nil || !back.Eq(x) {
			t.Errorf("%v: %v", back, err)
		}
	})
	if !ran {
		t.Error("the test was skipped")
	}
}
