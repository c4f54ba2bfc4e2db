package nvml

import (
	"errors"
	"fmt"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda/library"
)

// ErrNoCounters is that a GPU, its driver or who uses it has no counters of how busy it is: from compute capability 9.0 on there
// are some.
var ErrNoCounters = errors.New("no counters of the GPU")

// counterFunctions are those of NVML's GPU performance monitoring, which older libraries lack.
type counterFunctions struct{ supported, alloc, free, sample, metrics function }

func (c *counterFunctions) find(lib uintptr) {
	for name, f := range map[string]*function{
		"nvmlGpmQueryDeviceSupport": &c.supported, "nvmlGpmSampleAlloc": &c.alloc, "nvmlGpmSampleFree": &c.free,
		"nvmlGpmSampleGet": &c.sample, "nvmlGpmMetricsGet": &c.metrics,
	} {
		*f = function{name, library.Symbol(lib, name)}
	}
}

func (c *counterFunctions) missing() string {
	for _, f := range []*function{&c.supported, &c.alloc, &c.free, &c.sample, &c.metrics} {
		if f.addr == 0 {
			return f.name
		}
	}
	return ""
}

// Counters count from Count to End.
type Counters struct {
	d       *Device
	samples []uintptr
}

// Use is how busy a GPU was, as shares.
type Use struct {
	SMs    float64 // of multiprocessors' clocks: they have a warp
	Memory float64 // of its memory's: it is read or written
}

// Count begins to count.
func (d *Device) Count() (c *Counters, err error) {
	f := &d.l.counters
	if name := f.missing(); name != "" {
		return nil, fmt.Errorf("%w: NVML lacks %s", ErrNoCounters, name)
	}
	support := struct{ version, is uint32 }{version: 1}
	if err := d.l.failed(&f.supported, f.supported.call(d.handle, uintptr(unsafe.Pointer(&support)))); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrNoCounters, err)
	}
	if support.is == 0 {
		return nil, fmt.Errorf("%w: NVML says that it has none", ErrNoCounters)
	}
	c = &Counters{d: d}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w: %v", ErrNoCounters, errors.Join(err, c.close()))
			c = nil
		}
	}()
	return c, c.look()
}

// look takes a sample of the counters.
func (c *Counters) look() error {
	f, sample := &c.d.l.counters, uintptr(0)
	if err := c.d.l.failed(&f.alloc, f.alloc.call(uintptr(unsafe.Pointer(&sample)))); err != nil {
		return err
	}
	c.samples = append(c.samples, sample)
	return c.d.l.failed(&f.sample, f.sample.call(c.d.handle, sample))
}

func (c *Counters) close() (err error) {
	f := &c.d.l.counters
	for _, s := range c.samples {
		err = errors.Join(err, c.d.l.failed(&f.free, f.free.call(s)))
	}
	c.samples = nil
	return err
}

// Numbers of metrics in NVML.
const (
	metricSMs    = 2
	metricMemory = 10
)

// metric is nvmlGpmMetric_t.
type metric struct {
	id     uint32
	result int32
	value  float64 // percent
	info   [3]uintptr
}

// mostMetrics is more than any NVML has room for in what it is asked with.
const mostMetrics = 512

// End is what was counted since Count. The counters are given back.
func (c *Counters) End() (u Use, err error) {
	defer func() {
		if err = errors.Join(err, c.close()); err != nil {
			err = fmt.Errorf("%w: %v", ErrNoCounters, err)
		}
	}()
	if err := c.look(); err != nil {
		return u, err
	}
	asked := new(struct { // nvmlGpmMetricsGet_t
		version, n uint32
		samples    [2]uintptr
		metrics    [mostMetrics]metric
	})
	asked.version, asked.n, asked.samples = 1, 2, [2]uintptr(c.samples)
	asked.metrics[0].id, asked.metrics[1].id = metricSMs, metricMemory
	f := &c.d.l.counters.metrics
	if err := c.d.l.failed(f, f.call(uintptr(unsafe.Pointer(asked)))); err != nil {
		return u, err
	}
	for i, to := range []*float64{&u.SMs, &u.Memory} {
		m := &asked.metrics[i]
		if err := c.d.l.failed(f, m.result); err != nil {
			return u, fmt.Errorf("metric %d: %w", m.id, err)
		}
		if *to = m.value / 100; !(*to >= 0 && *to <= 1.01) { // nor a NaN
			return u, fmt.Errorf("%s: metric %d is %v percent", f.name, m.id, m.value)
		}
	}
	return u, nil
}
