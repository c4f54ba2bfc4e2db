package gpu

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"gorgonia.org/leanattention/kernels"
)

func TestTargetOf(t *testing.T) {
	all := []int{50, 80, 86, 87, 89, 90}
	for _, c := range []struct {
		capability int
		ptx, cubin bool
		want       string
	}{
		{80, true, true, "sm_80"}, {88, false, true, "sm_87"}, {89, true, true, "sm_89"}, {90, false, true, "sm_90a"}, {90, false, false, ""},
		{120, true, true, "compute_90"}, {120, false, true, ""},
	} {
		if got := targetOf(all, c.capability, c.ptx, c.cubin); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

// An image depends on all that the key has.
func TestKeyOf(t *testing.T) {
	headers, err := kernels.Headers()
	if err != nil {
		t.Fatal(err)
	}
	other := maps.Clone(headers)
	other["types.cuh"] = append(slices.Clone(other["types.cuh"]), ' ')
	keys := map[string]bool{}
	for _, k := range []string{keyOf("12.4", "sm_80", "x", headers), keyOf("12.5", "sm_80", "x", headers), keyOf("12.4", "sm_86", "x", headers), keyOf("12.4", "sm_80", "y", headers), keyOf("12.4", "sm_80", "x", other)} {
		keys[k] = true
	}
	if len(keys) != 5 || keyOf("12.4", "sm_80", "x", headers) != keyOf("12.4", "sm_80", "x", maps.Clone(headers)) {
		t.Errorf("%d keys", len(keys))
	}
}

// A torn or changed file is not an image. Writing a file beyond the cache's limits removes the oldest files.
func TestCache(t *testing.T) {
	c := cache(filepath.Join(t.TempDir(), "new", "cache"))
	image := []byte("an image")
	if c.read("a") != nil || cache("").read("a") != nil {
		t.Error("an image from nowhere")
	}
	cache("").write("a", image)
	c.write("a", image)
	if !bytes.Equal(c.read("a"), image) {
		t.Errorf("%q", c.read("a"))
	}
	whole, err := os.ReadFile(c.file("a"))
	if err != nil {
		t.Fatal(err)
	}
	changed := slices.Clone(whole)
	changed[len(changed)-1]++
	for _, bad := range [][]byte{nil, whole[:10], whole[:32], whole[:len(whole)-1], changed} {
		if err := os.WriteFile(c.file("a"), bad, 0o600); err != nil {
			t.Fatal(err)
		}
		if got := c.read("a"); got != nil {
			t.Errorf("%q is %q", bad, got)
		}
	}
	left := filepath.Join(string(c), "writing-1")
	if err := os.WriteFile(left, image, 0o600); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * time.Hour)
	if err := os.Chtimes(left, old, old); err != nil {
		t.Fatal(err)
	}
	for i := range cachedFiles + 3 {
		c.write(fmt.Sprint("k", i), image)
		then := old.Add(time.Duration(i) * time.Second)
		if err := os.Chtimes(c.file(fmt.Sprint("k", i)), then, then); err != nil && i > 0 {
			t.Fatal(err)
		}
		if i == 0 && c.read("k0") == nil {
			t.Error("k0 is not there")
		}
	}
	c.write("last", image)
	files, err := os.ReadDir(string(c))
	if err != nil || len(files) != cachedFiles {
		t.Fatalf("%d files, %v", len(files), err)
	}
	if c.read("last") == nil || c.read("k1") != nil || c.read("k0") == nil || slices.ContainsFunc(files, func(f os.DirEntry) bool { return f.Name() == "writing-1" }) {
		t.Error("the wrong files are left")
	}
}
