package leanattention

import (
	"errors"
	"fmt"

	"gorgonia.org/leanattention/internal/cuda"
)

// GPU is an open NVIDIA GPU. It needs an installed driver and nothing else: no
// toolkit, no cgo.
//
// No operator of this package runs on a GPU yet; what there is so far is the
// device itself: which ones there are, and their memory.
//
// The driver is looked for when [GPUs] or [OpenGPU] is first called. For that, a
// Linux program for amd64 or arm64 that imports this package needs glibc to
// start, also when it was built with CGO_ENABLED=0. The build tag nogpu leaves
// GPUs out: then it needs nothing, and every call gives [ErrNoDriver].
//
// A GPU may be used by several goroutines at once. Close it when it is no longer
// needed: nothing else gives its memory back before the process ends.
type GPU struct{ dev *cuda.Device }

// GPUInfo describes a GPU.
type GPUInfo struct {
	Ordinal         int    // the driver's number of it, from 0: what [OpenGPU] takes
	Name            string // as the driver says it, such as "NVIDIA H200"
	Major, Minor    int    // compute capability
	Multiprocessors int    // streaming multiprocessors (SMs)
	MemoryBytes     int64  // all of its memory
	L2Bytes         int    // L2 cache
}

// String is the GPU in a line, for reports.
func (i GPUInfo) String() string {
	return fmt.Sprintf("GPU %d: %s, compute capability %d.%d, %d SMs, %.1f GiB", i.Ordinal, i.Name, i.Major, i.Minor,
		i.Multiprocessors, float64(i.MemoryBytes)/(1<<30))
}

// GPUMemory is the state of a GPU's memory, in bytes.
type GPUMemory struct {
	Free   int64 // for every process of the machine
	Total  int64 // that the driver can hand out
	Used   int64 // by buffers of this GPU value
	Pinned int64 // memory of the host that this GPU value holds for copies
}

// GPUs lists the GPUs that the driver shows, in the order of their ordinals,
// those that are too old for [OpenGPU] included. It opens none of them.
//
// Errors: [ErrNoDriver], [ErrDriverTooOld], and [ErrNoDevice] where the driver
// finds no GPU; so a list without an error is not empty.
func GPUs() ([]GPUInfo, error) {
	drv, err := loadDriver()
	if err != nil {
		return nil, gpuError("GPUs", err)
	}
	n, err := drv.Count()
	if err != nil {
		return nil, gpuError("GPUs", err)
	}
	if n == 0 {
		return nil, errorf("GPUs", ErrNoDevice, "the driver shows none")
	}
	list := make([]GPUInfo, n)
	for i := range list {
		info, err := drv.Info(i)
		if err != nil {
			return nil, gpuError("GPUs", err)
		}
		list[i] = gpuInfo(info)
	}
	return list, nil
}

// OpenGPU opens the GPU of this ordinal. It shares the GPU's primary context
// with whatever else in the process uses CUDA. One GPU may be opened more than
// once; each has to be closed.
//
// Errors: [ErrNoDriver], [ErrDriverTooOld] below CUDA 12.0 (driver 525),
// [ErrNoDevice] where there is no GPU of this ordinal, [ErrComputeCapability]
// below 8.0, [ErrOutOfMemory] where others left no memory for a context.
func OpenGPU(ordinal int) (*GPU, error) {
	drv, err := loadDriver()
	if err != nil {
		return nil, gpuError("OpenGPU", err)
	}
	dev, err := drv.Open(ordinal)
	if err != nil {
		return nil, gpuError("OpenGPU", err)
	}
	return &GPU{dev: dev}, nil
}

// loadDriver is a variable for tests, which put another driver there.
var loadDriver = cuda.Load

// Info describes the GPU. It may be asked of a closed one too.
func (g *GPU) Info() GPUInfo {
	if g == nil || g.dev == nil {
		return GPUInfo{}
	}
	return gpuInfo(g.dev.Info())
}

// Name is the GPU's name, such as "NVIDIA H200".
func (g *GPU) Name() string { return g.Info().Name }

// Memory asks for the present state of the GPU's memory. Errors: [ErrClosed].
func (g *GPU) Memory() (GPUMemory, error) {
	if g == nil || g.dev == nil {
		return GPUMemory{}, errorf("GPU.Memory", ErrState, "not made by OpenGPU")
	}
	m, err := g.dev.Memory()
	if err != nil {
		return GPUMemory{}, gpuError("GPU.Memory", err)
	}
	return GPUMemory{Free: m.Free, Total: m.Total, Used: m.Used, Pinned: m.Pinned}, nil
}

// Close waits for the GPU's work of this process and gives back everything that
// was made on it. A second Close is [ErrClosed].
func (g *GPU) Close() error {
	if g == nil || g.dev == nil {
		return errorf("GPU.Close", ErrState, "not made by OpenGPU")
	}
	if err := g.dev.Close(); err != nil {
		return gpuError("GPU.Close", err)
	}
	return nil
}

func gpuInfo(i cuda.Info) GPUInfo {
	return GPUInfo{Ordinal: i.Ordinal, Name: i.Name, Major: i.Capability / 10, Minor: i.Capability % 10,
		Multiprocessors: i.Multiprocessors, MemoryBytes: i.MemoryBytes, L2Bytes: i.L2Bytes}
}

// gpuError wraps an error of the driver, which matches the sentinels by itself
// but for ErrClosed: that one is this package's.
func gpuError(op string, err error) error {
	if errors.Is(err, cuda.ErrClosed) {
		return errorf(op, ErrClosed, "the GPU")
	}
	return fmt.Errorf("leanattention: %s: %w", op, err)
}
