package paper

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/cpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

func TestMain(m *testing.M) { measuretest.Main(m) }

// TestCPU goes through the whole command on cores, beside a worker that takes the part of PyTorch.
func TestCPU(t *testing.T) {
	defer cpu.UseTorch(func(string, ...string) (*measure.Worker, error) {
		return measure.Start(measuretest.Command(t, "torch"))
	})()
	defer func(p measure.Pace) { quickPace = p }(quickPace)
	quickPace = measure.Pace{Rounds: 2, Turn: time.Millisecond}
	even, uneven := at(2, 4, 2, 3300, 8), point{label: "uneven", heads: 3, kvHeads: 3, dim: 16, lengths: []int{4000, 70}}
	even.quick, uneven.quick = true, true
	old := panels
	panels = func() []panel {
		return []panel{{id: "3", table: "Figure 3", kind: use}, {id: "7a", table: "Figure 7a", cpu: []point{even}}, {id: "10", table: "Figure 10", cpu: []point{uneven}}}
	}
	defer func() { panels = old }()
	file := filepath.Join(t.TempDir(), "cpu.json")
	var out, errs strings.Builder
	if status := command.Run(Commands, []string{"paper", "-quick", "-device=cpu", "-workers=1", "-python=fake", "-json", file}, &out, &errs); status != 0 {
		t.Fatal(errs.String())
	}
	if !strings.Contains(errs.String(), "Figure 3 is left out: it is not measured on this device\n[1/2] Figure 7a: ") {
		t.Error(errs.String())
	}
	r, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []point{even, uneven} {
		for _, m := range []measure.Metric{measure.Micros, measure.Share, measure.OverStock, measure.OverTorch, measure.OverFixed, measure.OverPerHead} {
			if f := r.Find(x.label, cpu.NameAttend, m); f == nil || !(f.Value > 0) {
				t.Errorf("%s, %s: %+v", x.label, m, f)
			}
		}
	}
	// The fake takes a millisecond, and half of one where groups are packed by hand.
	if f := r.Find(even.label, cpu.NamePacked, measure.Micros); f == nil || !measuretest.Near(f.Value, 500) {
		t.Errorf("%+v", f)
	}
	if r.Versions["Fake"] != "1.0" || r.Command != "paper -device cpu" {
		t.Errorf("%v, %q", r.Versions, r.Command)
	}
}

// TestRefuses: what is wrong is said before anything is measured.
func TestRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		`figure "2" is none of 3, 7a, `:                       {"2"},
		`-device "tpu" is neither gpu nor cpu`:                {"-device", "tpu"},
		"-again says nothing without -resume":                 {"-device=cpu", "-again", "b1"},
		"0 workers on ":                                       {"-device=cpu", "-workers=0"},
		"/no/such: no such file or directory":                 {"-device=cpu", "-json", "/no/such/file"},
		"figures 3, 13, 13other: there is nothing to measure": {"-device=cpu", "3", "13"},
	} {
		var out, errs strings.Builder
		if status := command.Run(Commands, append([]string{"paper"}, args...), &out, &errs); status != 1 || !strings.Contains(errs.String(), want) {
			t.Errorf("%q: status %d, %s, want %q", args, status, errs.String(), want)
		}
	}
	var out, errs strings.Builder
	if status := command.Run(Commands, []string{"paper", "-schema"}, &out, &errs); status != 0 || out.String() != string(Schema) {
		t.Errorf("status %d: %s", status, errs.String())
	}
}

func TestProgress(t *testing.T) {
	items := []item{{cost: 1}, {cost: 3}, {cost: 2}}
	p := newProgress(items)
	if got := p.left(); got != "" {
		t.Error(got)
	}
	p.done(items[0], 2*time.Second)
	if got := p.left(); got != ", about 10s left" {
		t.Error(got)
	}
	p.skip(items[1])
	if got := p.left(); got != ", about 4s left" {
		t.Error(got)
	}
	p.done(items[2], time.Second)
	if got := p.left(); got != ", about 0s left" {
		t.Error(got)
	}
}
