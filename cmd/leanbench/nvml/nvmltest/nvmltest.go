//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

// Package nvmltest builds an NVML that needs no GPU, for tests.
package nvmltest

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/ebitengine/purego"
)

//go:embed testdata/nvml.c
var source []byte

// Library is a built one, which tests may change.
type Library struct {
	Path string
	lib  uintptr
}

// built are the libraries of a test binary: the C compiler runs once for each name.
var built = make(map[string]*Library)

// New is the library in its first state: a GPU called name whose counter moves at every third look, by 2.5 J, and whose
// multiprocessors are busy for 75%, and its memory for 50%. Skips the test where there is no C compiler. Tests that use it must not run at once.
func New(t testing.TB, name string) *Library {
	t.Helper()
	l := built[name]
	if l == nil {
		l = build(t, name)
		built[name] = l
	}
	l.Fail(0)
	t.Cleanup(func() {
		if n := l.call("fake_opened"); n != 0 {
			t.Errorf("NVML was initialised %d times more than it was shut down", n)
		}
		if n := l.call("fake_samples"); n != 0 {
			t.Errorf("%d samples of counters were not given back", n)
		}
	})
	return l
}

func build(t testing.TB, name string) *Library {
	t.Helper()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(cc); err != nil {
		t.Skip("no C compiler: the fake NVML can't be built")
	}
	dir, err := os.MkdirTemp("", "nvmltest")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir) // an open library needs its file no more
	src, l := filepath.Join(dir, "nvml.c"), &Library{Path: filepath.Join(dir, "libnvml-fake.so")}
	if err := os.WriteFile(src, source, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-shared", "-fPIC", `-DNAME="`+name+`"`, "-Wl,-soname,libnvml-fake.so", "-o", l.Path, src).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if l.lib, err = purego.Dlopen(l.Path, purego.RTLD_NOW|purego.RTLD_LOCAL); err != nil {
		t.Fatal(err)
	}
	return l
}

// Fail makes the counter of energy return an error.
func (l *Library) Fail(code int) { l.call("fake_fail", uintptr(code)) }

func (l *Library) call(name string, args ...uintptr) int {
	addr, err := purego.Dlsym(l.lib, name)
	if err != nil {
		panic(err) // the source lacks it
	}
	r, _, _ := purego.SyscallN(addr, args...)
	return int(int32(r))
}
