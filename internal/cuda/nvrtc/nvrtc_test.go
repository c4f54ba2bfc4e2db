package nvrtc

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/cuda/library"
)

func TestCompile(t *testing.T) {
	c := ForTest(t)
	files := map[string][]byte{"k.cu": []byte("#include \"two.cuh\"\nextern \"C\" __global__ void k(float* x) { *x *= TWO; }\n"), "two.cuh": []byte("#define TWO 2.f\n")}
	code, err := c.Compile("k.cu", files, "sm_90a")
	if err != nil || !strings.HasPrefix(string(code.Cubin), "\x7fELF") || !strings.Contains(string(code.PTX), ".entry k(") {
		t.Fatalf("%d bytes, %.100q: %v", len(code.Cubin), code.PTX, err)
	}
	if code, err = c.Compile("k.cu", files, "compute_80"); err != nil || len(code.Cubin) != 0 || !strings.Contains(string(code.PTX), ".target sm_80") {
		t.Fatalf("%d bytes, %.100q: %v", len(code.Cubin), code.PTX, err)
	}
	files["two.cuh"] = nil
	if _, err = c.Compile("k.cu", files, "compute_80"); err == nil || !strings.Contains(err.Error(), `k.cu(2): error: identifier "TWO" is undefined`) || !strings.Contains(err.Error(), "NVRTC "+c.Version()) {
		t.Errorf("an error in the source: %v", err)
	}
	if _, err = c.Compile("k.cu", files, "sm_1"); err == nil || !strings.Contains(err.Error(), "nvrtcCompileProgram") {
		t.Errorf("no architecture: %v", err)
	}
	all, err := c.Capabilities()
	if err != nil || !slices.Contains(all, 80) || !slices.Contains(all, 90) {
		t.Errorf("%v, %v", all, err)
	}
}

// Errors name the places that were searched, and the reason why a file there is not usable.
func TestFind(t *testing.T) {
	nowhere := t.TempDir()
	env := func(name string) string {
		return map[string]string{Variable: filepath.Join(nowhere, "libnvrtc.so")}[name]
	}
	if _, err := find(search.Places(env)); !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), nowhere) || !strings.Contains(err.Error(), Variable) {
		t.Errorf("nothing there: %v", err)
	}
	file := filepath.Join(nowhere, search.Names[0])
	if err := os.WriteFile(file, []byte("no library"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := find([]library.Place{{What: "VIRTUAL_ENV", Path: file}, {What: "elsewhere", Path: "/nowhere"}})
	for _, text := range []string{"VIRTUAL_ENV, elsewhere", file + ": ", "pip install", Variable} {
		if !errors.Is(err, ErrNone) || !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %q", err, text)
		}
	}
}

// A folder of the environment's variable, and a Python environment, lead to the library.
func TestPlaces(t *testing.T) {
	path := ForTest(t).Path()
	venv := t.TempDir()
	at := filepath.Join(venv, "lib", "python3.12", "site-packages", "nvidia", "cuda_nvrtc", "lib")
	if err := os.MkdirAll(filepath.Dir(at), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Dir(path), at); err != nil {
		t.Fatal(err)
	}
	for name, to := range map[string]string{Variable: at, "VIRTUAL_ENV": venv} {
		var list []library.Place
		for _, p := range search.Places(func(n string) string { return map[string]string{name: to}[n] }) {
			if strings.HasPrefix(p.Path, venv) { // the machine may have others
				list = append(list, p)
			}
		}
		if c, err := find(list); err != nil || !strings.HasPrefix(c.Path(), venv) {
			t.Errorf("%s: %v of %+v", name, err, list)
		}
	}
}
