package main

import (
	"archive/zip"
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/kernels/internal/pack"
)

// write makes files in a directory.
func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// module writes a unit's module as a build would have.
func module(t *testing.T, sources, out, name string, change func(*pack.Manifest)) {
	t.Helper()
	files, err := pack.Read(os.DirFS(sources), name)
	if err != nil {
		t.Fatal(err)
	}
	var images [][]byte
	for _, arch := range targets {
		images = append(images, []byte("image "+arch))
	}
	u := &unit{name, files, &pack.Manifest{Compiler: compiler, Options: options, Sources: pack.Sources(files)}, targets, make([]string, len(targets))}
	if change != nil {
		change(u.now)
	}
	b := &builder{config: &config{out: out}, stdout: &bytes.Buffer{}}
	if err := b.write(u, images); err != nil {
		t.Fatal(err)
	}
}

func TestCheck(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(t *testing.T, sources, out string)
		manifest func(*pack.Manifest)
		want     string
	}{
		"nothing":        {},
		"another source": {change: func(t *testing.T, s, o string) { write(t, s, map[string]string{"a.cu": "// new"}) }, want: "changed since: a.cu, a.cuh"},
		"another header": {change: func(t *testing.T, s, o string) { write(t, s, map[string]string{"a.cuh": "// new"}) }, want: "changed since: a.cuh"},
		"a header that it does not include": {change: func(t *testing.T, s, o string) {
			write(t, s, map[string]string{"b.cuh": "// new"})
		}},
		"a new unit":          {change: func(t *testing.T, s, o string) { write(t, s, map[string]string{"b.cu": ""}) }, want: "b.json"},
		"a unit less":         {change: func(t *testing.T, s, o string) { os.Remove(filepath.Join(s, "a.cu")) }, want: "has no source"},
		"no archive":          {change: func(t *testing.T, s, o string) { os.Remove(filepath.Join(o, "a.bin")) }, want: "a.bin"},
		"a broken archive":    {change: func(t *testing.T, s, o string) { write(t, o, map[string]string{"a.bin": "x"}) }, want: "corrupt"},
		"a broken manifest":   {change: func(t *testing.T, s, o string) { write(t, o, map[string]string{"a.json": "{"}) }, want: "corrupt"},
		"other options":       {manifest: func(m *pack.Manifest) { m.Options = []string{"--use_fast_math"} }, want: "use_fast_math"},
		"another compiler":    {manifest: func(m *pack.Manifest) { m.Compiler = "NVRTC 12.5" }, want: "NVRTC 12.5"},
		"a header not listed": {manifest: func(m *pack.Manifest) { m.Sources = m.Sources[:1] }, want: "changed since: a.cuh"},
	} {
		t.Run(name, func(t *testing.T) {
			sources, out := t.TempDir(), t.TempDir()
			write(t, sources, map[string]string{"a.cu": `#include "a.cuh"`, "a.cuh": "", "b.cuh": ""})
			module(t, sources, out, "a", c.manifest)
			if c.change != nil {
				c.change(t, sources, out)
			}
			err := run([]string{"-check", "-sources", sources, "-o", out}, &bytes.Buffer{})
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q in it", err, c.want)
			}
		})
	}
}

// A manifest says who needs the unit, as its source does.
func TestManifestNeed(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.cu": "// Needed by: every decode.\n", "b.cu": "// Needed by: prompts.\n", "c.cu": ""})
	units, err := (&builder{config: &config{sources: dir}}).load()
	if err != nil || len(units) != 3 {
		t.Fatalf("%d units, %v", len(units), err)
	}
	for i, want := range []string{pack.EveryDecode, "prompts", ""} {
		if got := units[i].now.Need; got != want {
			t.Errorf("%s is needed by %q, want %q", units[i].name, got, want)
		}
	}
}

// A unit has images for all architectures but those that its source leaves out.
func TestUnitTargets(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"a.cu": "", "b.cu": "// No images for: sm_86, sm_89.\n"})
	units, err := (&builder{config: &config{sources: dir}}).load()
	if err != nil || !slices.Equal(units[0].targets, targets) || !slices.Equal(units[1].targets, []string{"sm_80", "sm_90", "compute_90"}) {
		t.Errorf("%v, %v", units, err)
	}
	write(t, dir, map[string]string{"b.cu": "// No images for: sm_86, sm_88.\n"})
	if _, err := (&builder{config: &config{sources: dir}}).load(); err == nil || !strings.Contains(err.Error(), `b: no images for "sm_88"`) {
		t.Error(err)
	}
}

// Compiled images are those of the module, for the architectures that the unit has
// images for.
func TestSameImages(t *testing.T) {
	u := &unit{name: "a", targets: []string{"sm_80", "sm_90"}, now: &pack.Manifest{}}
	old := &pack.Manifest{Images: []pack.Image{{Arch: "sm_80"}, {Arch: "sm_90", PTX: pack.Sum([]byte("of 90a"))}}}
	committed := [][]byte{[]byte("of 80"), []byte("of 90")}
	for _, c := range []struct {
		name           string
		archs, targets []string
		images         string
		said, want     string
	}{
		{"all", nil, u.targets, "of 80,of 90", "a sm_80: the same bytes\na sm_90: the same bytes\n", ""},
		{"one", []string{"sm_90"}, u.targets, "of 90", "a sm_90: the same bytes\n", ""},
		{"left out", []string{"sm_86"}, u.targets, "of 86", "a: no image for sm_86, as its source says\n", ""},
		{"not in the module", []string{"sm_89"}, []string{"sm_80", "sm_89"}, "of 89", "", "a has no image for sm_89"},
		{"another", []string{"sm_90"}, u.targets, "another", "", "a for sm_90 is not what its source gives: 5 bytes, 7 now"},
		{"PTX", []string{frontEnd}, u.targets, "of 90a", "a sm_90: the same PTX\n", ""},
		{"other PTX", []string{frontEnd}, u.targets, "another", "", "a for sm_90: the image was assembled from PTX with SHA-256 \"" + old.Images[1].PTX + "\", its source gives " + pack.Sum([]byte("another"))},
		{"PTX, left out", []string{frontEnd}, u.targets[:1], "of 90a", "a: no image for sm_90, as its source says\n", ""},
	} {
		var images [][]byte
		u.ptx = nil
		for image := range strings.SplitSeq(c.images, ",") {
			images, u.ptx = append(images, []byte(image)), append(u.ptx, pack.Sum([]byte(image)))
		}
		var said bytes.Buffer
		b := &builder{config: &config{archs: c.archs}, stdout: &said}
		u.targets = c.targets
		err := b.same(u, old, committed, images)
		if c.want == "" && err != nil || c.want != "" && (err == nil || err.Error() != c.want) || said.String() != c.said {
			t.Errorf("%s: said %q, %v, want %q, %q", c.name, &said, err, c.said, c.want)
		}
	}
}

// A build of what is up to date needs no compiler; without units nothing is made.
func TestUpToDate(t *testing.T) {
	sources, out := t.TempDir(), t.TempDir()
	no := []string{"-sources", sources, "-o", out, "-nvrtc", t.TempDir(), "-headers", t.TempDir()}
	if err := run(no, &bytes.Buffer{}); err != nil {
		t.Errorf("without units: %v", err)
	}
	write(t, sources, map[string]string{"a.cu": ""})
	module(t, sources, out, "a", nil)
	write(t, out, map[string]string{"gone.bin": "", "gone.json": "", "README": ""})
	var said bytes.Buffer
	if err := run(no, &said); err != nil || said.String() != "a is up to date\n" {
		t.Errorf("%q, %v", &said, err)
	}
	left, err := filepath.Glob(filepath.Join(out, "*"))
	for i := range left {
		left[i] = filepath.Base(left[i])
	}
	if err != nil || !slices.Equal(left, []string{"README", "a.bin", "a.json"}) {
		t.Errorf("there are %q, %v", left, err)
	}
	if err := run(append(no, "-a"), &bytes.Buffer{}); err == nil {
		t.Error("it was compiled without a compiler")
	}
}

func TestFlags(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-arch", "90"}, "needs a directory"},
		{[]string{"-arch", "75", "-o", t.TempDir()}, "sm_80, sm_86"},
		{[]string{"-ptx", t.TempDir()}, "-ptx needs one -arch"},
		{[]string{"-ptx", t.TempDir(), "-arch", "80,90", "-check"}, "-ptx needs one -arch"},
		{[]string{"-ptx", t.TempDir(), "-arch", "ptx80", "-o", t.TempDir()}, "-ptx needs one -arch"},
		{[]string{"-ptx", t.TempDir(), "-arch", "ptx80", "-check"}, "modules have no hash of compute_80"},
		{[]string{"-unit", "none", "-o", t.TempDir()}, "none.cu"},
		{[]string{"lean"}, "lean"},
		{[]string{"-fast"}, "-fast"},
	} {
		if err := run(c.args, &bytes.Buffer{}); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q: %v, want %q in it", c.args, err, c.want)
		}
	}
}

const ptxasLog = `tiny.cu(7): warning #177-D: variable "hidden" was declared but never referenced
ptxas info    : 20 bytes gmem, 16 bytes cmem[4]
ptxas info    : Compiling entry function 'k200' for 'sm_80'
ptxas info    : Function properties for k200
ptxas         .     1744 bytes stack frame, 3464 bytes spill stores, 3388 bytes spill loads
ptxas info    : Used 32 registers, 1744 bytes cumulative stack size, 512 bytes smem, 368 bytes cmem[0]
ptxas info    : Function properties for helper
ptxas         .     8 bytes stack frame, 3 bytes spill stores, 4 bytes spill loads
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function 'k16' for 'sm_80'
ptxas info    : Function properties for k16
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 56 registers, 368 bytes cmem[0]
`

func TestReadUsage(t *testing.T) {
	kernels, rest := readUsage(ptxasLog)
	if len(kernels) != 2 || kernels["k200"] != (usage{32, 512, 1744, 3464 + 3388 + 7}) || kernels["k16"] != (usage{56, 0, 0, 0}) {
		t.Errorf("%+v", kernels)
	}
	if len(rest) != 2 || !strings.Contains(rest[0], "#177-D") || !strings.Contains(rest[1], "C7510") {
		t.Errorf("besides: %q", rest)
	}

	other := map[string]usage{"k200": {40, 512, 1744, 0}, "k16": {56, 0, 0, 0}}
	ptx := ptxEntries([]byte(".visible .entry k16(\n.param .u64 k16_param_0\n)\n\t.entry k200\n(// .entry no(\n"))
	archs := []string{"sm_80", "sm_86", "compute_90"}
	joined, err := entries(archs, []map[string]usage{kernels, other, ptx})
	if err != nil || len(joined) != 2 || joined["k16"] != "registers 56" ||
		joined["k200"] != "registers 32 40, shared 512, stack 1744, spilled 6859 0" {
		t.Errorf("%q, %v", joined, err)
	}
	delete(ptx, "k200")
	if _, err := entries(archs, []map[string]usage{kernels, other, ptx}); err == nil || !strings.Contains(err.Error(), "k200 is missing for compute_90") {
		t.Errorf("a kernel less: %v", err)
	}
	if _, err := entries(archs[:1], []map[string]usage{{}}); err == nil {
		t.Error("no kernels: no error")
	}
}

func TestUnzip(t *testing.T) {
	for name, want := range map[string]string{
		"nvidia/cuda_nvrtc/lib/libnvrtc.so.12":                       "lib/libnvrtc.so.12",
		"nvidia/cuda_runtime/include/cuda_fp16.h":                    "include/cuda_fp16.h",
		"nvidia/cuda_runtime/include/cooperative_groups/details/x.h": "include/cooperative_groups/details/x.h",
		"nvidia/cuda_runtime/lib/libcudart.so.12":                    "",
		"nvidia/cuda_runtime/include/../../../../evil.h":             "error",
	} {
		dir := t.TempDir()
		wheel := filepath.Join(dir, "x.whl")
		var data bytes.Buffer
		z := zip.NewWriter(&data)
		f, err := z.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		f.Write([]byte("text"))
		if err := z.Close(); err != nil {
			t.Fatal(err)
		}
		write(t, dir, map[string]string{"x.whl": data.String()})
		out := filepath.Join(dir, "out")
		err = unzip(wheel, out)
		var made []string
		filepath.Walk(out, func(path string, info os.FileInfo, err error) error {
			if err == nil && !info.IsDir() {
				rel, _ := filepath.Rel(out, path)
				made = append(made, filepath.ToSlash(rel))
			}
			return nil
		})
		if got := strings.Join(made, " "); want == "error" && (err == nil || got != "") || want != "error" && (err != nil || got != want) {
			t.Errorf("%s: %q, %v, want %q", name, got, err, want)
		}
	}
}

// TestNumberedCalls: the numbers of calls begin at 0 and have no gaps; other text stays.
func TestNumberedCalls(t *testing.T) {
	for from, want := range map[string]string{
		"{ // callseq 64, 0\n} // callseq 64\n{ // callseq 70, 0\n} // callseq 70\n{ // callseq 9, 0\n} // callseq 9\n": "{ // callseq 1, 0\n} // callseq 1\n{ // callseq 2, 0\n} // callseq 2\n{ // callseq 0, 0\n} // callseq 0\n",
		"{ // callseq 0, 0\n} // callseq 0\n": "{ // callseq 0, 0\n} // callseq 0\n",
		"mov.u32 %r64, 64;":                   "mov.u32 %r64, 64;",
	} {
		if got := string(numberedCalls([]byte(from))); got != want {
			t.Errorf("%q becomes %q, want %q", from, got, want)
		}
	}
}
