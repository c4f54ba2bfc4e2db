//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention_test

import (
	"fmt"
	"testing"

	la "gorgonia.org/leanattention"
)

// TestDeviceCachedAttention runs the tests of CachedAttention on caches that are
// on a GPU: what is computed there is the CPU's work, what is around it is not.
func TestDeviceCachedAttention(t *testing.T) {
	for _, c := range []struct {
		name string
		test func(*testing.T, place)
		host bool // with operands in host memory too
	}{
		{"Mixed", testCachedAttention, false}, // takes turns by itself
		{"Long", testCachedAttentionLong, false},
		{"Rerun", func(t *testing.T, at place) { testCachedAttentionRerun(t, at, 3) }, true},
		{"Poison", testCachedAttentionPoison, true},
		{"Stores", testCachedAttentionStores, true},
	} {
		for _, there := range []bool{true, false} {
			if !there && !c.host {
				continue
			}
			t.Run(fmt.Sprintf("%s there %v", c.name, there), func(t *testing.T) {
				gpu, _ := la.FakeGPU(t)
				c.test(t, place{gpu: gpu, there: there})
			})
		}
	}
}

func TestDeviceLayersDiffer(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	testLayersDiffer(t, place{gpu: gpu})
	testLayersDiffer(t, place{gpu: gpu, there: true})
}

func TestDeviceLayerTwice(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	testLayerTwice(t, gpu)
}

// TestDeviceExample runs the example, which ends the process if it is wrong.
func TestDeviceExample(t *testing.T) {
	la.FakeGPU(t)
	ExampleOpenGPU()
}
