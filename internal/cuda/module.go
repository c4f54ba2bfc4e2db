package cuda

import (
	"fmt"
	"sync"
	"unsafe"
)

// Module is code that is loaded on a device until the device closes.
type Module struct {
	handle
	name      string
	functions struct {
		sync.Mutex
		byName map[string]*Function
	}
}

// Module returns the module of this name, and loads the module at the first call: image then returns a cubin, a fat
// binary, or PTX text. The next call after an error tries again.
func (v *Device) Module(name string, image func() ([]byte, error)) (*Module, error) {
	if err := v.enter(); err != nil {
		return nil, err
	}
	defer v.leave()
	v.modules.Lock()
	defer v.modules.Unlock()
	if m := v.modules.byKey[name]; m != nil {
		return m, nil
	}
	code, err := image()
	if err != nil {
		return nil, fmt.Errorf("module %s: %w", name, err)
	}
	code = append(code[:len(code):len(code)], 0) // PTX ends with a zero byte; a cubin has its length
	m := &Module{name: name}
	err = v.make(&m.handle, &v.drv.fn.moduleUnload, func() (id uintptr, err error) {
		f := &v.drv.fn.moduleLoadData
		if r := f.call(uintptr(unsafe.Pointer(&id)), uintptr(unsafe.Pointer(unsafe.SliceData(code)))); r != 0 {
			return 0, v.drv.failed(r, f, "%s, %d bytes", name, len(code)-1)
		}
		return id, nil
	})
	if err != nil {
		return nil, err
	}
	if v.modules.byKey == nil {
		v.modules.byKey = map[string]*Module{}
	}
	v.modules.byKey[name] = m
	return m, nil
}

// Device returns the device on which the module is loaded.
func (m *Module) Device() *Device { return m.dev }

// Function is a kernel.
type Function struct {
	module *Module
	id     uintptr
	name   string
}

// Function returns a kernel by name; every call returns the same Function.
func (m *Module) Function(name string) (*Function, error) {
	if err := m.enter(); err != nil {
		return nil, err
	}
	defer m.leave()
	m.functions.Lock()
	defer m.functions.Unlock()
	if f := m.functions.byName[name]; f != nil {
		return f, nil
	}
	f := &Function{module: m, name: name}
	text := append([]byte(name), 0)
	err := m.dev.with(func() error {
		get := &m.dev.drv.fn.moduleGetFunction
		var id uintptr
		if r := get.call(uintptr(unsafe.Pointer(&id)), m.id, uintptr(unsafe.Pointer(unsafe.SliceData(text)))); r != 0 {
			return m.dev.drv.failed(r, get, "%s of module %s", name, m.name)
		}
		f.id = id
		return nil
	})
	if err != nil {
		return nil, err
	}
	if m.functions.byName == nil {
		m.functions.byName = map[string]*Function{}
	}
	m.functions.byName[name] = f
	return f, nil
}

// FunctionInfo has what the compiler and the driver determined for a kernel.
type FunctionInfo struct {
	MaxThreads    int // most threads of a block
	StaticShared  int // bytes of static shared memory of a block
	LocalBytes    int // bytes of local memory of a thread: spilled registers and arrays
	Registers     int // registers of a thread
	DynamicShared int // most bytes of dynamic shared memory of a launch
}

// CUfunction_attribute
const (
	attributeMaxThreads    = 0
	attributeStaticShared  = 1
	attributeLocalBytes    = 3
	attributeRegisters     = 4
	attributeDynamicShared = 8
	attributeLargeClusters = 14
)

// Info asks the driver.
func (f *Function) Info() (info FunctionInfo, err error) {
	err = f.with(func(d *Driver) error {
		for _, a := range []struct {
			to *int
			id int
		}{
			{&info.MaxThreads, attributeMaxThreads},
			{&info.StaticShared, attributeStaticShared},
			{&info.LocalBytes, attributeLocalBytes},
			{&info.Registers, attributeRegisters},
			{&info.DynamicShared, attributeDynamicShared},
		} {
			var v int32
			if r := d.fn.funcGetAttribute.call(uintptr(unsafe.Pointer(&v)), uintptr(a.id), f.id); r != 0 {
				return d.failed(r, &d.fn.funcGetAttribute, "attribute %d of %s", a.id, f.name)
			}
			*a.to = int(v)
		}
		return nil
	})
	return info, err
}

// SetDynamicShared allows launches with this many bytes of dynamic shared memory. The default limit is 48 KB, less
// the static part.
func (f *Function) SetDynamicShared(bytes int) error {
	if !fits(bytes) {
		return fmt.Errorf("%d bytes of shared memory: %w", bytes, ErrRange)
	}
	return f.with(func(d *Driver) error {
		if r := d.fn.funcSetAttribute.call(f.id, attributeDynamicShared, uintptr(bytes)); r != 0 {
			return d.failed(r, &d.fn.funcSetAttribute, "%d bytes of shared memory for %s", bytes, f.name)
		}
		return nil
	})
}

// SetLargeClusters allows launches with clusters of more than 8 blocks, as many as [Function.Clusters] returns.
func (f *Function) SetLargeClusters() error {
	return f.with(func(d *Driver) error {
		if r := d.fn.funcSetAttribute.call(f.id, attributeLargeClusters, 1); r != 0 {
			return d.failed(r, &d.fn.funcSetAttribute, "large clusters for %s", f.name)
		}
		return nil
	})
}

// Occupancy returns the number of blocks of this many threads, with this much dynamic shared memory, that an SM can
// hold at once.
func (f *Function) Occupancy(threads, shared int) (blocks int, err error) {
	if !fits(threads) || !fits(shared) {
		return 0, fmt.Errorf("%d threads, %d bytes of shared memory: %w", threads, shared, ErrRange)
	}
	err = f.with(func(d *Driver) error {
		var n int32
		if r := d.fn.occupancy.call(uintptr(unsafe.Pointer(&n)), f.id, uintptr(threads), uintptr(shared)); r != 0 {
			return d.failed(r, &d.fn.occupancy, "%s, %d threads, %d bytes of shared memory", f.name, threads, shared)
		}
		blocks = int(n)
		return nil
	})
	return blocks, err
}

func (f *Function) with(call func(*Driver) error) error {
	m := f.module
	if err := m.enter(); err != nil {
		return err
	}
	defer m.leave()
	return m.dev.with(func() error { return call(m.dev.drv) })
}
