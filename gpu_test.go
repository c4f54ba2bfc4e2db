package leanattention_test

import (
	"fmt"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/gputest"
)

// The tests below run where there is a GPU. With -run 'GPU|Device' they and
// those on the fake driver are all there is.

func TestGPUDevice(t *testing.T) {
	gpu := gputest.Open(t)
	for name, test := range deviceTests(100_000) {
		t.Run(name, func(t *testing.T) { test(t, gpu) })
	}
}

func TestGPUAttend(t *testing.T) {
	gpu := gputest.Open(t)
	at := place{gpu: gpu, real: true}
	t.Run("Cases", func(t *testing.T) { testDeviceAttend(t, at) })
	t.Run("Random", func(t *testing.T) { testDeviceAttendRandom(t, at, 300) })
	t.Run("Repeats", func(t *testing.T) { testDeviceAttendRepeats(t, at, 100) })
	t.Run("HugeScores", func(t *testing.T) { testDeviceHugeScores(t, at) })
	t.Run("Recurrence", func(t *testing.T) { testDeviceRecurrence(t, at) })
	t.Run("Errors", func(t *testing.T) {
		again, err := la.OpenGPU(0)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		testDeviceAttendErrors(t, gpu, again)
	})
}

func TestGPUSequenceIO(t *testing.T) {
	testSequenceIODecodes(t, place{}, place{gpu: gputest.Open(t), real: true, there: true})
}

func TestGPUCachedAttention(t *testing.T) {
	gpu := gputest.Open(t)
	for _, c := range []struct {
		name string
		test func(*testing.T, place)
	}{
		{"Mixed", testCachedAttention}, // takes turns by itself
		{"Long", testCachedAttentionLong},
		{"Rerun", func(t *testing.T, at place) { testCachedAttentionRerun(t, at, 100) }},
		{"Poison", testCachedAttentionPoison},
		{"Stores", testCachedAttentionStores},
	} {
		for _, there := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s there %v", c.name, there), func(t *testing.T) {
				c.test(t, place{gpu: gpu, real: true, there: there})
			})
		}
	}
}
