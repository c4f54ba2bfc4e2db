package leanattention_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/graphtest"

	"gorgonia.org/tensor"
)

// TestQueueDownload: the values are those between the earlier and the later work, whatever the order of the waits. The failure of
// any driver call is an error.
func TestQueueDownload(t *testing.T) {
	deviceFaults(t, func(t *testing.T, gpu *device.GPU, lib *fakedriver.Library) error {
		there, err := gpu.NewTensor(tensor.Float32, 3)
		if err != nil {
			return err
		}
		var waits []func() (*tensor.Dense, error)
		for i := range 3 {
			x := float32(i)
			if err := there.CopyFrom(tensor.New(tensor.WithShape(3), tensor.WithBacking([]float32{x, x + 1, x + 2}))); err != nil {
				return err
			}
			wait, err := there.QueueDownload()
			if err != nil {
				return err
			}
			waits = append(waits, wait)
		}
		for _, i := range []int{2, 0, 1} {
			got, err := waits[i]()
			if err != nil {
				return err
			}
			if x := float32(i); !slices.Equal(got.Data().([]float32), []float32{x, x + 1, x + 2}) {
				t.Errorf("download %d: %v", i, got)
			}
		}
		return there.Free()
	})
}

// TestQueueDownloadRefused: what QueueDownload cannot do is refused, and a closed GPU ends the wait.
func TestQueueDownloadRefused(t *testing.T) {
	gpu, _ := la.FakeGPUs(t, 2)
	refused := func(name string, kind error, text string, err error) {
		t.Helper()
		if !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: %v", name, err)
		}
	}
	large, err := gpu.NewTensor(tensor.Float32, 1<<20+1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = large.QueueDownload()
	refused("a large tensor", la.ErrUnsupported, "4194308 bytes", err)
	parts, err := gpu.UploadSharded(f32(4, 6).tensor(), 1)
	if err != nil {
		t.Fatal(err)
	}
	_, err = parts.QueueDownload()
	refused("a shared tensor", la.ErrUnsupported, "2 GPUs", err)
	freed := graphtest.Upload(t, gpu, f32(3).tensor())
	if err := freed.Free(); err != nil {
		t.Fatal(err)
	}
	_, err = freed.QueueDownload()
	refused("a freed tensor", la.ErrClosed, "freed", err)

	whole, err := gpu.UploadReplicated(f32(4, 6).tensor())
	if err != nil {
		t.Fatal(err)
	}
	var waits []func() (*tensor.Dense, error)
	for range 2 {
		wait, err := whole.QueueDownload()
		if err != nil {
			t.Fatal(err)
		}
		waits = append(waits, wait)
	}
	got, err := waits[0]()
	if err != nil {
		t.Fatal(err)
	}
	if err := sameElements(got, f32(4, 6).tensor()); err != nil {
		t.Error(err)
	}
	if err := gpu.Close(); err != nil {
		t.Fatal(err)
	}
	_, err = waits[1]()
	refused("after Close", la.ErrClosed, "closed", err)
}
