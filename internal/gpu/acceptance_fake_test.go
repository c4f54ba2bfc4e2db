//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import "testing"

func TestFakeAcceptance(t *testing.T) {
	most, on := 400000, fakes[:2]
	if raceEnabled {
		most, on = 120000, fakes[:1]
	}
	for _, f := range on {
		t.Run(f.name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.capability, f.sms, f.shared)
			testAcceptance(t, m, most)
		})
	}
}
