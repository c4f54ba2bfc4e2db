//go:build cuda

package leanattention_test

import (
	"testing"

	la "gorgonia.org/leanattention"

	"gorgonia.org/tensor"
)

// TestMachineEightRefused: caches of 8 bits on the GPU of Gorgonia's machine are refused by name.
func TestMachineEightRefused(t *testing.T) {
	for kind := range eightKinds {
		config := eightCache(kind)
		config.Pages, config.Device = 4, la.MachineGPU()
		if !config.ValuesInKeys {
			config.HeadDim, config.ValueDim = 64, 64
		}
		_, err := la.NewCache(config)
		text := map[tensor.Dtype]string{la.E4M3: "e4m3 with", tensor.Int8: "int8 with", la.Q4: "mixed keys of q4"}[config.DType]
		wantError(t, err, la.ErrUnsupported, "NewCache", text)
	}
}
