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

// New builds the library: a GPU called name whose counter moves at every third look, by 2.5 J. Skips
// the test where there is no C compiler.
func New(t testing.TB, name string) *Library {
	t.Helper()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	if _, err := exec.LookPath(cc); err != nil {
		t.Skip("no C compiler: the fake NVML can't be built")
	}
	dir := t.TempDir()
	src, l := filepath.Join(dir, "nvml.c"), &Library{Path: filepath.Join(dir, "libnvml.so")}
	if err := os.WriteFile(src, source, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(cc, "-shared", "-fPIC", `-DNAME="`+name+`"`, "-o", l.Path, src).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var err error
	if l.lib, err = purego.Dlopen(l.Path, purego.RTLD_NOW|purego.RTLD_LOCAL); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if n := l.call("fake_opened"); n != 0 {
			t.Errorf("NVML was initialised %d times more than it was shut down", n)
		}
	})
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
