//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention_test

import (
	"testing"

	la "gorgonia.org/leanattention"
)

func TestDeviceAttend(t *testing.T) {
	random := 60
	if raceEnabled {
		random = 10
	}
	for name, test := range map[string]func(*testing.T, place){
		"Cases":      testDeviceAttend,
		"Random":     func(t *testing.T, at place) { testDeviceAttendRandom(t, at, random) },
		"Recurrence": testDeviceRecurrence,
		"Repeats":    func(t *testing.T, at place) { testDeviceAttendRepeats(t, at, 3) },
		"HugeScores": testDeviceHugeScores,
	} {
		t.Run(name, func(t *testing.T) {
			gpu, _ := la.FakeGPU(t)
			test(t, place{gpu: gpu})
		})
	}
	t.Run("Errors", func(t *testing.T) {
		gpu, _ := la.FakeGPU(t)
		for _, ordinal := range []int{0, 1} {
			other, err := la.OpenGPU(ordinal)
			if err != nil {
				t.Fatal(err)
			}
			testDeviceAttendErrors(t, gpu, other)
			if err := other.Close(); err != nil {
				t.Error(err)
			}
		}
	})
}
