//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package gpu

import (
	"io"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
	"gorgonia.org/leanattention/cmd/leanbench/nvml"
	"gorgonia.org/leanattention/cmd/leanbench/nvml/nvmltest"
)

// TestFakeEnergy: what contenders draw is taken down, and refused where nobody measures it.
func TestFakeEnergy(t *testing.T) {
	fakeGPU(t, 90)
	library := nvmltest.New(t, "Fake 0")
	defer UseNVML(func() (*nvml.Library, error) { return nvml.OpenFrom(library.Path) }, 2, 200*time.Millisecond)()
	c := gpuCase{table: tableNamed, shape: EvenShape(4, 8, 8, 8192, 64)}
	b := &Bench{unchecked: true, Report: &measure.Report{}, Options: Options{energy: true}, Stdout: io.Discard, Stderr: io.Discard, Rng: measuretest.Rand(t), always: []gpuCase{c}}
	if err := b.run(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, who := range []string{measure.ReadCeiling, ours} {
		watts, joules := b.Report.Find(c.shape.String(), who, measure.Watts), b.Report.Find(c.shape.String(), who, measure.ByteJoules)
		// The driver says that 1.5 ms are between any two events.
		gigabytes := float64(c.shape.Bytes()) / 1e9 * float64(c.shape.Launches()) / 1.5 // a millisecond
		if watts == nil || joules == nil || !(watts.Value > 0) || !measuretest.Near(joules.Value, watts.Value/gigabytes) {
			t.Errorf("%s: %+v, %+v", who, watts, joules)
		}
	}
	for want, o := range map[string]Options{"not for -prefill and -linear": {energy: true, linear: true}, "not for -layer": {energy: true, layer: true}} {
		b := &Bench{Report: &measure.Report{}, Options: o, Stdout: io.Discard, Stderr: io.Discard, Rng: measuretest.Rand(t)}
		if err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	library.Fail(3)
	b = &Bench{Report: &measure.Report{}, Options: Options{energy: true}, Stdout: io.Discard, Stderr: io.Discard, Rng: measuretest.Rand(t), always: []gpuCase{c}}
	if err := b.run(t.Context()); err == nil || !strings.Contains(err.Error(), "-energy: nvmlDeviceGetTotalEnergyConsumption: Not Supported (3)") {
		t.Errorf("error %v", err)
	}
}
