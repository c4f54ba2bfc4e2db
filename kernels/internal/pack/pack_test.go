package pack

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

// noise is bytes that don't pack.
func noise(rng *rand.Rand, n int) []byte {
	data := make([]byte, n)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	return data
}

func random(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func TestSqueeze(t *testing.T) {
	rng := random(t)
	far := noise(rng, 100_000)
	altered := bytes.Clone(far)
	for i := 50; i < len(altered); i += 100 {
		altered[i]++
	}
	for name, c := range map[string]struct {
		data []byte
		most int // bytes
	}{
		"empty":                 {nil, 10},
		"one byte":              {[]byte{7}, 10},
		"seven bytes":           {[]byte("sm_90ab"), 20},
		"zeros":                 {make([]byte, 1<<20), 100},
		"a period of three":     {bytes.Repeat([]byte("abc"), 100_000), 100},
		"noise":                 {far, 101_000},
		"noise again":           {slices.Concat(far, far), 101_000},
		"noise altered":         {slices.Concat(far, altered), 110_000},
		"noise in other places": {slices.Concat(far, far[60_000:], []byte{1}, far[:60_000], far[50_000:70_000]), 101_000},
		"24 bytes each":         {slices.Concat(far[:240], far[96:120], far[0:24], far[200:224], far[:12]), 330},
	} {
		t.Run(name, func(t *testing.T) {
			packed, err := squeeze(c.data)
			if err != nil {
				t.Fatal(err)
			}
			if len(packed) > c.most {
				t.Errorf("%d bytes pack to %d, want %d at most", len(c.data), len(packed), c.most)
			}
			got, err := unsqueeze(packed, len(c.data))
			if err != nil || !bytes.Equal(got, c.data) {
				t.Fatalf("%d bytes of %d came back: %v", len(got), len(c.data), err)
			}
			for _, wrong := range []int{len(c.data) + 1, len(c.data) + 1000, len(c.data) - 1, 0} {
				if wrong < 0 || wrong == len(c.data) {
					continue
				}
				if _, err := unsqueeze(packed, wrong); !errors.Is(err, ErrCorrupt) {
					t.Errorf("size %d for %d: %v", wrong, len(c.data), err)
				}
			}
		})
	}
}

// stream deflates what an archive is made of.
func stream(parts ...[]byte) []byte {
	var out bytes.Buffer
	w, _ := flate.NewWriter(&out, 1)
	for _, p := range parts {
		w.Write(p)
	}
	w.Close()
	return out.Bytes()
}

func steps(numbers ...int64) []byte {
	var s []byte
	for i, n := range numbers {
		if i%3 == 2 {
			s = binary.AppendVarint(s, n)
		} else {
			s = binary.AppendUvarint(s, uint64(n))
		}
	}
	return append(binary.AppendUvarint(nil, uint64(len(s))), s...)
}

func TestUnsqueeze(t *testing.T) {
	for name, c := range map[string]struct {
		packed []byte
		size   int
		want   string // "" for an error
	}{
		"literals":              {stream(steps(), []byte("abcd")), 4, "abcd"},
		"a copy":                {stream(steps(3, 3, 3), []byte("abc")), 6, "abcabc"},
		"a copy of itself":      {stream(steps(2, 7, 1), []byte("abc")), 10, "abbbbbbbbc"},
		"two copies":            {stream(steps(3, 3, 3, 1, 2, -2), []byte("abcd")), 9, "abcabcddd"},
		"not DEFLATE":           {[]byte("abcdefgh"), 4, ""},
		"nothing":               {nil, 0, ""},
		"an empty stream":       {stream(), 0, ""},
		"more steps than there": {stream([]byte{9, 1, 1, 2}), 4, ""},
		"half a step":           {stream([]byte{2, 1, 1}, []byte("abc")), 4, ""},
		"too few literals":      {stream(steps(4, 1, 1), []byte("abc")), 5, ""},
		"too many literals":     {stream(steps(), []byte("abcde")), 4, ""},
		"too far back":          {stream(steps(3, 3, 4), []byte("abc")), 6, ""},
		"too far back then":     {stream(steps(3, 3, 3, 0, 1, 4), []byte("abc")), 7, ""},
		"no distance":           {stream(steps(3, 3, 0), []byte("abc")), 6, ""},
		"ahead":                 {stream(steps(3, 3, -1), []byte("abc")), 6, ""},
		"too long a copy":       {stream(steps(3, 4, 1), []byte("abc")), 6, ""},
		"an endless copy":       {stream(steps(3, 1<<62, 1), []byte("abc")), 6, ""},
		"literals and no end":   {stream(steps(-1, 1, 1), []byte("abc")), 6, ""},
	} {
		got, err := unsqueeze(c.packed, c.size)
		if c.want == "" {
			if !errors.Is(err, ErrCorrupt) {
				t.Errorf("%s: %q, %v, want an error", name, got, err)
			}
		} else if err != nil || string(got) != c.want {
			t.Errorf("%s: %q, %v, want %q", name, got, err, c.want)
		}
	}
}

// FuzzUnsqueeze takes its input for data, for an archive, and for what an
// archive has inside its DEFLATE stream.
func FuzzUnsqueeze(f *testing.F) {
	f.Add([]byte("a cubin and a cubin and a cubin and a cubin"), 43)
	f.Add(append(steps(3, 3, 3, 1, 2, -2), "abcd"...), 9)
	f.Add(append(steps(3, 1<<62, 1), "abc"...), 12)
	f.Fuzz(func(t *testing.T, data []byte, size int) {
		packed, err := squeeze(data)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := unsqueeze(packed, len(data)); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes of %d came back: %v", len(got), len(data), err)
		}
		size = min(max(size, 0), 1<<20)
		for _, packed := range [][]byte{data, stream(data)} {
			got, err := unsqueeze(packed, size)
			if err == nil && len(got) != size || err != nil && !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%d bytes, want %d: %v", len(got), size, err)
			}
		}
	})
}

func TestManifest(t *testing.T) {
	rng := random(t)
	m := &Manifest{
		Compiler: "NVRTC 1.2", Options: []string{"--std=c++17"},
		Sources: []Source{{"lean.cu", Sum([]byte("x"))}},
		Entries: map[string]string{"lean_f16_64": "registers 128"},
	}
	archs := []string{"sm_80", "sm_90", "compute_90"}
	images := [][]byte{noise(rng, 5000), nil, []byte(".version 8.4")}
	archive, err := m.Pack(archs, images)
	if err != nil {
		t.Fatal(err)
	}
	text, err := m.Format()
	if err != nil {
		t.Fatal(err)
	}
	back, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if why := back.Stale(m, archs); why != "" || !maps.Equal(back.Entries, m.Entries) || back.Packed != len(archive) {
		t.Fatalf("%+v came back as %+v: %s", m, back, why)
	}
	got, err := back.Unpack(archive)
	if err != nil || !slices.EqualFunc(got, images, bytes.Equal) {
		t.Fatalf("other images came back: %v", err)
	}
	if _, err := back.Unpack(archive[:len(archive)-1]); !errors.Is(err, ErrCorrupt) {
		t.Errorf("an archive without its end: %v", err)
	}
	back.Images[0].SHA256 = Sum(nil)
	if _, err := back.Unpack(archive); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "sm_80") {
		t.Errorf("an image with another sum: %v", err)
	}

	for name, change := range map[string]func(*Manifest){
		"made by": func(m *Manifest) { m.Compiler = "NVRTC 1.3" },
		"with":    func(m *Manifest) { m.Options = []string{"--use_fast_math"} },
		"lean.cu": func(m *Manifest) { m.Sources = []Source{{"lean.cu", Sum([]byte("y"))}} },
		"mma.cuh": func(m *Manifest) { m.Sources = append(slices.Clip(m.Sources), Source{"mma.cuh", Sum(nil)}) },
	} {
		now := *m
		change(&now)
		if why := m.Stale(&now, archs); !strings.Contains(why, name) {
			t.Errorf("another manifest: %q, want %q in it", why, name)
		}
		if why := now.Stale(m, archs); !strings.Contains(why, name) {
			t.Errorf("another manifest: %q, want %q in it", why, name)
		}
	}
	if why := m.Stale(m, archs[1:]); !strings.Contains(why, "sm_80") {
		t.Errorf("for other architectures: %q", why)
	}
}

func TestParseErrors(t *testing.T) {
	for _, text := range []string{
		``, `[]`, `{"compilers": "x"}`,
		`{"images": [{"arch": "sm90"}]}`,
		`{"images": [{"arch": "sm_"}]}`,
		`{"images": [{"arch": "sm_-90"}]}`,
		`{"images": [{"arch": "sm_90", "size": -1}]}`,
		`{"images": [{"arch": "sm_90", "size": 1000000000000}]}`,
		`{"images": [{"arch": "sm_80", "size": 200000000}, {"arch": "sm_90", "size": 200000000}]}`,
	} {
		if m, err := Parse([]byte(text)); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %+v, %v", text, m, err)
		}
	}
}

func TestSources(t *testing.T) {
	dir := fstest.MapFS{}
	for name, text := range map[string]string{
		"lean.cu":    "#include <cuda_fp16.h>\n#include \"mma.cuh\"\n// #include \"no.cuh\"\n",
		"mma.cuh":    "#pragma once\n#if 0\n  # include \"types.cuh\" // ours\n#endif\n",
		"types.cuh":  "#include \"mma.cuh\"\n",
		"other.cuh":  "",
		"nn.cu":      "#include \"empty.cuh\"",
		"empty.cuh":  "",
		"missing.cu": "#include \"nowhere.cuh\"",
		"away.cu":    "#include \"../go.mod\"",
	} {
		dir[name] = &fstest.MapFile{Data: []byte(text)}
	}
	units, err := Units(dir)
	if want := []string{"away", "lean", "missing", "nn"}; err != nil || !slices.Equal(units, want) {
		t.Errorf("units %q, %v, want %q", units, err, want)
	}
	for unit, want := range map[string][]string{
		"lean": {"lean.cu", "mma.cuh", "types.cuh"},
		"nn":   {"empty.cuh", "nn.cu"},
	} {
		files, err := Read(dir, unit)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, s := range Sources(files) {
			names = append(names, s.Name)
			if s.SHA256 != Sum(dir[s.Name].Data) {
				t.Errorf("%s has SHA-256 %s", s.Name, s.SHA256)
			}
		}
		if !slices.Equal(names, want) {
			t.Errorf("%s is made of %q, want %q", unit, names, want)
		}
	}
	for unit, want := range map[string]string{"missing": "nowhere.cuh", "away": "../go.mod", "none": "none.cu"} {
		if _, err := Read(dir, unit); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q in it", unit, err, want)
		}
	}
}

func TestNeed(t *testing.T) {
	for source, want := range map[string]string{
		"": "",
		"// Attention.\n//\n// Needed by: every decode.\n#include \"a.cuh\"\n":     EveryDecode,
		"// Needed by: prompts, of many rows: they have tiles of their own.  \r\n": "",
		"// Needed by: prompts, of many rows: they have tiles of their own. \n":    "prompts, of many rows: they have tiles of their own",
		"// Needed by: \n//.\n":              "",
		"int x; // Needed by: every decode.": "",
		"// Needed by: every decode\n":       "",
	} {
		if got := Need([]byte(source)); got != want {
			t.Errorf("%q is needed by %q, want %q", source, got, want)
		}
	}
}
