package enginetest

import (
	"slices"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
)

// Ceiling queues a launch that only reads some memory. Nothing is written to sink.
func (m *Device) Ceiling(t testing.TB, from, sink gpu.Memory) func() error {
	t.Helper()
	module, err := gpu.Module(m.Dev, "ceiling")
	NoError(t, err)
	f, err := module.Function("read_ceiling")
	NoError(t, err)
	const piece, stages = 16 << 10, 6
	NoError(t, f.SetDynamicShared(piece*stages+1024))
	return func() error {
		var args cuda.Args
		cuda.Struct(&args, &struct {
			from          uint64
			bytes         int64
			piece, stages int32
			sink          uint64
		}{from.Address(), int64(from.Len*from.DType.Size()) / piece * piece, piece, stages, sink.Address()})
		args.Hold(from.Buffer)
		args.Hold(sink.Buffer)
		return f.Launch(m.Stream, cuda.Grid{Blocks: [3]int{m.Dev.Info().Multiprocessors}, Threads: [3]int{32}, Shared: piece*stages + 1024}, &args)
	}
}

// ReadSpeed is the bytes a second that Ceiling reads of so many: the median of some turns.
func (m *Device) ReadSpeed(t testing.TB, bytes int64) float64 {
	t.Helper()
	from := gpu.Memory{DType: attn.Float32, Len: int(bytes / 4)}
	buffer, err := m.Dev.NewBuffer(bytes)
	NoError(t, err)
	from.Buffer = buffer
	NoError(t, buffer.Set(0, 0x55, buffer.Len()))
	sink := m.Put(t, make([]byte, 4096), attn.Float32)
	read := m.Ceiling(t, from, sink)
	begin, err := m.Dev.NewEvent(true)
	NoError(t, err)
	end, err := m.Dev.NewEvent(true)
	NoError(t, err)
	var times []float64
	for range 9 {
		NoError(t, m.Stream.Record(begin))
		NoError(t, read())
		NoError(t, m.Stream.Record(end))
		NoError(t, m.Stream.Synchronize())
		took, err := end.Since(begin)
		NoError(t, err)
		times = append(times, took.Seconds())
	}
	slices.Sort(times)
	NoError(t, buffer.Close())
	NoError(t, sink.Buffer.Close())
	return float64(bytes/(16<<10)*(16<<10)) / times[len(times)/2]
}
