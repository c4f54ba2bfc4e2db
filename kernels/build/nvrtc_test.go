package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/kernels/internal/pack"
)

// needCompiler skips where the compiler has not been fetched: tests don't.
func needCompiler(t *testing.T) {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err == nil {
		_, err = os.Stat(filepath.Join(cache, "leanattention", "nvrtc-"+version))
	}
	if err != nil {
		t.Skip("no compiler; go -C kernels/build run . -fetch")
	}
}

// sources copies testdata to a directory of a name that no other has.
func sources(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// The images depend on the sources alone: not on where these are, nor on what
// was compiled before or is at the same time.
func TestCompile(t *testing.T) {
	needCompiler(t)
	var modules [2]string
	for i := range modules {
		modules[i] = t.TempDir()
		var said bytes.Buffer
		if err := run([]string{"-v", "-raw", "-sources", sources(t), "-o", modules[i]}, &said); err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"tiny sm_80: ", "tiny compute_90: ", "tiny: 2 kernels, ", "tiny_spill  sm_90   64 registers    128 shared"} {
			if !strings.Contains(said.String(), want) {
				t.Errorf("it did not say %q but\n%s", want, &said)
			}
		}
	}
	for _, name := range []string{"tiny.json", "tiny.bin", "tiny.sm_80.cubin", "tiny.compute_90.ptx"} {
		a, err := os.ReadFile(filepath.Join(modules[0], name))
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(filepath.Join(modules[1], name))
		if err != nil || !bytes.Equal(a, b) {
			t.Errorf("%s differs: %v", name, err)
		}
	}

	text, err := os.ReadFile(filepath.Join(modules[0], "tiny.json"))
	if err != nil {
		t.Fatal(err)
	}
	m, err := pack.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if scale, spill := m.Entries["tiny_scale"], m.Entries["tiny_spill"]; !strings.HasPrefix(scale, "registers ") || strings.Contains(scale, "spilled") ||
		!strings.HasPrefix(spill, "registers 64, shared 128, stack ") || !strings.Contains(spill, "spilled") {
		t.Errorf("kernels: %q", m.Entries)
	}
}

// A module that its source does not give is found, though its manifest says all
// that it should.
func TestCompare(t *testing.T) {
	needCompiler(t)
	dir, out := sources(t), t.TempDir()
	at := []string{"-sources", dir, "-o", out}
	if err := run(at, &bytes.Buffer{}); err != nil {
		t.Fatal(err)
	}
	check := append(at, "-check", "-a")
	if err := run(check, &bytes.Buffer{}); err != nil {
		t.Errorf("nothing changed: %v", err)
	}
	module(t, dir, out, "tiny", nil)
	if err := run(append(at, "-check"), &bytes.Buffer{}); err != nil {
		t.Fatalf("without a compiler nothing is wrong with it: %v", err)
	}
	if err := run(check, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), "tiny for sm_80 is not what its source gives") {
		t.Errorf("made up images: %v", err)
	}
}

func TestCompileErrors(t *testing.T) {
	needCompiler(t)
	dir, out := sources(t), t.TempDir()
	for _, c := range []struct{ text, want string }{
		{"extern \"C\" __global__ void k(int* x) {\n  *x = missing;\n}", `tiny.cu(2): error: identifier "missing" is undefined`},
		{"#include <nowhere.h>\n", "nowhere.h"},
		{"#if __CUDA_ARCH__ >= 900\nextern \"C\" __global__ void k() {}\n#endif\nextern \"C\" __global__ void l() {}\n", "kernel k is missing for sm_80"},
		{"void nothing() {}\n", "there are no kernels"},
	} {
		write(t, dir, map[string]string{"tiny.cu": c.text})
		err := run([]string{"-sources", dir, "-o", out}, &bytes.Buffer{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %q in it", err, c.want)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(out, "*")); left != nil {
		t.Errorf("a build that failed left %q", left)
	}
}
