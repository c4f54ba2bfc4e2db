package gpu

import (
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/kernels"
)

// Image is where modules come from. It is a variable for tests.
var Image = kernels.Image

// Module is the module of a unit on a device, which is loaded once.
func Module(dev *cuda.Device, unit string) (*cuda.Module, error) {
	return dev.Module(unit, func() ([]byte, error) { return Image(unit, dev.Info().Capability) })
}

// WithShared returns a kernel whose thread blocks may have all shared memory that the device has for a block. The kernel has no static
// shared memory.
func WithShared(m *cuda.Module, name string) (*cuda.Function, error) {
	f, err := m.Function(name)
	if err != nil {
		return nil, err
	}
	return f, f.SetDynamicShared(m.Device().Info().SharedPerBlockMost)
}
