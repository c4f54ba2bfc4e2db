package kernels

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	"gorgonia.org/leanattention/kernels/internal/pack"
)

func images(archs ...string) (list []pack.Image) {
	for _, a := range archs {
		list = append(list, pack.Image{Arch: a})
	}
	return list
}

func TestChoose(t *testing.T) {
	all := []string{"sm_80", "sm_86", "sm_89", "sm_90", "compute_90"}
	for _, c := range []struct {
		archs      []string
		capability int
		want       string // "" for none
	}{
		{all, 70, ""},
		{all, 75, ""},
		{all, 80, "sm_80"},
		{all, 81, "sm_80"},
		{all, 86, "sm_86"},
		{all, 87, "sm_86"}, // Orin
		{all, 89, "sm_89"},
		{all, 90, "sm_90"},
		{all, 100, "compute_90"}, // Blackwell
		{all, 103, "compute_90"},
		{all, 120, "compute_90"},
		{all, 0, ""},
		{all, -1, ""},
		{[]string{"sm_86", "sm_90"}, 80, ""},
		{[]string{"sm_86", "sm_90"}, 100, ""},
		{[]string{"compute_80", "compute_90"}, 89, "compute_80"},
		{[]string{"compute_80", "compute_90"}, 90, "compute_90"},
		{[]string{"compute_80", "compute_90"}, 100, "compute_90"},
		{[]string{"compute_90", "sm_80"}, 86, "sm_80"},
		{[]string{"compute_86", "sm_80"}, 86, "sm_80"}, // a cubin, though the PTX is newer
		{nil, 90, ""},
	} {
		for range 2 {
			got := ""
			if i := choose(images(c.archs...), c.capability); i >= 0 {
				got = c.archs[i]
			}
			if got != c.want {
				t.Errorf("of %q a GPU of %d gets %q, want %q", c.archs, c.capability, got, c.want)
			}
			slices.Reverse(c.archs)
		}
	}
}

// module is a store with a unit, each of whose images is its own name.
func module(t *testing.T, change func(manifest, archive []byte) ([]byte, []byte)) *store {
	t.Helper()
	archs := []string{"sm_80", "sm_90", "compute_90"}
	m := &pack.Manifest{Entries: map[string]string{"b": "", "a": "registers 40"}}
	archive, err := m.Pack(archs, [][]byte{[]byte("sm_80"), []byte("sm_90"), []byte("compute_90")})
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := m.Format()
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		manifest, archive = change(manifest, archive)
	}
	files := fstest.MapFS{}
	for name, data := range map[string][]byte{"modules/u.json": manifest, "modules/u.bin": archive} {
		if data != nil {
			files[name] = &fstest.MapFile{Data: data}
		}
	}
	return &store{files: files}
}

func TestImage(t *testing.T) {
	s := module(t, nil)
	var wg sync.WaitGroup
	for capability, want := range map[int]string{80: "sm_80", 86: "sm_80", 90: "sm_90", 100: "compute_90"} {
		wg.Go(func() {
			got, err := s.image("u", capability)
			if err != nil || string(got) != want {
				t.Errorf("%d: %q, %v, want %q", capability, got, err, want)
			}
			again, err := s.image("u", capability)
			if err != nil || &got[0] != &again[0] {
				t.Errorf("%d: unpacked twice: %v", capability, err)
			}
		})
	}
	wg.Wait()
}

func TestImageErrors(t *testing.T) {
	for _, c := range []struct {
		name       string
		capability int
		change     func(manifest, archive []byte) ([]byte, []byte)
		want       error
	}{
		{"too old a GPU", 75, nil, ErrNoImage},
		{"no manifest", 90, func(m, a []byte) ([]byte, []byte) { return nil, a }, ErrNoImage},
		{"a broken manifest", 90, func(m, a []byte) ([]byte, []byte) { return m[:len(m)/2], a }, pack.ErrCorrupt},
		{"no archive", 90, func(m, a []byte) ([]byte, []byte) { return m, nil }, fs.ErrNotExist},
		{"half an archive", 90, func(m, a []byte) ([]byte, []byte) { return m, a[:len(a)/2] }, pack.ErrCorrupt},
		{"an archive of nothing", 90, func(m, a []byte) ([]byte, []byte) { return m, []byte{} }, pack.ErrCorrupt},
		{"another archive", 90, func(m, a []byte) ([]byte, []byte) {
			other := &pack.Manifest{}
			a, _ = other.Pack([]string{"sm_80"}, [][]byte{[]byte("sm_80sm_91compute_90")}) // as long as ours
			return m, a
		}, pack.ErrCorrupt},
	} {
		image, err := module(t, c.change).image("u", c.capability)
		if image != nil || !errors.Is(err, c.want) || !strings.Contains(err.Error(), `unit "u"`) {
			t.Errorf("%s: %q, %v, want %v", c.name, image, err, c.want)
		}
		if capability := "7.5"; c.capability == 75 && !strings.Contains(err.Error(), capability) {
			t.Errorf("%s: %v does not say %s", c.name, err, capability)
		}
	}
	for _, unit := range []string{"", "v", "../u", "u.json", "/u"} {
		if image, err := module(t, nil).image(unit, 90); image != nil || !errors.Is(err, ErrNoImage) {
			t.Errorf("unit %q: %q, %v", unit, image, err)
		}
	}
}

// The modules in this directory, whether or not this binary has them.

func TestModulesAreOfTheseSources(t *testing.T) {
	dir := os.DirFS(".")
	units, err := pack.Units(dir)
	if err != nil {
		t.Fatal(err)
	}
	s := &store{files: dir}
	var want []string
	for _, unit := range units {
		want = append(want, unit+".bin", unit+".json")
		m, err := s.manifest(unit)
		if err != nil {
			t.Errorf("%v; go -C kernels/build run .", err)
			continue
		}
		files, err := pack.Read(dir, unit)
		if err != nil {
			t.Fatal(err)
		}
		if why := pack.Changed(m.Sources, pack.Sources(files)); why != "" {
			t.Errorf("the module of %s.cu is not up to date, %s; go -C kernels/build run .", unit, why)
		}
		source, err := os.ReadFile(unit + ".cu")
		if err != nil {
			t.Fatal(err)
		}
		leftOut := pack.LeftOut(source)
		onlyNew, noneNewer := slices.Contains(leftOut, "sm_80"), slices.Contains(leftOut, "compute_90") // from 9.0 on alone; up to 9.0
		archive, err := fs.ReadFile(dir, "modules/"+unit+".bin")
		if err != nil {
			t.Fatal(err)
		}
		images, err := m.Unpack(archive)
		if err != nil {
			t.Errorf("%s: %v", unit, err)
			continue
		}
		for capability, magic := range map[int]string{80: "\x7fELF", 86: "\x7fELF", 89: "\x7fELF", 90: "\x7fELF", 100: "//\n"} {
			index := choose(m.Images, capability)
			if (onlyNew && capability < 90 || noneNewer && capability > 90) && index < 0 {
				continue
			}
			if index < 0 {
				t.Errorf("%s has no image for %d", unit, capability)
				continue
			}
			image := images[index]
			if !bytes.HasPrefix(image, []byte(magic)) {
				t.Errorf("%s for %d begins with %q", unit, capability, image[:min(8, len(image))])
			}
			for name := range m.Entries {
				if !bytes.Contains(image, []byte(name)) {
					t.Errorf("%s for %d does not have %s", unit, capability, name)
				}
			}
		}
		if whyEmpty == "" {
			for _, ext := range []string{".bin", ".json"} {
				inDir, err := fs.ReadFile(dir, "modules/"+unit+ext)
				embedded, err2 := fs.ReadFile(built.files, "modules/"+unit+ext)
				if err := errors.Join(err, err2); err != nil || !bytes.Equal(embedded, inDir) {
					t.Errorf("%s%s is not embedded: %v", unit, ext, err)
				}
			}
		}
		if len(m.Entries) == 0 {
			t.Errorf("%s has no kernels", unit)
		}
	}
	var have []string
	for _, ext := range []string{"bin", "json"} {
		files, err := fs.Glob(dir, "modules/*."+ext)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			have = append(have, strings.TrimPrefix(f, "modules/"))
		}
	}
	if slices.Sort(have); !slices.Equal(have, want) {
		t.Errorf("modules has %q, want %q", have, want)
	}
}

// What modules may take, packed: those that every decode needs, and all of them, which each
// binary carries.
const (
	mostEveryDecode = 4 << 20
	mostModules     = 19 << 20
)

// overBudget says what is wrong with the modules of a directory.
func overBudget(dir fs.FS) (wrong []string, err error) {
	units, err := fs.Glob(dir, "modules/*.json")
	if err != nil {
		return nil, err
	}
	s, decode, all := &store{files: dir}, 0, 0
	for _, unit := range units {
		unit = strings.TrimSuffix(strings.TrimPrefix(unit, "modules/"), ".json")
		m, err := s.manifest(unit)
		if err != nil {
			return nil, err
		}
		archive, err := fs.Stat(dir, "modules/"+unit+".bin")
		if err != nil {
			return nil, err
		}
		if int64(m.Packed) != archive.Size() {
			wrong = append(wrong, fmt.Sprintf("%s: packed %d bytes, there are %d", unit, m.Packed, archive.Size()))
		}
		if m.Need == "" {
			wrong = append(wrong, unit+": nothing says who needs it")
		}
		if all += m.Packed; m.Need == pack.EveryDecode {
			decode += m.Packed
		}
	}
	if decode > mostEveryDecode {
		wrong = append(wrong, fmt.Sprintf("what every decode needs takes %d bytes, %d is the most", decode, mostEveryDecode))
	}
	if all > mostModules {
		wrong = append(wrong, fmt.Sprintf("modules take %d bytes, %d is the most", all, mostModules))
	}
	return wrong, nil
}

// TestModulesSize bounds what every binary carries, and what each change of a
// kernel adds to the repository.
func TestModulesSize(t *testing.T) {
	dir := os.DirFS(".")
	wrong, err := overBudget(dir)
	if err != nil || wrong != nil {
		t.Errorf("%q, %v", wrong, err)
	}
	// What else is there is small.
	files, err := os.ReadDir("modules")
	if err != nil {
		t.Fatal(err)
	}
	var rest int64
	for _, f := range files {
		if info, err := f.Info(); err != nil {
			t.Fatal(err)
		} else if !strings.HasSuffix(f.Name(), ".bin") {
			rest += info.Size()
		}
	}
	if rest > 144<<10 {
		t.Errorf("manifests take %d bytes", rest)
	}
	// A source says who needs its unit.
	units, err := pack.Units(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, unit := range units {
		text, err := os.ReadFile(unit + ".cu")
		if err != nil {
			t.Fatal(err)
		}
		m, err := (&store{files: dir}).manifest(unit)
		if err != nil || m.Need != pack.Need(text) {
			t.Errorf("%s is needed by %q, its module says %q: %v", unit, pack.Need(text), m.Need, err)
		}
	}
}

func TestBudget(t *testing.T) {
	type unit struct {
		need          string
		packed, bytes int
	}
	const mb, rest = 1 << 20, mostModules - mostEveryDecode
	for _, c := range []struct {
		units []unit
		want  []string // in what is wrong
	}{
		{nil, nil},
		{[]unit{{pack.EveryDecode, 3 * mb, 3 * mb}, {pack.EveryDecode, mb, mb}, {"prompts", rest, rest}}, nil},
		{[]unit{{pack.EveryDecode, 3 * mb, 3 * mb}, {pack.EveryDecode, mb + 1, mb + 1}}, []string{"every decode needs takes 4194305"}},
		{[]unit{{pack.EveryDecode, 4 * mb, 4 * mb}, {"prompts", rest + 1, rest + 1}}, []string{fmt.Sprintf("modules take %d", mostModules+1)}},
		{[]unit{{"prompts", mostModules + 1, mostModules + 1}}, []string{"modules take"}},
		{[]unit{{"", 1, 1}}, []string{"a: nothing says"}},
		{[]unit{{"prompts", 1, 2}}, []string{"a: packed 1 bytes, there are 2"}},
		{[]unit{{pack.EveryDecode, mostModules + 1, mostModules + 1}}, []string{"every decode needs", "modules take"}},
	} {
		files := fstest.MapFS{}
		for i, u := range c.units {
			text, err := (&pack.Manifest{Need: u.need, Packed: u.packed}).Format()
			if err != nil {
				t.Fatal(err)
			}
			name := "modules/" + string(rune('a'+i))
			files[name+".json"], files[name+".bin"] = &fstest.MapFile{Data: text}, &fstest.MapFile{Data: make([]byte, u.bytes)}
		}
		wrong, err := overBudget(files)
		if err != nil || len(wrong) != len(c.want) {
			t.Errorf("%v: %q, %v, want %q", c.units, wrong, err, c.want)
			continue
		}
		for i := range wrong {
			if !strings.Contains(wrong[i], c.want[i]) {
				t.Errorf("%v: %q, want %q in it", c.units, wrong[i], c.want[i])
			}
		}
	}
}

// read counts what is opened of a file system.
type read struct {
	fs.FS
	names map[string]int
}

func (r read) Open(name string) (fs.File, error) {
	r.names[name]++
	return r.FS.Open(name)
}

// A unit's archive is read when it is asked for, and those of others are not.
func TestUnpackedWhenAskedFor(t *testing.T) {
	files := fstest.MapFS{}
	for _, unit := range []string{"u", "v"} {
		one := module(t, nil).files.(fstest.MapFS)
		files["modules/"+unit+".json"], files["modules/"+unit+".bin"] = one["modules/u.json"], one["modules/u.bin"]
	}
	opened := map[string]int{}
	s := &store{files: read{files, opened}}
	if _, err := s.image("u", 75); err == nil || opened["modules/u.bin"] != 0 {
		t.Errorf("a GPU without an image took %v: %v", opened, err)
	}
	for range 2 {
		if _, err := s.image("u", 90); err != nil {
			t.Error(err)
		}
	}
	if opened["modules/u.bin"] != 1 || opened["modules/v.bin"] != 0 || opened["modules/v.json"] != 0 || len(s.unpacked) != 1 {
		t.Errorf("an image took %v, and %d are kept", opened, len(s.unpacked))
	}
}

func TestWithoutModules(t *testing.T) {
	if whyEmpty == "" {
		t.Skip("this binary has modules")
	}
	if image, err := Image("lean", 90); image != nil || !errors.Is(err, ErrNoImage) || !strings.Contains(err.Error(), whyEmpty) {
		t.Errorf("%q, %v", image, err)
	}
}
