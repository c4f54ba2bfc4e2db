//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import "testing"

func TestFakeAcceptance(t *testing.T) {
	for _, f := range fakes[:2] {
		t.Run(f.name, func(t *testing.T) {
			m, _, _ := fakeGPU(t, f.capability, f.sms, f.shared)
			testAcceptance(t, m, fewer(400000))
		})
	}
}
