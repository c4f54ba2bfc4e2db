//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package nccl

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/cuda/library"
	"gorgonia.org/leanattention/internal/nccl/fakenccl"
)

// environment is a lookup of a few variables.
func environment(pairs ...string) func(string) string {
	return func(name string) string {
		for _, p := range pairs {
			if n, v, _ := strings.Cut(p, "="); n == name {
				return v
			}
		}
		return ""
	}
}

// The library is found where it is, and an error says where it was looked for.
func TestFind(t *testing.T) {
	dir := t.TempDir()
	built := fakenccl.Build(t, dir)
	venv := t.TempDir()
	at := filepath.Join(venv, "lib", "python3.12", "site-packages", "nvidia", "nccl", "lib")
	if err := os.MkdirAll(at, 0o700); err != nil {
		t.Fatal(err)
	}
	wheel := filepath.Join(at, "libnccl.so.2")
	if err := os.Rename(built, wheel); err != nil {
		t.Fatal(err)
	}
	for name, env := range map[string][]string{
		"file":  {Variable + "=" + wheel},
		"dir":   {Variable + "=" + at},
		"venv":  {"VIRTUAL_ENV=" + venv},
		"conda": {"CONDA_PREFIX=" + venv},
	} {
		var list []library.Place
		for _, p := range search.Places(environment(env...)) {
			if strings.HasPrefix(p.Path, venv) { // the machine may have others
				list = append(list, p)
			}
		}
		l, err := find(list)
		if err != nil || l.Path() != wheel || l.Version() != "2.28.9" {
			t.Errorf("%s: %+v, %v", name, l, err)
		}
	}
	_, err := find(search.Places(environment(Variable+"=/nowhere", "VIRTUAL_ENV="+venv)))
	if !errors.Is(err, ErrNoNCCL) || !strings.Contains(err.Error(), "/nowhere ("+Variable+")") || strings.Contains(err.Error(), venv) {
		t.Errorf("a variable that names nothing: %v", err)
	}
	all := search.Places(environment("VIRTUAL_ENV=/venv", "CONDA_PREFIX=/conda", "HOME=/home/me"))
	_, err = find(all[1:3])
	for _, text := range []string{"/venv/lib/libnccl.so.2 (VIRTUAL_ENV)", "/venv/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2", "pip install", Variable} {
		if !errors.Is(err, ErrNoNCCL) || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %q", err, text)
		}
	}
	if all[0].Path != "libnccl.so.2" || all[0].Files()[0] != "libnccl.so.2" {
		t.Errorf("the loader's path is %+v", all[0])
	}

	t.Setenv("FAKE_NCCL_VERSION", "22105")
	if _, err := find([]library.Place{{What: Variable, Path: "/nowhere"}, {What: Variable, Path: wheel}}); !errors.Is(err, ErrTooOld) || !strings.Contains(err.Error(), "2.21.5") {
		t.Errorf("an old library: %v", err)
	}
	t.Setenv("FAKE_NCCL_VERSION", "2804") // the numbers of those days
	if _, err := LoadFrom(wheel); !errors.Is(err, ErrTooOld) || !strings.Contains(err.Error(), "2.8.4") {
		t.Errorf("a very old library: %v", err)
	}
	t.Setenv("FAKE_NCCL_VERSION", "")
	if _, err := LoadFrom(fakedriver.New(t).Path); !errors.Is(err, ErrNoNCCL) || !strings.Contains(err.Error(), "ncclGetVersion") {
		t.Errorf("another library: %v", err)
	}
	if os.Getenv("NCCL_NVLS_ENABLE") != "0" {
		t.Error("NVLink multicast is not off")
	}
}

// open is a device of the fake driver, with a stream, and the library.
func open(t *testing.T) (*Library, *cuda.Device, *cuda.Stream) {
	t.Helper()
	lib, err := LoadFrom(fakenccl.Build(t, t.TempDir()))
	if err != nil {
		t.Fatal(err)
	}
	fake := fakedriver.New(t)
	fake.State().Late = 1 // work is queued, not done at once
	drv, err := cuda.LoadFrom(fake.Path)
	if err != nil {
		t.Fatal(err)
	}
	dev, err := drv.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	s, err := dev.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
		if fake.Live() != 0 || fake.Defects() != 0 {
			t.Errorf("%d left, %d defects:\n%s", fake.Live(), fake.Defects(), fake.Log())
		}
	})
	return lib, dev, s
}

func alone(t *testing.T, lib *Library, dev *cuda.Device) *Comm {
	t.Helper()
	id, err := lib.UniqueID()
	if err != nil {
		t.Fatal(err)
	}
	c, err := lib.Init(dev, 1, 0, &id)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// What can't be is refused before NCCL sees it, and what NCCL says is an error with its text.
func TestComm(t *testing.T) {
	lib, dev, s := open(t)
	c := alone(t, lib, dev)
	if c.Rank() != 0 || c.Size() != 1 || c.Version() != "2.28.9" {
		t.Errorf("rank %d of %d, %s", c.Rank(), c.Size(), c.Version())
	}
	b, err := dev.NewBuffer(1024)
	if err != nil {
		t.Fatal(err)
	}
	good := Part{b, 0, 8}
	for name, call := range map[string]func() error{
		"nothing":       func() error { return c.AllReduce(s, Part{b, 0, 0}, Part{b, 0, 0}, Float32) },
		"no buffer":     func() error { return c.AllReduce(s, good, Part{nil, 0, 8}, Float32) },
		"other lengths": func() error { return c.AllReduce(s, Part{b, 0, 9}, good, Float32) },
		"too long":      func() error { return c.AllReduce(s, Part{b, 0, 257}, Part{b, 0, 257}, Float32) },
		"not aligned":   func() error { return c.Broadcast(s, good, Part{b, 2, 8}, Float32, 0) },
		"before":        func() error { return c.AllGather(s, good, Part{b, -4, 8}, Float32) },
		"a rank":        func() error { return c.Broadcast(s, good, good, Float32, 1) },
	} {
		if err := call(); !errors.Is(err, cuda.ErrRange) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := c.AllReduce(s, good, good, Int32); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("sums of int32: %v", err)
	}
	if _, err := lib.Init(dev, 2, 2, new(ID)); !errors.Is(err, cuda.ErrRange) {
		t.Errorf("rank 2 of 2: %v", err)
	}
	t.Setenv("FAKE_NCCL_FAIL", "ncclAllReduce")
	var e *Error
	if err := c.Barrier(s); !errors.As(err, &e) || e.Call != "ncclAllReduce" || !strings.Contains(err.Error(), "was told to fail") {
		t.Errorf("Barrier: %v", err)
	}
	t.Setenv("FAKE_NCCL_FAIL", "")
	if err := errors.Join(c.Barrier(s), s.Synchronize(), c.AsyncError()); err != nil {
		t.Error(err)
	}

	release := c.Hold()
	if err := c.Close(); !errors.Is(err, ErrRecorded) {
		t.Errorf("Close beside a recording: %v", err)
	}
	release()
	release()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if err := c.Barrier(s); !errors.Is(err, ErrAborted) {
		t.Errorf("Barrier after Close: %v", err)
	}
	if err := errors.Join(c.Close(), c.Abort(), c.AsyncError()); !errors.Is(err, ErrAborted) {
		t.Errorf("a second Close: %v", err)
	}
	t.Setenv("FAKE_NCCL_FAIL", "ncclGetUniqueId")
	if _, err := lib.UniqueID(); !errors.As(err, &e) {
		t.Errorf("UniqueID: %v", err)
	}
}

// A collective waits for the others until the abort.
func TestAbort(t *testing.T) {
	lib, dev, s := open(t)
	id, err := lib.UniqueID()
	if err != nil {
		t.Fatal(err)
	}
	// Rank 1 comes, and takes part in nothing.
	ready := make(chan error)
	go func() {
		var handle uintptr
		if r := lib.fn.commInit.call(uintptr(unsafe.Pointer(&handle)), 2, 1, 1, uintptr(unsafe.Pointer(&id)), 0); r != 0 {
			ready <- lib.failed(r, &lib.fn.commInit)
			return
		}
		lib.fn.commAbort.call(handle)
		ready <- nil
	}()
	c, err := lib.Init(dev, 2, 0, &id)
	if err = errors.Join(err, <-ready); err != nil {
		t.Fatal(err)
	}
	if err := c.Barrier(s); err != nil {
		t.Fatal(err)
	}
	aborted := make(chan error)
	time.AfterFunc(100*time.Millisecond, func() { aborted <- c.Abort() })
	began := time.Now()
	if err := s.Synchronize(); err != nil {
		t.Error(err)
	}
	if took := time.Since(began); took < 50*time.Millisecond || took > 10*time.Second {
		t.Errorf("a collective without the other ended after %v", took)
	}
	if err := <-aborted; err != nil {
		t.Error(err)
	}
}
