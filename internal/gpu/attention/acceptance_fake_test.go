//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package attention

import (
	"testing"

	"gorgonia.org/leanattention/internal/gpu/testgpu"
	"gorgonia.org/leanattention/internal/reftest"
)

func TestFakeAcceptance(t *testing.T) {
	most, on := reftest.Cases(t, 150000, 400000), testgpu.Fakes[:2]
	if reftest.RaceEnabled {
		most, on = 120000, testgpu.Fakes[:1]
	}
	for _, f := range on {
		t.Run(f.Name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.Capability, f.SMs, f.Shared)
			testAcceptance(t, m, most)
		})
	}
}
