//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package emulated

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/ptx"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/kernels"
)

// Every kernel of the modules compiles, although tests compile only those that they launch. By default this test compiles
// a third of the kernels of each unit, drawn at random.
func TestEmulatedKernels(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("there is one goroutine")
	}
	rng := reftest.Rand(t)
	capability, image := Images(t)
	files, err := filepath.Glob("../../kernels/modules/*.json")
	if err != nil || len(files) == 0 {
		t.Fatalf("%q: %v", files, err)
	}
	for _, file := range files {
		unit := strings.TrimSuffix(filepath.Base(file), ".json")
		text, err := image(unit, capability)
		if errors.Is(err, kernels.ErrNoImage) && !hasPTX(t, file) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		m, err := ptx.Parse(string(text))
		if err != nil {
			t.Fatalf("%s: %v", unit, err)
		}
		if len(m.Entries()) == 0 {
			t.Errorf("%s has no kernel", unit)
		}
		entries := m.Entries()
		rng.Shuffle(len(entries), func(i, j int) { entries[i], entries[j] = entries[j], entries[i] })
		for _, entry := range entries[:reftest.Cases(t, (len(entries)+2)/3, len(entries))] {
			k, err := m.Kernel(entry)
			if err != nil {
				t.Error(err)
				continue
			}
			if n, err := m.ParamBytes(entry); err != nil || n != k.ParamBytes() {
				t.Errorf("%s has %d bytes of parameters: %d, %v", entry, k.ParamBytes(), n, err)
			}
		}
	}
}

// hasPTX reports whether a module has PTX, which GPUs newer than 9.0 compile.
func hasPTX(t *testing.T, manifest string) bool {
	t.Helper()
	text, err := os.ReadFile(manifest)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Contains(text, []byte(`"compute_90"`))
}
