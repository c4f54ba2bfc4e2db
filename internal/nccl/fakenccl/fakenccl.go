// Package fakenccl builds an NCCL that needs no GPU, for tests: its ranks are processes of
// this host, with GPUs of package fakedriver or emulated. It works where those do.
package fakenccl

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

//go:embed testdata/nccl.c
var source []byte

// Build makes the library in a folder, and is its path. The test is skipped where there is no C compiler.
func Build(t testing.TB, dir string) string {
	t.Helper()
	compiler := os.Getenv("CC")
	if compiler == "" {
		compiler = "cc"
	}
	if _, err := exec.LookPath(compiler); err != nil {
		t.Skip("no C compiler: the fake NCCL can't be built")
	}
	src, path := filepath.Join(dir, "nccl.c"), filepath.Join(dir, "libnccl.so.2")
	if err := os.WriteFile(src, source, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(compiler, "-shared", "-fPIC", "-O1", "-pthread", "-Wl,-soname,libnccl.so.2", "-o", path, src, "-ldl", "-lrt").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return path
}
