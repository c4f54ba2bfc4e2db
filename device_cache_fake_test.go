//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention_test

import (
	"fmt"
	"os"
	"path/filepath"
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

func TestDeviceSequenceIODecodes(t *testing.T) {
	gpu, _ := la.FakeGPU(t)
	testSequenceIODecodes(t, place{}, place{gpu: gpu, there: true})
}

// TestDeviceExample runs the examples, which end the process if they are wrong.
func TestDeviceExample(t *testing.T) {
	for name, x := range map[string]struct {
		run  func()
		want string
	}{
		"OpenGPU":    {ExampleOpenGPU, "(1, 256) 3 GPU 0 (Fake 0)\n"},
		"GPU_Record": {ExampleGPU_Record, "(1, 64) 4\n"},
	} {
		t.Run(name, func(t *testing.T) {
			la.FakeGPU(t)
			if got := printed(t, x.run); got != x.want {
				t.Errorf("it prints %q, want %q", got, x.want)
			}
		})
	}
}

// printed is what f writes to standard output.
func printed(t *testing.T, f func()) string {
	file, err := os.Create(filepath.Join(t.TempDir(), "output"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	defer func(stdout *os.File) { os.Stdout = stdout }(os.Stdout)
	os.Stdout = file
	f()
	text, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
