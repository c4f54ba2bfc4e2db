package main

import (
	"bytes"
	"fmt"
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
	// The PTX of an image is what a GPU without cubins would have been given.
	ptx, raw := t.TempDir(), t.TempDir()
	if err := run(append(check, "-arch", "90", "-ptx", ptx), &bytes.Buffer{}); err != nil {
		t.Error(err)
	}
	if err := run([]string{"-sources", dir, "-o", raw, "-arch", "ptx90a", "-raw"}, &bytes.Buffer{}); err != nil {
		t.Error(err)
	}
	const name = "tiny.compute_90a.ptx"
	got, err := os.ReadFile(filepath.Join(ptx, name))
	want, err2 := os.ReadFile(filepath.Join(raw, name))
	if err != nil || err2 != nil || !bytes.Equal(got, want) || len(got) == 0 {
		t.Errorf("%v, %v: the image was made of\n%s\nwant\n%s", err, err2, got, want)
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

// float8 is a Store that there are no conversions of.
const float8 = `
struct Float8 {
  using Element = unsigned char;
  static constexpr int type = 9, bytes = 1;
  static constexpr bool scaled = false;
  __device__ static uint2 pack4(float4) { return make_uint2(0, 0); }
  __device__ static void store4(void*, long long, float4) {}
};
using Float8AsF16 = Format<Float8, MmaF16>;
`

// unpacked is what it takes for attention to know one: operands from a chunk in shared memory.
const unpacked = `
template <class S> struct ChunkOperands<S, false> {
  static __device__ void none(u32 (&x)[4]) { x[0] = x[1] = x[2] = x[3] = 0; }
  static __device__ void keysRight(u32 (&b)[4], u32, int, int, int) { none(b); }
  static __device__ void keysLeft(u32 (&a)[4], u32, int, int, int) { none(a); }
  static __device__ void valuesRight(u32 (&b)[4], u32, int, int, int) { none(b); }
  static __device__ void valuesLeft(u32 (&a)[4], u32, int, int, int) { none(a); }
};
`

// Elements in memory are no operands of a product unless something says how they become
// some: each kernel refuses a new Store with a message, and takes it where it is known.
func TestStores(t *testing.T) {
	needCompiler(t)
	const (
		attention = "extern \"C\" __global__ void k(const __grid_constant__ LaunchParams p) { extern __shared__ __align__(1024) char memory[]; Lean<Float8AsF16, Plain, 64>::run(p.p, p.meet, p.prefetched, &p.keyMap, memory); }\n"
		weights   = "extern \"C\" __global__ void k(const __grid_constant__ LinearParams p) { Gemv<Float8AsF16>::run(p); }\n"
		batches   = "extern \"C\" __global__ void k(const __grid_constant__ SkinnyParams p) { SkinnyGemm<%s>::run(p); }\n"
	)
	for name, c := range map[string]struct {
		arch, text string
		want       string // "" if it compiles
	}{
		"attention":                     {"80", "#include \"attn_lean.cuh\"\n" + float8 + attention, "elements of this Store are not unpacked to operands of this Math yet"},
		"attention, copied by TMA":      {"90", "#include \"attn_lean.cuh\"\n" + float8 + attention, "elements of this Store are not unpacked to operands of this Math yet"},
		"attention that unpacks, TMA":   {"90", "#include \"attn_lean.cuh\"\n" + float8 + unpacked + attention, ""},
		"attention with scales":         {"80", "#include \"attn_lean.cuh\"\n" + strings.Replace(float8, "scaled = false", "scaled = true", 1) + unpacked + attention, "nothing applies scales yet"},
		"prompts":                       {"90", "#include \"attn_prefill.cuh\"\n" + float8 + "extern \"C\" __global__ void k(const __grid_constant__ PrefillParams p) { Prefill<Float8AsF16, Plain, 64, 3, 128, 4>::run(p); }\n", "what is in shared memory is multiplied as it is"},
		"weights of few rows":           {"80", "#include \"gemm_gemv.cuh\"\n" + float8 + weights, "elements of this Store are not unpacked to operands of this Math yet"},
		"weights of a batch":            {"90", "#include \"gemm_skinny.cuh\"\n" + float8 + fmt.Sprintf(batches, "Float8AsF16, Float16, 8, 8"), "warp groups multiply what is in shared memory as it is"},
		"weights of many rows":          {"90", "#include \"gemm_tiled.cuh\"\n" + float8 + "extern \"C\" __global__ void k(const __grid_constant__ GemmParams p) { TiledGemm<Float8AsF16, 32>::run(p); }\n", "a step's columns are one column block of operands"},
		"weights of a decoder's step":   {"90", "#include \"megakernel.cuh\"\n" + float8 + "extern \"C\" __global__ void k(const __grid_constant__ DecodeLaunch p) { Megakernel<Float8AsF16, AsF16, 64, 1>::run(p); }\n", "a box is so many columns"},
		"keys of a decoder's step":      {"90", "#include \"megakernel.cuh\"\n" + float8 + "extern \"C\" __global__ void k(const __grid_constant__ DecodeLaunch p) { Megakernel<AsF16, Float8AsF16, 64, 1>::run(p); }\n", "a lane appends four elements as two words"},
		"a product of warp groups":      {"90", "#include \"wgmma.cuh\"\n#ifdef __CUDA_ARCH_FEAT_SM90_ALL\nextern \"C\" __global__ void k() { float d[8][4] = {}; Wgmma<64>::shared<MmaTF32>(d, 0, 0, 0); }\n#endif\n", "there is no such product"},
		"a batch's keys of other types": {"90", "#include \"gemm_skinny.cuh\"\n" + float8 + fmt.Sprintf(batches, "AsF16, Float8, 8, 8"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			headers, err := filepath.Glob("../*.cuh")
			if err != nil || headers == nil {
				t.Fatal(headers, err)
			}
			files := map[string]string{"tiny.cu": c.text}
			for _, h := range headers {
				text, err := os.ReadFile(h)
				if err != nil {
					t.Fatal(err)
				}
				files[filepath.Base(h)] = string(text)
			}
			write(t, dir, files)
			err = run([]string{"-sources", dir, "-o", t.TempDir(), "-arch", c.arch}, &bytes.Buffer{})
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q in it", err, c.want)
			}
		})
	}
}
