package gpu

import (
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/device"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/ranks"
)

// TestMLA: two and three ranks, in one process, are measured against one in both ways, and the errors of TPLA are reported.
func TestMLA(t *testing.T) {
	shapes := []mlaShape{{2, 70, 6, 24, 4, 3}, {1, 1, 4, 12, 2, 5}}
	file := filepath.Join(t.TempDir(), "mla.json")
	of := func() *scaling {
		return &scaling{json: file, pace: measure.Pace{Rounds: 2}, report: &measure.Report{Command: "scale", Machine: measure.Machine{Workers: 2}}, stdout: io.Discard, stderr: io.Discard}
	}
	real := startMLARank
	defer func() { startMLARank = real }()
	startMLARank = func(w ranks.World, threads int, flags []string, _ io.Writer) (func() error, error) {
		if len(flags) != 0 || threads < 1 {
			t.Errorf("flags %q, %d threads", flags, threads)
		}
		done := make(chan error, 1)
		go func() { done <- of().joinMLA(w, shapes) }()
		return func() error { return <-done }, nil
	}
	s := of()
	if err := s.measureMLA([]Ranks{{2, 1}, {3, 1}}, shapes); err != nil {
		t.Fatal(err)
	}
	saved, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range shapes {
		for _, size := range []int{2, 3} {
			for _, way := range mlaWays[1:] {
				f := saved.Find(c.String(), fmt.Sprintf(way, size), measure.OverOneProcess)
				if f == nil || !(f.Value > 0) {
					t.Errorf("%v, %s: %+v", c, fmt.Sprintf(way, size), f)
				}
			}
		}
	}
	var last float64
	for _, is := range []string{"norm", "softmax", "both"} {
		f := saved.Find(is, "eigenvectors", measure.RelativeError)
		if f == nil || !(f.Value > last && f.Value < 1) {
			t.Fatalf("%s: %+v, after %v", is, f, last)
		}
		last = f.Value
	}
}

// TestMLARefused: flags of GPUs, and latent vectors that ranks do not divide.
func TestMLARefused(t *testing.T) {
	s := &scaling{counts: []int{2}}
	if err := s.measureMLA([]Ranks{{2, 1}}, nil); err == nil || !strings.Contains(err.Error(), "leave out -gpus") {
		t.Error(err)
	}
	s = &scaling{}
	if err := s.measureMLA([]Ranks{{2, 4}}, nil); err == nil || !strings.Contains(err.Error(), "GPUs of -ranks") {
		t.Error(err)
	}
	real := startMLARank
	defer func() { startMLARank = real }()
	shapes := []mlaShape{{1, 5, 2, 7, 2, 3}, {1, 5, 2, 8, 2, 3}}
	of := func(match string) *scaling {
		return &scaling{match: regexp.MustCompile(match), pace: measure.Pace{Rounds: 1}, report: &measure.Report{Machine: measure.Machine{Workers: 2}}, stdout: io.Discard, stderr: io.Discard}
	}
	var asked []mlaShape
	startMLARank = func(w ranks.World, _ int, flags []string, _ io.Writer) (func() error, error) {
		if len(flags) != 2 || flags[0] != "-match" {
			t.Errorf("flags %q", flags)
		}
		done := make(chan error, 1)
		go func() { done <- of(flags[1]).joinMLA(w, asked) }()
		return func() error { <-done; return nil }, nil
	}
	asked = shapes[:1]
	if err := of("7 [+] 2").measureMLA(nil, shapes); err == nil || !strings.Contains(err.Error(), "7 elements of a latent vector over 2 ranks") {
		t.Error(err)
	}
	asked = shapes[1:]
	if err := of("8 [+] 2").measureMLA(nil, shapes); err != nil {
		t.Error(err)
	}
}

// TestMLAGPUs: two emulated GPUs are measured against one in all ways. By context and by heads, they compute what one does.
func TestMLAGPUs(t *testing.T) {
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	c := mlaLayer{mlaShape{2, 20, 4, 32, 8, 8}, 16, 1.75, 1.7}
	s := &scaling{counts: []int{2}, pace: measure.Pace{Rounds: 1, Steps: 1}, report: &measure.Report{Command: "scale"}, json: filepath.Join(t.TempDir(), "mla.json"), stdout: io.Discard, stderr: io.Discard}
	if err := s.measureMLAGPUs([]mlaLayer{c}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"context over 2 GPUs", "TPLA over 2 GPUs", "heads over 2 GPUs"} {
		if f := s.report.Find(c.String(), name, measure.OverOneGPU); f == nil || (f.Bar == nil) != (name == "heads over 2 GPUs") || !(f.Value > 0) {
			t.Errorf("%s: %+v", name, f)
		}
	}
	var outs [][]float32
	gpus, err := s.open()
	defer func() {
		if err := closeGPUs(gpus); err != nil {
			t.Error(err)
		}
	}()
	for _, at := range []struct {
		gpu *device.GPU
		way int
	}{{gpus[0], byContext}, {gpus[1], byContext}, {gpus[1], byHeads}} {
		r, e := newMLALayers(c, at.gpu, at.way)
		if err = errors.Join(err, e); err != nil {
			t.Fatal(err)
		}
		y, err := r.out.Value().(*device.Tensor).Download()
		if err != nil {
			t.Fatal(err)
		}
		outs = append(outs, y.Float32s())
		if err := r.close(); err != nil {
			t.Error(err)
		}
	}
	largest := float64(slices.Max(outs[0]))
	for way, out := range outs[1:] {
		for i, want := range outs[0] {
			if got := out[i]; !(math.Abs(float64(got-want)) < 0.01*largest) {
				t.Fatalf("way %d, element %d: %v, want %v, of at most %v", way, i, got, want, largest)
			}
		}
	}
}
