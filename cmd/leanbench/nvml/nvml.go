// Package nvml asks NVIDIA's management library what a GPU draws, and how busy it is. The library is part of
// every driver, and is opened when first asked, without cgo.
package nvml

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda/library"
)

// ErrNone is that there is no such library.
var ErrNone = errors.New("no NVML")

const libraryName = "libnvidia-ml.so.1"

// function is an entry point.
type function struct {
	name string
	addr uintptr
}

// address makes the C call of a function that returns an address.
//
//go:uintptrescapes
func (f *function) address(args ...uintptr) uintptr { return library.Call(f.addr, args...) }

// call makes the C call of a function that returns an error.
//
//go:uintptrescapes
func (f *function) call(args ...uintptr) int32 { return int32(library.Call(f.addr, args...)) }

// Library is NVML, initialised.
type Library struct {
	init, shutdown, handle, name, energy, text function
	counters                                   counterFunctions
	lib                                        uintptr
}

// Open opens the machine's library, which is to be closed.
func Open() (*Library, error) { return OpenFrom(libraryName) }

// OpenFrom opens the library of this name or path.
func OpenFrom(path string) (*Library, error) {
	lib, err := library.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrNone, err)
	}
	l := &Library{lib: lib}
	for _, f := range []struct {
		to   *function
		name string
	}{
		{&l.init, "nvmlInit_v2"}, {&l.shutdown, "nvmlShutdown"}, {&l.handle, "nvmlDeviceGetHandleByIndex_v2"},
		{&l.name, "nvmlDeviceGetName"}, {&l.energy, "nvmlDeviceGetTotalEnergyConsumption"}, {&l.text, "nvmlErrorString"},
	} {
		*f.to = function{f.name, library.Symbol(lib, f.name)}
		if f.to.addr == 0 {
			library.Close(lib)
			return nil, fmt.Errorf("%w: %s lacks %s", ErrNone, path, f.name)
		}
	}
	l.counters.find(lib)
	if err := l.failed(&l.init, l.init.call()); err != nil {
		library.Close(lib)
		return nil, err
	}
	return l, nil
}

// Close gives the library back.
func (l *Library) Close() error {
	err := l.failed(&l.shutdown, l.shutdown.call())
	library.Close(l.lib)
	return err
}

// failed is the error of a call that did not return 0.
func (l *Library) failed(f *function, result int32) error {
	if result == 0 {
		return nil
	}
	return fmt.Errorf("%s: %s (%d)", f.name, cString(l.text.address(uintptr(result))), result)
}

// Device is a GPU.
type Device struct {
	l      *Library
	handle uintptr
}

// Device is the GPU that has a number for CUDA. NVML counts those that CUDA_VISIBLE_DEVICES hides, too. A GPU with another name
// than is given is an error.
func (l *Library) Device(ordinal int, name string) (*Device, error) {
	d := &Device{l: l}
	ordinal, err := visible(ordinal, os.Getenv("CUDA_VISIBLE_DEVICES"))
	if err != nil {
		return nil, err
	}
	if err := l.failed(&l.handle, l.handle.call(uintptr(ordinal), uintptr(unsafe.Pointer(&d.handle)))); err != nil {
		return nil, fmt.Errorf("GPU %d: %w", ordinal, err)
	}
	var buffer [96]byte
	if err := l.failed(&l.name, l.name.call(d.handle, uintptr(unsafe.Pointer(&buffer)), uintptr(len(buffer)))); err != nil {
		return nil, fmt.Errorf("GPU %d: %w", ordinal, err)
	}
	text, _, _ := bytes.Cut(buffer[:], []byte{0})
	if string(text) != name {
		return nil, fmt.Errorf("GPU %d is %q for NVML, and %q for CUDA", ordinal, text, name)
	}
	return d, nil
}

// visible is the number that a GPU has without CUDA_VISIBLE_DEVICES.
func visible(ordinal int, list string) (int, error) {
	if list == "" {
		return ordinal, nil
	}
	names := strings.Split(list, ",")
	if ordinal < len(names) {
		if n, err := strconv.Atoi(strings.TrimSpace(names[ordinal])); err == nil && n >= 0 {
			return n, nil
		}
	}
	return 0, fmt.Errorf("CUDA_VISIBLE_DEVICES is %q: nobody knows which GPU number %d is for NVML", list, ordinal)
}

// Energy is what the GPU has drawn since its driver was loaded, in joules.
func (d *Device) Energy() (float64, error) {
	var millijoules uint64
	err := d.l.failed(&d.l.energy, d.l.energy.call(d.handle, uintptr(unsafe.Pointer(&millijoules))))
	return float64(millijoules) / 1e3, err
}

// Meter measures what a GPU draws while something runs. The counter moves every 20 to 100 ms:
// the first and the last move that it sees are the ends of what it measures.
type Meter struct {
	energy      func() (float64, error)
	done        chan struct{}
	wait        sync.WaitGroup
	first, last reading
	err         error
}

type reading struct {
	at     time.Time
	joules float64
}

// Begin begins to measure.
func (d *Device) Begin() *Meter { return begin(d.Energy) }

func begin(energy func() (float64, error)) *Meter {
	m := &Meter{energy: energy, done: make(chan struct{})}
	m.wait.Go(m.watch)
	return m
}

// watch looks at the counter until the meter ends.
func (m *Meter) watch() {
	before := math.NaN()
	for {
		joules, err := m.energy()
		if err != nil {
			m.err = err
			return
		}
		if now := (reading{time.Now(), joules}); joules != before {
			switch {
			case math.IsNaN(before): // nobody knows how long it has been so
			case m.first.at.IsZero():
				m.first = now
			default:
				m.last = now
			}
			before = joules
		}
		select {
		case <-m.done:
			return
		case <-time.After(time.Millisecond):
		}
	}
}

// leastSpan is the shortest time that a power is worth something of.
const leastSpan = 100 * time.Millisecond

// End is the power in between, in watts.
func (m *Meter) End() (float64, error) {
	close(m.done)
	m.wait.Wait()
	if m.err != nil {
		return 0, m.err
	}
	span := m.last.at.Sub(m.first.at)
	if m.last.at.IsZero() || span < leastSpan {
		return 0, errors.New("the counter of energy has not moved often enough")
	}
	watts := (m.last.joules - m.first.joules) / span.Seconds()
	if !(watts > 0) {
		return 0, fmt.Errorf("the counter of energy went from %v to %v J", m.first.joules, m.last.joules)
	}
	return watts, nil
}

// cString is the text at an address of the library.
func cString(addr uintptr) string {
	if addr == 0 {
		return ""
	}
	p, n := *(*unsafe.Pointer)(unsafe.Pointer(&addr)), 0
	for n < 1<<10 && *(*byte)(unsafe.Add(p, n)) != 0 {
		n++
	}
	return string(unsafe.Slice((*byte)(p), n))
}
