package cuda

import (
	"bytes"
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda/library"
)

const (
	oldestDriver     = 12000 // CUDA 12.0, which drivers have from release 525 on
	oldestRelease    = "525"
	oldestCapability = 80 // 8.0: asynchronous copies to shared memory, bfloat16
)

// functions are the used entry points.
type functions struct {
	getErrorName, getErrorString, init, driverGetVersion function

	deviceGetCount, deviceGet, deviceGetName, deviceGetAttribute, deviceTotalMem function
	primaryCtxRetain, primaryCtxRelease                                          function
	ctxPushCurrent, ctxPopCurrent, ctxSynchronize                                function
	deviceCanAccessPeer, ctxEnablePeerAccess                                     function

	memGetInfo, memAlloc, memFree, memHostAlloc, memFreeHost     function
	memcpyHtoDAsync, memcpyDtoHAsync, memcpyDtoDAsync, memsetD8A function

	streamCreate, streamDestroy, streamSynchronize, streamQuery, streamWaitEvent                        function
	eventCreate, eventDestroy, eventRecord, eventSynchronize, eventQuery, eventElapsedTime              function
	moduleLoadData, moduleUnload, moduleGetFunction                                                     function
	funcGetAttribute, funcSetAttribute, occupancy, clusters, launchKernel, launchKernelEx               function
	tensorMapEncodeTiled                                                                                function
	streamBeginCapture, streamEndCapture, graphInstantiate, graphDestroy, graphExecDestroy, graphLaunch function
	exchangeCaptureMode, graphGetRootNodes, graphGetKernel, graphSetKernel                              function
}

// table pairs every entry point with its name in the library. The suffix _v2 means sizes and addresses of 64 bits.
func (f *functions) table() []struct {
	f      *function
	name   string
	suffix string
} {
	return []struct {
		f      *function
		name   string
		suffix string
	}{
		{&f.driverGetVersion, "cuDriverGetVersion", ""}, // first: an old library lacks some of the others
		{&f.getErrorName, "cuGetErrorName", ""},
		{&f.getErrorString, "cuGetErrorString", ""},
		{&f.init, "cuInit", ""},
		{&f.deviceGetCount, "cuDeviceGetCount", ""},
		{&f.deviceGet, "cuDeviceGet", ""},
		{&f.deviceGetName, "cuDeviceGetName", ""},
		{&f.deviceGetAttribute, "cuDeviceGetAttribute", ""},
		{&f.deviceTotalMem, "cuDeviceTotalMem", "_v2"},
		{&f.primaryCtxRetain, "cuDevicePrimaryCtxRetain", ""},
		{&f.primaryCtxRelease, "cuDevicePrimaryCtxRelease", "_v2"},
		{&f.ctxPushCurrent, "cuCtxPushCurrent", "_v2"},
		{&f.ctxPopCurrent, "cuCtxPopCurrent", "_v2"},
		{&f.ctxSynchronize, "cuCtxSynchronize", ""},
		{&f.deviceCanAccessPeer, "cuDeviceCanAccessPeer", ""},
		{&f.ctxEnablePeerAccess, "cuCtxEnablePeerAccess", ""},
		{&f.memGetInfo, "cuMemGetInfo", "_v2"},
		{&f.memAlloc, "cuMemAlloc", "_v2"},
		{&f.memFree, "cuMemFree", "_v2"},
		{&f.memHostAlloc, "cuMemHostAlloc", ""},
		{&f.memFreeHost, "cuMemFreeHost", ""},
		{&f.memcpyHtoDAsync, "cuMemcpyHtoDAsync", "_v2"},
		{&f.memcpyDtoHAsync, "cuMemcpyDtoHAsync", "_v2"},
		{&f.memcpyDtoDAsync, "cuMemcpyDtoDAsync", "_v2"},
		{&f.memsetD8A, "cuMemsetD8Async", ""},
		{&f.streamCreate, "cuStreamCreate", ""},
		{&f.streamDestroy, "cuStreamDestroy", "_v2"},
		{&f.streamSynchronize, "cuStreamSynchronize", ""},
		{&f.streamQuery, "cuStreamQuery", ""},
		{&f.streamWaitEvent, "cuStreamWaitEvent", ""},
		{&f.eventCreate, "cuEventCreate", ""},
		{&f.eventDestroy, "cuEventDestroy", "_v2"},
		{&f.eventRecord, "cuEventRecord", ""},
		{&f.eventSynchronize, "cuEventSynchronize", ""},
		{&f.eventQuery, "cuEventQuery", ""},
		{&f.eventElapsedTime, "cuEventElapsedTime", ""},
		{&f.moduleLoadData, "cuModuleLoadData", ""},
		{&f.moduleUnload, "cuModuleUnload", ""},
		{&f.moduleGetFunction, "cuModuleGetFunction", ""},
		{&f.funcGetAttribute, "cuFuncGetAttribute", ""},
		{&f.funcSetAttribute, "cuFuncSetAttribute", ""},
		{&f.occupancy, "cuOccupancyMaxActiveBlocksPerMultiprocessor", ""},
		{&f.clusters, "cuOccupancyMaxActiveClusters", ""},
		{&f.launchKernel, "cuLaunchKernel", ""},
		{&f.launchKernelEx, "cuLaunchKernelEx", ""},
		{&f.tensorMapEncodeTiled, "cuTensorMapEncodeTiled", ""},
		{&f.streamBeginCapture, "cuStreamBeginCapture", "_v2"},
		{&f.streamEndCapture, "cuStreamEndCapture", ""},
		{&f.graphInstantiate, "cuGraphInstantiateWithFlags", ""},
		{&f.graphDestroy, "cuGraphDestroy", ""},
		{&f.graphExecDestroy, "cuGraphExecDestroy", ""},
		{&f.graphLaunch, "cuGraphLaunch", ""},
		{&f.graphGetRootNodes, "cuGraphGetRootNodes", ""},
		{&f.graphGetKernel, "cuGraphKernelNodeGetParams", ""},
		{&f.graphSetKernel, "cuGraphExecKernelNodeSetParams", ""},
		{&f.exchangeCaptureMode, "cuThreadExchangeStreamCaptureMode", ""},
	}
}

// Driver is the loaded and initialized library.
type Driver struct {
	fn      functions
	version int
}

// Load opens the machine's driver. Later calls return the same driver. After an error later calls search again, since
// a driver may have been installed. Errors: [ErrNoDevice].
func Load() (*Driver, error) {
	machine.Lock()
	defer machine.Unlock()
	if machine.driver == nil {
		d, err := LoadFrom(libraryName())
		if err != nil {
			return nil, err
		}
		machine.driver = d
	}
	return machine.driver, nil
}

// libraryName returns the driver's file name, "" on platforms without a driver.
func libraryName() string {
	if runtime.GOOS == "windows" {
		return "nvcuda.dll"
	}
	return "libcuda.so.1"
}

// machine is the machine's driver.
var machine struct {
	sync.Mutex
	driver *Driver // nil: not found yet
}

// LoadFrom opens the driver in a library with this name or path. An initialized library stays open.
func LoadFrom(path string) (*Driver, error) {
	lib, err := library.Open(path)
	if err != nil {
		return nil, fmt.Errorf("no CUDA driver (%v): install NVIDIA's driver, release %s or newer: %w", err, oldestRelease, ErrNoDevice)
	}
	d := &Driver{}
	if err := d.init(lib); err != nil {
		library.Close(lib)
		return nil, err
	}
	return d, nil
}

func (d *Driver) init(lib uintptr) error {
	for _, e := range d.fn.table() {
		e.f.name, e.f.addr = e.name, library.Symbol(lib, e.name+e.suffix)
		if e.f.addr == 0 {
			if e.f == &d.fn.driverGetVersion {
				return fmt.Errorf("no CUDA driver: the library has no %s: %w", e.name, ErrNoDevice)
			}
			return fmt.Errorf("the driver has no %s: install release %s or newer: %w", e.name+e.suffix, oldestRelease, ErrNoDevice)
		}
		if e.f == &d.fn.driverGetVersion {
			var v int32
			if r := e.f.call(uintptr(unsafe.Pointer(&v))); r != 0 {
				return fmt.Errorf("no CUDA driver: %s returned %d: %w", e.name, r, ErrNoDevice)
			}
			if d.version = int(v); d.version < oldestDriver {
				return fmt.Errorf("the driver is for CUDA %s: install release %s (CUDA 12.0) or newer: %w", d.Version(), oldestRelease, ErrNoDevice)
			}
		}
	}
	if r := d.fn.init.call(0); r != 0 {
		return d.failed(r, &d.fn.init, "")
	}
	return nil
}

// Version returns the newest CUDA version that the driver supports, as "12.4".
func (d *Driver) Version() string {
	return fmt.Sprintf("%d.%d", d.version/1000, d.version%1000/10)
}

// Takes reports whether the driver supports a CUDA version, and cubins of any version with the same number before the dot.
func (d *Driver) Takes(major, minor int) (ptx, cubin bool) {
	return 1000*major+10*minor <= d.version, 1000*major <= d.version
}

// Count returns the number of GPUs, unsupported ones included.
func (d *Driver) Count() (int, error) {
	var n int32
	if r := d.fn.deviceGetCount.call(uintptr(unsafe.Pointer(&n))); r != 0 {
		return 0, d.failed(r, &d.fn.deviceGetCount, "")
	}
	return int(n), nil
}

// Info is the fixed properties of a GPU.
type Info struct {
	Ordinal         int
	Name            string
	Capability      int   // compute capability: 10*major + minor, 90 for 9.0
	Multiprocessors int   // SMs
	ClockKHz        int   // the highest SM clock
	MemoryBytes     int64 // total, the driver's part included
	MemoryClockKHz  int   // 0 if the driver does not return the clock
	MemoryBusBits   int
	L2Bytes         int

	SharedPerBlock     int // static shared memory of a block
	SharedPerBlockMost int // dynamic shared memory of a block after [Function.SetDynamicShared]
	SharedPerSM        int
	RegistersPerSM     int
	ThreadsPerSM       int
	Cooperative        bool // can start all blocks of a grid at once
}

// Info describes a GPU without opening it. An ordinal without a GPU is [ErrNoDevice].
func (d *Driver) Info(ordinal int) (Info, error) {
	info, _, err := d.info(ordinal)
	return info, err
}

// info also returns the driver's handle of the device.
func (d *Driver) info(ordinal int) (info Info, dev int32, err error) {
	n, err := d.Count()
	if err != nil {
		return info, 0, err
	}
	if ordinal < 0 || ordinal >= n {
		return info, 0, fmt.Errorf("no GPU %d, there are %d: %w", ordinal, n, ErrNoDevice)
	}
	if r := d.fn.deviceGet.call(uintptr(unsafe.Pointer(&dev)), uintptr(ordinal)); r != 0 {
		return info, 0, d.failed(r, &d.fn.deviceGet, "GPU %d", ordinal)
	}
	info.Ordinal = ordinal

	var name [256]byte
	if r := d.fn.deviceGetName.call(uintptr(unsafe.Pointer(&name)), uintptr(len(name)), uintptr(dev)); r != 0 {
		return info, 0, d.failed(r, &d.fn.deviceGetName, "GPU %d", ordinal)
	}
	text, _, _ := bytes.Cut(name[:], []byte{0})
	info.Name = string(text)

	var total uint64
	if r := d.fn.deviceTotalMem.call(uintptr(unsafe.Pointer(&total)), uintptr(dev)); r != 0 {
		return info, 0, d.failed(r, &d.fn.deviceTotalMem, "GPU %d", ordinal)
	}
	info.MemoryBytes = int64(total)

	var major, minor, cooperative int
	for _, a := range []struct {
		to *int
		id int // CUdevice_attribute
	}{
		{&info.SharedPerBlock, 8},
		{&info.ClockKHz, 13},
		{&info.Multiprocessors, 16},
		{&info.MemoryClockKHz, 36},
		{&info.MemoryBusBits, 37},
		{&info.L2Bytes, 38},
		{&info.ThreadsPerSM, 39},
		{&major, 75},
		{&minor, 76},
		{&info.SharedPerSM, 81},
		{&info.RegistersPerSM, 82},
		{&cooperative, 95},
		{&info.SharedPerBlockMost, 97},
	} {
		var v int32
		if r := d.fn.deviceGetAttribute.call(uintptr(unsafe.Pointer(&v)), uintptr(a.id), uintptr(dev)); r != 0 {
			return info, 0, d.failed(r, &d.fn.deviceGetAttribute, "attribute %d of GPU %d", a.id, ordinal)
		}
		*a.to = int(v)
	}
	info.Capability = 10*major + minor
	info.Cooperative = cooperative != 0
	return info, dev, nil
}
