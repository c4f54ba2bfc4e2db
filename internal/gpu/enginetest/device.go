package enginetest

import (
	"errors"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/reftest"
)

// Device is what tests run on: a GPU, an emulated one, or a driver whose launches do nothing.
type Device struct {
	Dev    *cuda.Device
	Stream *cuda.Stream
	// Settle waits until what was queued is done.
	Settle func(t testing.TB)
	// Capture makes a graph, and returns what launches it.
	Capture func(t testing.TB, f func() error) func() error

	emulated bool
}

// Few reports whether a test runs some of its cases, drawn at random: the emulator is slow.
func (d *Device) Few(t testing.TB) bool { return d.emulated && !reftest.Every(t) }

// Real is the machine's first GPU, or the end of the test.
func Real(t testing.TB) *Device {
	t.Helper()
	drv, err := cuda.Load()
	if errors.Is(err, cuda.ErrNoDevice) {
		t.Skipf("no GPU: %v", err)
	}
	NoError(t, err)
	dev, err := drv.Open(0)
	if errors.Is(err, cuda.ErrNoDevice) {
		t.Skipf("no GPU that will do: %v", err)
	}
	NoError(t, err)
	t.Cleanup(func() { NoError(t, dev.Close()) })
	return deviceOf(t, dev)
}

// RealGroup is the machine's first GPUs, so many of them, or the end of the test.
func RealGroup(t testing.TB, n int) (all []*Device) {
	t.Helper()
	drv, err := cuda.Load()
	if errors.Is(err, cuda.ErrNoDevice) {
		t.Skipf("no GPU: %v", err)
	}
	NoError(t, err)
	for i := range n {
		dev, err := drv.Open(i)
		if errors.Is(err, cuda.ErrNoDevice) {
			t.Skipf("no %d GPUs that will do: %v", n, err)
		}
		NoError(t, err)
		t.Cleanup(func() { NoError(t, dev.Close()) })
		all = append(all, deviceOf(t, dev))
	}
	return all
}

// deviceOf is one whose launches do what they say.
func deviceOf(t testing.TB, dev *cuda.Device) *Device {
	t.Helper()
	stream, err := dev.NewStream()
	NoError(t, err)
	m := &Device{Dev: dev, Stream: stream}
	m.Settle = func(t testing.TB) {
		t.Helper()
		NoError(t, stream.Synchronize())
	}
	m.Capture = func(t testing.TB, f func() error) func() error {
		t.Helper()
		g, err := stream.Capture(f)
		NoError(t, err)
		return func() error { return stream.Launch(g) }
	}
	return m
}

// OrShort is n, or less with -short: under compute-sanitizer, whose tools make
// kernels many times as slow.
func OrShort(n, short int) int {
	if testing.Short() {
		return short
	}
	return n
}

// Put copies data to memory of the GPU. In a test, the memory begins 16 bytes behind the start of a buffer. In a benchmark, the memory begins
// at the start of a buffer, as users' memory does.
func (m *Device) Put(t testing.TB, data []byte, d attn.DType) gpu.Memory {
	t.Helper()
	offset := int64(16)
	if _, ok := t.(*testing.B); ok {
		offset = 0
	}
	b, err := m.Dev.NewBuffer(int64(len(data)) + offset)
	NoError(t, err)
	NoError(t, b.Upload(offset, data))
	return gpu.Memory{Buffer: b, Offset: offset, DType: d, Len: len(data) / d.Size()}
}

// Poison fills x with NaN, and takes memory for it first where it has none.
func (m *Device) Poison(t testing.TB, x *gpu.Memory) {
	t.Helper()
	if x.Buffer == nil {
		n := x.Len
		*x = m.Put(t, Poisoned(max(n, 1), x.DType), x.DType)
		x.Len = n
	} else {
		NoError(t, x.Buffer.Upload(x.Offset, Poisoned(x.Len, x.DType)))
	}
}

// Read is what lies in x.
func Read(t testing.TB, x *gpu.Memory) []byte {
	t.Helper()
	b := make([]byte, x.Len*x.DType.Size())
	NoError(t, x.Buffer.Download(b, x.Offset))
	return b
}
