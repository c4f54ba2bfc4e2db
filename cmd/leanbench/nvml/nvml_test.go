//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package nvml

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/nvml/nvmltest"
)

func TestEnergy(t *testing.T) {
	lib := nvmltest.New(t, "Fake GPU")
	l, err := OpenFrom(lib.Path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}()
	d, err := l.Device(1, "Fake GPU")
	if err != nil {
		t.Fatal(err)
	}
	last := 0.0
	for range 30 {
		now, err := d.Energy()
		if err != nil || now < last {
			t.Fatalf("%v J after %v (%v)", now, last, err)
		}
		last = now
	}
	if last != 22.5 {
		t.Errorf("%v J after 30 looks, want 22.5", last)
	}
	m := d.Begin()
	time.Sleep(300 * time.Millisecond)
	// 2.5 J each three looks, which are a millisecond and more apart.
	if watts, err := m.End(); err != nil || watts < 10 || watts > 850 {
		t.Errorf("%v W (%v)", watts, err)
	}
	c, err := d.Count()
	if err != nil {
		t.Fatal(err)
	}
	if use, err := c.End(); err != nil || use != (Use{0.75, 0.5}) {
		t.Errorf("%+v (%v)", use, err)
	}
	lib.Fail(3)
	if _, err := d.Count(); !errors.Is(err, ErrNoCounters) {
		t.Errorf("error %v", err)
	}
	if _, err := d.Energy(); err == nil || !strings.Contains(err.Error(), "Not Supported (3)") {
		t.Errorf("error %v", err)
	}
	m = d.Begin()
	if _, err := m.End(); err == nil || !strings.Contains(err.Error(), "Not Supported (3)") {
		t.Errorf("error %v", err)
	}
	if _, err := l.Device(2, "Fake GPU"); err == nil || !strings.Contains(err.Error(), "GPU 2: nvmlDeviceGetHandleByIndex_v2: Invalid Argument (2)") {
		t.Errorf("error %v", err)
	}
	if _, err := l.Device(0, "Another"); err == nil || !strings.Contains(err.Error(), `"Fake GPU" for NVML, and "Another" for CUDA`) {
		t.Errorf("error %v", err)
	}
	if _, err := OpenFrom(filepath.Join(t.TempDir(), "none.so")); !errors.Is(err, ErrNone) {
		t.Errorf("error %v", err)
	}
}

// TestVisible: the numbers that CUDA gives are those of what is left.
func TestVisible(t *testing.T) {
	for list, want := range map[string]string{"": "[0 <nil>] [1 <nil>]", "1,0": "[1 <nil>] [0 <nil>]", " 3": "[3 <nil>] [0 CUDA_VISIBLE_DEVICES is \" 3\": nobody knows which GPU number 1 is for NVML]"} {
		a, errA := visible(0, list)
		b, errB := visible(1, list)
		if got := fmt.Sprint([]any{a, errA}, []any{b, errB}); got != want {
			t.Errorf("%q: %s, want %s", list, got, want)
		}
	}
	if n, err := visible(0, "GPU-8932f937"); err == nil {
		t.Errorf("%d", n)
	}
}

// TestMeter: only what lies between two moves of the counter is measured.
func TestMeter(t *testing.T) {
	clock := func(moves func(since time.Duration) float64) func() (float64, error) {
		began := time.Now()
		return func() (float64, error) { return moves(time.Since(began)), nil }
	}
	end := func(energy func() (float64, error), span time.Duration) (float64, error) {
		m := begin(energy)
		time.Sleep(span)
		return m.End()
	}
	// 350 W, by a counter that moves each 50 ms.
	steps := clock(func(d time.Duration) float64 { return 1000 + 350*d.Truncate(50*time.Millisecond).Seconds() })
	if watts, err := end(steps, 600*time.Millisecond); err != nil || watts < 300 || watts > 400 {
		t.Errorf("%v W (%v)", watts, err)
	}
	for want, energy := range map[string]func() (float64, error){
		"not moved often enough": clock(func(time.Duration) float64 { return 7 }),
		"from ":                  clock(func(d time.Duration) float64 { return -d.Truncate(20 * time.Millisecond).Seconds() }),
		"broken":                 func() (float64, error) { return 0, errors.New("broken") },
	} {
		if watts, err := end(energy, 150*time.Millisecond); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v W, error %v, want %q", watts, err, want)
		}
	}
}
