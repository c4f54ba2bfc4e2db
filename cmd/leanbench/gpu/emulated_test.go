//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"errors"
	"io"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/internal/emulated"
	"gorgonia.org/leanattention/internal/emulated/system"
	"gorgonia.org/leanattention/internal/lean"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// TestEmulatedReader: the kernel reads every piece once, in equal shares, wherever
// sequences and heads end.
func TestEmulatedReader(t *testing.T) {
	lib := fakedriver.New(t)
	capability, image := emulated.Images(t)
	emulated.Execute(t, lib, capability, 5)
	driver, err := cuda.LoadFrom(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	// Without an engine, whose kernels take long to read.
	d := &gpuDevice{driver: driver, rng: measuretest.Rand(t)}
	if d.dev, err = driver.Open(0); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := d.Close(); err != nil || lib.Live() != 0 || lib.Defects() != 0 {
			t.Errorf("%d objects left in the driver, %d calls that would have crashed (%v)", lib.Live(), lib.Defects(), err)
		}
	}()
	_, err = d.dev.Module("ceiling", func() ([]byte, error) { return image("ceiling", capability) })
	if err != nil {
		t.Fatal(err)
	}
	if d.stream, err = d.dev.NewStream(); err != nil {
		t.Fatal(err)
	}
	const warps = readerWarps * 5
	if d.sink, err = d.dev.NewBuffer(4 * 32 * warps); err != nil {
		t.Fatal(err)
	}
	short := make([]int, 40) // of one page each, and a long one behind them
	for i := range short {
		short[i] = 1 + i%16
	}
	ragged := append(short, 3000)
	for _, c := range []struct {
		s    Shape
		page int
	}{
		{EvenShape(2, 4, 2, 2048, 64), 16},
		{EvenShape(1, 1, 1, 1000, 128), 16},
		{EvenShape(3, 8, 8, 500, 64), 64},
		{EvenShape(2, 6, 3, 700, 128), 64},
		{EvenShape(1, 1, 1, 40, 64), 16}, // fewer pieces than warps
		{Shape{heads: 6, kvHeads: 3, dim: 64, lengths: ragged}, 16},
		{Shape{heads: 2, kvHeads: 2, dim: 128, lengths: ragged}, 64},
	} {
		if err := d.Fill(2*c.s.Region(), ArenaPeriod); err != nil {
			t.Fatal(err)
		}
		p := layOut(c.s, c.page, d.rng)
		r, err := d.newPageReader(&p)
		if err != nil {
			t.Fatal(err)
		}
		for launch := range 2 {
			if err := errors.Join(r.launch(launch), d.stream.Synchronize()); err != nil {
				t.Fatalf("%v, pages of %d: %v", c.s, c.page, err)
			}
			for warp := range warps {
				if err := r.verify(launch, warp); err != nil {
					t.Errorf("%v, pages of %d, launch %d: %v", c.s, c.page, launch, err)
				}
			}
		}
		if err := r.close(); err != nil { // Fill closes the keys
			t.Error(err)
		}
	}
}

// TestEmulatedWays: what other commands measure computes the same by all schedules, in pages and without.
func TestEmulatedWays(t *testing.T) {
	t.Setenv("LEANATTENTION_GPU", "emulated")
	system.Emulate(t)
	defer func(bytes int64) { gpuRotation = bytes }(gpuRotation)
	gpuRotation = 1
	b := NewBench(Options{}, measure.Machine{}, io.Discard, io.Discard)
	if err := b.Open(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	}()
	even, ragged := EvenShape(1, 3, 3, 300, 64), RaggedShape("R", 4, 2, 128, []int{200, 30})
	if err := b.Device.Fill(even.rotation()+ragged.rotation(), ArenaPeriod); err != nil {
		t.Fatal(err)
	}
	fixed, perHead := lean.Policy{Kind: lean.FixedSplit, Splits: 2}, lean.Policy{Kind: lean.PerHead}
	for _, c := range []struct {
		shape Shape
		ways  []Way
	}{
		{even, []Way{{"stream-K", lean.Policy{}, 0}, {"fixed", fixed, 0}, {"per head", perHead, 0}}},
		{ragged, []Way{{"fixed", fixed, 16}, {"per head", perHead, 16}}},
	} {
		// Outputs are compared before use.
		err := b.With(c.shape, c.ways, func(all []*Contender, ceilings int) error {
			if got := len(all) - ceilings; got != len(c.ways) {
				t.Errorf("%v: %d contenders", c.shape, got)
			}
			return nil
		})
		if err != nil {
			t.Errorf("%v: %v", c.shape, err)
		}
	}
	if err := b.With(ragged, []Way{{"fixed", fixed, 0}}, nil); err == nil || !strings.Contains(err.Error(), "R, 4/2 heads of 128: fixed: contexts of several lengths lie in pages") {
		t.Errorf("error %v", err)
	}
}
