//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package paper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/e2e"
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
	"gorgonia.org/leanattention/cmd/leanbench/nvml"
	"gorgonia.org/leanattention/cmd/leanbench/nvml/nvmltest"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// fakeGPU has the command find a GPU whose kernels do nothing, peers whose launches take a
// millisecond, and an NVML whose counter moves.
func fakeGPU(t *testing.T) *nvmltest.Library {
	t.Helper()
	lib, energy := enginetest.Stub(t, 90), nvmltest.New(t, "Fake 0")
	t.Cleanup(gpu.UseDriver(func() (*cuda.Driver, error) { return cuda.LoadFrom(lib.Path) }, enginetest.PrepareModules))
	t.Cleanup(gpu.UseWorker(func(string, ...string) (*measure.Worker, error) { return measure.Start(measuretest.Command(t, "gpu")) }))
	t.Cleanup(gpu.UseNVML(func() (*nvml.Library, error) { return nvml.OpenFrom(energy.Path) }, 1, 450*time.Millisecond))
	unchecked = true
	t.Cleanup(func() { unchecked = false })
	return energy
}

func run(args ...string) (status int, out, errs string) {
	var stdout, stderr strings.Builder
	status = command.Run(Commands, append([]string{"paper"}, args...), &stdout, &stderr)
	return status, stdout.String(), stderr.String()
}

// TestFakePaper goes through the whole command on a GPU.
func TestFakePaper(t *testing.T) {
	energies := fakeGPU(t)
	speeds, drawn := at(4, 8, 8, 8192, 64), at(1, 8, 8, 1<<17, 64)
	uneven := point{label: "uneven", heads: 8, kvHeads: 8, dim: 64, lengths: []int{30000, 17}}
	huge := at(4, 64, 64, 1<<20, 64)
	for _, x := range []*point{&speeds, &drawn, &uneven, &huge} {
		x.quick = true
	}
	with(t, panel{id: "3", table: "Figure 3", kind: use, gpu: []point{drawn}}, panel{id: "7a", table: "Figure 7a", gpu: []point{speeds, huge}},
		panel{id: "10", table: "Figure 10", gpu: []point{uneven}}, panel{id: "13", table: "Figure 13", kind: energy, gpu: []point{drawn}},
		panel{id: "9", table: "Figure 9", kind: scale, gpu: []point{speeds}})
	dir := t.TempDir()
	file, page := filepath.Join(dir, "paper.json"), filepath.Join(dir, "page.md")
	status, out, errs := run("-quick", "-json", file, "-page", page)
	if status != 0 {
		t.Fatal(errs)
	}
	for _, want := range []string{"### Figure 3", "### Figure 7a", "### Figure 10", "### Figure 13", "### " + tableAll, "for 1 of its shapes there is no memory", "without cudnn: too old"} {
		if !strings.Contains(out, want) {
			t.Errorf("the output does not say %q:\n%s", want, out)
		}
	}
	for _, want := range []string{"[1/5] Figure 3: " + drawn.label + "\n", "[2/5] Figure 7a: " + speeds.label + ", about ", " left\n", "Figure 9 is left out: "} {
		if !strings.Contains(errs, want) {
			t.Errorf("stderr does not say %q:\n%s", want, errs)
		}
	}
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := checkJSON(data); err != nil {
		t.Error(err)
	}
	r, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	// The driver says that 1.5 ms are between any two events.
	launch := 1.5e-3 / float64(speeds.shape().Launches())
	for _, c := range []struct {
		table, is, who string
		metric         measure.Metric
		want           float64
	}{
		{"Figure 7a", speeds.label, gpu.Ours, measure.Micros, 1e6 * launch},
		{"Figure 7a", speeds.label, gpu.Ours, measure.OverFlash, 1e-3 / launch},
		{"Figure 7a", speeds.label, gpu.Ours, measure.OverInfer, 1e-3 / launch},
		{"Figure 7a", speeds.label, gpu.Ours, measure.OverFixed, 1},
		{"Figure 7a", speeds.label, nameFixed, "splits", 1}, // 32 output tiles on 4 multiprocessors
		{"Figure 7a", speeds.label, gpu.PeerName("flash"), measure.Micros, 1000},
		{"Figure 10", uneven.label, namePerHead, measure.GPUShare, 1},
		{"Figure 3", drawn.label, namePerHead, measure.BusyShare, 1}, // 8 output tiles, two for each
		{"Figure 3", drawn.label, gpu.Ours, measure.BusyCounted, 0.75},
		{"Figure 3", drawn.label, gpu.PeerName("flash"), measure.BusyCounted, 0.75},
		{tableAll, "x FLASH", "lean", "shapes", 3},
		{tableAll, "x fixed", "lean", "mean", 1},
	} {
		f := find(r, c.table, c.is, c.who, c.metric)
		if f == nil || !measuretest.Near(f.Value, c.want) {
			t.Errorf("%s, %s, %s, %s: %+v, want %v", c.table, c.is, c.who, c.metric, f, c.want)
		}
	}
	watts, joules := find(r, "Figure 13", drawn.label, gpu.Ours, measure.Watts), find(r, "Figure 13", drawn.label, gpu.Ours, measure.ByteJoules)
	us := find(r, "Figure 13", drawn.label, gpu.Ours, measure.Micros)
	if watts == nil || joules == nil || us == nil || !measuretest.Near(joules.Value, watts.Value*us.Value/1e3/(float64(drawn.shape().Bytes())/1e9)) {
		t.Errorf("%+v, %+v, %+v", watts, joules, us)
	}
	if f := find(r, "Figure 13", drawn.label, gpu.Ours, measure.OfFlashJoules); f == nil || f.Bar == nil {
		t.Errorf("of FLASH's energy: %+v", f)
	}
	if r.Machine.GPU != "Fake 0" || r.Versions["driver"] == "" || find(r, "Figure 9", speeds.label, "one GPU", measure.LayerMicros) != nil {
		t.Errorf("%+v, %v", r.Machine, r.Versions)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"## Figure 7a: contexts\n", "\n![Fake 0](page-7a.svg)\n", "## Where ours is slower"} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the page does not say %q:\n%s", want, text)
		}
	}
	if svg, err := os.ReadFile(filepath.Join(dir, "page-7a.svg")); err != nil || !strings.Contains(string(svg), "prefers-color-scheme") {
		t.Errorf("a picture of %d bytes (%v)", len(svg), err)
	}

	// What is there is not measured again.
	status, out, errs = run("-quick", "-resume", file, "7")
	if status != 0 || strings.Contains(errs, "[") || !strings.Contains(out, "### Figure 13") {
		t.Errorf("status %d: %s%s", status, errs, out)
	}
	// A figure that can't be measured does not keep the others from it.
	energies.Fail(3)
	other := filepath.Join(dir, "other.json")
	if status, _, errs = run("-quick", "-json", other, "13", "10"); status != 0 || !strings.Contains(errs, "Figure 13 is left out: nvmlDeviceGetTotalEnergyConsumption: Not Supported (3)\n") || !strings.Contains(errs, "[1/2] Figure 13") {
		t.Errorf("status %d: %s", status, errs)
	}
	if r, err := measure.Load(other); err != nil || !r.HasCase("Figure 10", uneven.label) || r.HasCase("Figure 13", drawn.label) {
		t.Errorf("%v", err)
	}
	defer gpu.UseNVML(func() (*nvml.Library, error) { return nil, nvml.ErrNone }, 1, 0)()
	if status, _, errs = run("-quick", "13", "10"); status != 0 || !strings.Contains(errs, "Figure 13 is left out: no NVML\n") {
		t.Errorf("status %d: %s", status, errs)
	}
}

// fakeWhole takes 2 s for a prompt, and 10, 15 and 20 ms for a step.
type fakeWhole struct{ closed *int }

func (fakeWhole) Measure(prompt, tokens int) ([]e2e.WholeTime, error) {
	if prompt > 2048 {
		return nil, fmt.Errorf("cache: %w", la.ErrOutOfMemory)
	}
	time := func(name string, step float64) e2e.WholeTime {
		return e2e.WholeTime{Name: name, Prompt: measure.Samples{2, 2}, Step: measure.Samples{step, step}}
	}
	return []e2e.WholeTime{time(e2e.WholeLean, 0.01), time(e2e.WholeFixed, 0.015), time(e2e.WholeTorch, 0.02)}, nil
}

func (fakeWhole) Said() (hello string, without []string) {
	return "transformers 5.0, PyTorch", []string{"some reason"}
}

func (f fakeWhole) Close() error {
	*f.closed++
	return nil
}

// TestFakeWhole: a prompt and its tokens add up; what there is no memory for is named, and a decoder is closed before the next.
func TestFakeWhole(t *testing.T) {
	fakeGPU(t)
	closed, opened := 0, []string{}
	old := openWhole
	defer func() { openWhole = old }()
	openWhole = func(model string, longest int, _ string, peers bool, _ int, _ io.Writer) (wholeDecoder, error) {
		opened = append(opened, fmt.Sprint(model, longest, peers, closed))
		if model == "none" {
			return nil, errors.New("no weights")
		}
		return fakeWhole{&closed}, nil
	}
	first, second, third := wholes(e2e.WholeOPT, 32, 32, 4096), wholes(e2e.WholePhi, 40, 10, 1024), wholes("none", 40, 40, 1024)
	with(t, panel{id: "12", table: "Figure 12", kind: whole, gpu: first}, panel{id: "12phi", table: "Figure 12, phi", kind: whole, gpu: second},
		panel{id: "12none", table: "Figure 12, none", kind: whole, gpu: third})
	file := filepath.Join(t.TempDir(), "whole.json")
	status, out, errs := run("-device=gpu", "-json", file)
	if status != 0 || !strings.Contains(errs, "OPT-6.7b, 4096 tokens and 512 is left out: cache: ") || !strings.Contains(errs, "Figure 12, none is left out: no weights\n") || !strings.Contains(out, "without transformers: some reason") {
		t.Errorf("status %d: %s%s", status, errs, out)
	}
	if want := "[OPT-6.7b4609 true 0 Phi-3-medium1153 true 1 none1153 true 2]"; fmt.Sprint(opened) != want || closed != 2 {
		t.Errorf("%v, want %s; %d closed", opened, want, closed)
	}
	r, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		who    string
		metric measure.Metric
		want   float64
	}{
		{e2e.WholeLean, measure.TotalSeconds, 2 + 128*0.01}, {e2e.WholeLean, measure.StepMillis, 10}, {e2e.WholeLean, measure.PromptMillis, 2000},
		{e2e.WholeLean, measure.OverFixed, (2 + 128*0.015) / (2 + 128*0.01)}, {e2e.WholeLean, measure.OverCompiled, (2 + 128*0.02) / (2 + 128*0.01)},
	} {
		if f := find(r, "Figure 12", first[0].label, c.who, c.metric); f == nil || !measuretest.Near(f.Value, c.want) {
			t.Errorf("%s, %s: %+v, want %v", c.who, c.metric, f, c.want)
		}
	}
	if r.Versions["transformers"] != "5.0" {
		t.Errorf("%v", r.Versions)
	}
}

func find(r *measure.Report, table, is, who string, m measure.Metric) *measure.Figure {
	for i, f := range r.Figures {
		if f.Table == table && f.Case == is && f.Contender == who && f.Metric == m {
			return &r.Figures[i]
		}
	}
	return nil
}

// TestFakeInterrupted: what was measured until then is kept, and another run goes on.
func TestFakeInterrupted(t *testing.T) {
	fakeGPU(t)
	var points []point
	for _, keys := range []int{4096, 8192, 16384} {
		points = append(points, at(1, 8, 8, keys, 64))
	}
	with(t, panel{id: "7a", table: "Figure 7a", gpu: points})
	file := filepath.Join(t.TempDir(), "paper.json")
	o := &options{Options: &measure.Options{JSON: file}, device: "gpu", figures: panels()}
	ctx, interrupt := context.WithCancel(t.Context())
	stderr := writer(func(p []byte) {
		if strings.HasPrefix(string(p), "[2/3]") {
			interrupt()
		}
	})
	if err := o.run(ctx, io.Discard, stderr); err == nil || err.Error() != "interrupted: 2 of 3 shapes were measured; -resume goes on" {
		t.Errorf("error %v", err)
	}
	before, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	status, _, errs := run("-device=gpu", "-peers=false", "-resume", file)
	if status != 0 || !strings.Contains(errs, "[3/3] Figure 7a: "+points[2].label) || strings.Contains(errs, "[2/3]") {
		t.Errorf("status %d: %s", status, errs)
	}
	after, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range points {
		if !after.HasCase("Figure 7a", x.label) {
			t.Errorf("no %s", x.label)
		}
	}
	if f, g := before.Find(points[0].label, gpu.Ours, measure.Micros), after.Find(points[0].label, gpu.Ours, measure.Micros); f == nil || g == nil || *f != *g {
		t.Errorf("%+v became %+v", f, g)
	}
	// What several runs have measured comes together, and nothing is there twice.
	other, both := filepath.Join(t.TempDir(), "other.json"), filepath.Join(t.TempDir(), "both.json")
	with(t, panel{id: "7a", table: "Figure 7a", gpu: points[:1]}, panel{id: "7b", table: "Figure 7b", gpu: points[:1]})
	if status, _, errs := run("-device=gpu", "-json", other); status != 0 {
		t.Fatalf("status %d: %s", status, errs)
	}
	r, err := measure.Load(other)
	if err != nil {
		t.Fatal(err)
	}
	r.Versions["FlashInfer"] = "1.2"
	if err := r.Save(other); err != nil {
		t.Fatal(err)
	}
	with(t, panel{id: "7a", table: "Figure 7a", gpu: points}, panel{id: "7b", table: "Figure 7b", gpu: points[:1]})
	if status, _, errs := run("-device=gpu", "-peers=false", "-resume", file+","+other, "-json", both); status != 0 || strings.Contains(errs, "[") {
		t.Errorf("status %d: %s", status, errs)
	}
	if r, err := measure.Load(both); err != nil || !r.HasCase("Figure 7a", points[2].label) || !r.HasCase("Figure 7b", points[0].label) || r.Versions["FlashInfer"] != "1.2" {
		t.Errorf("%v", err)
	} else {
		seen := make(map[string]bool)
		for _, f := range r.Figures {
			is := fmt.Sprint(f.Table, f.Case, f.Contender, f.Metric)
			if seen[is] {
				t.Errorf("%s is there twice", is)
			}
			seen[is] = true
		}
	}
	// Another host of the same GPU is as good, and named.
	host := *after
	host.Machine.CPU = "Another"
	if err := host.Save(other); err != nil {
		t.Fatal(err)
	}
	if status, _, errs := run("-device=gpu", "-peers=false", "-resume", other, "-json", both); status != 0 || strings.Contains(errs, "Figure 7a") {
		t.Errorf("status %d: %s", status, errs)
	}
	if r, err = measure.Load(both); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(r.Notes, func(n string) bool {
		return strings.HasPrefix(n, "on another host, Another, ") && strings.HasSuffix(n, ": figures 7a")
	}) {
		t.Errorf("nothing says that another host measured some: %q", r.Notes)
	}
	for want, change := range map[string]func(r *measure.Report){
		"it is of leanbench gpu, and this is leanbench paper": func(r *measure.Report) { r.Command = "gpu" },
		"it was measured on ":                         func(r *measure.Report) { r.Machine.GPU = "Another" },
		"it was measured with driver 1, and this is ": func(r *measure.Report) { r.Versions = map[string]string{"driver": "1"} },
	} {
		r := *after
		change(&r)
		name := filepath.Join(t.TempDir(), "old.json")
		if err := r.Save(name); err != nil {
			t.Fatal(err)
		}
		if status, _, errs := run("-device=gpu", "-peers=false", "-resume", name); status != 1 || !strings.Contains(errs, want) {
			t.Errorf("status %d: %s, want %q", status, errs, want)
		}
	}
}

// TestFakeDeaths: peers that end while they get ready for a shape are left out of it, those that end later fail it, and others
// come in their place: the next shape has peers again.
func TestFakeDeaths(t *testing.T) {
	fakeGPU(t)
	defer gpu.UseWorker(func(string, ...string) (*measure.Worker, error) {
		return measure.Start(measuretest.Command(t, "gpu-dies"))
	})()
	var points []point
	for _, keys := range []int{8192, 16384, 4096} {
		points = append(points, at(1, 8, 8, keys, 64))
	}
	with(t, panel{id: "7a", table: "Figure 7a", gpu: points})
	file := filepath.Join(t.TempDir(), "paper.json")
	status, out, errs := run("-device=gpu", "-json", file)
	if status != 1 || !strings.Contains(errs, points[1].label+`: PyTorch, FLASH_ATTENTION: "run flash 1": the worker has ended`) || !strings.Contains(out, points[0].label+", and perhaps others: without the peers: the worker has ended") {
		t.Errorf("status %d: %s%s", status, errs, out)
	}
	r, err := measure.Load(file)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct{ ours, theirs bool }{{true, false}, {false, false}, {true, true}} {
		ours := r.Find(points[i].label, gpu.Ours, measure.Micros) != nil
		theirs := r.Find(points[i].label, gpu.PeerName("flash"), measure.Micros) != nil
		if ours != want.ours || theirs != want.theirs {
			t.Errorf("%s: ours %t, theirs %t", points[i].label, ours, theirs)
		}
	}
	// What is measured again is so in its place, and stays as it was if it fails.
	for _, x := range []point{points[1], points[2]} {
		r.Drop("Figure 7a", x.label)
		r.Row("Figure 7a", x.label, gpu.Ours).Add(measure.Micros, 12345, nil)
	}
	if err := r.Save(file); err != nil {
		t.Fatal(err)
	}
	status, _, errs = run("-device=gpu", "-resume", file, "-again", "^Figure 7a: b1, 8 heads x (16384|4096) ")
	if status != 1 || !strings.Contains(errs, "[2/3] Figure 7a: "+points[1].label) || strings.Contains(errs, points[0].label) {
		t.Errorf("status %d: %s", status, errs)
	}
	// A note of what a shape lacks goes with all of the shape.
	for _, c := range []struct {
		figures []measure.Figure
		want    int
	}{{r.Figures, 2}, {append(slices.Clone(r.Figures), measure.Figure{Table: "Figure 3", Case: points[1].label}), 3}, {append(slices.Clone(r.Figures), measure.Figure{Table: "Figure 11", Case: "Some model, " + points[1].label}), 3}} {
		noted := &measure.Report{Figures: c.figures, Notes: []string{points[0].label + ", and perhaps others: without cudnn: old", "b1, 32 heads x 8192 x 128, and perhaps others: without cudnn: nobody has measured that again", points[1].label + ", and perhaps others: without cudnn: old", points[1].label + ", and perhaps others: without cudnn: new"}}
		if left := forgetNotes(noted, 3, []item{{panel{table: "Figure 7a"}, points[1], 1}}); left != c.want || len(noted.Notes) != left+1 || !strings.HasPrefix(noted.Notes[0], points[0].label) {
			t.Errorf("%q are left of the notes, want %d of the first three", noted.Notes, c.want)
		}
	}
	if r, err = measure.Load(file); err != nil {
		t.Fatal(err)
	}
	for i, want := range []bool{false, true, false} {
		if f := r.Find(points[i].label, gpu.Ours, measure.Micros); f == nil || (f.Value == 12345) != want {
			t.Errorf("%s: %+v", points[i].label, f)
		}
	}
	var cases []string
	for _, f := range r.Figures {
		cases = append(cases, f.Case)
	}
	if got := strings.Join(slices.Compact(cases)[:3], "; "); got != points[0].label+"; "+points[1].label+"; "+points[2].label {
		t.Errorf("the order is %s", got)
	}
}

type writer func(p []byte)

func (w writer) Write(p []byte) (int, error) {
	w(p)
	return len(p), nil
}

// TestFakeFailures: a shape that fails does not take the others with it, but three of them end it.
func TestFakeFailures(t *testing.T) {
	fakeGPU(t)
	unchecked = false // kernels that do nothing are found out
	var points []point
	for i := range 5 {
		points = append(points, at(1, 1, 1, 256+i, 64))
	}
	with(t, panel{id: "7a", table: "Figure 7a", gpu: points})
	status, _, errs := run("-device=gpu", "-peers=false")
	if status != 1 || !strings.Contains(errs, "[3/5]") || strings.Contains(errs, "[4/5]") || strings.Count(errs, "is NaN; it should be") < 3 {
		t.Errorf("status %d: %s", status, errs)
	}
}

// with has the command measure other panels.
func with(t *testing.T, all ...panel) {
	t.Helper()
	old := panels
	panels = func() []panel { return all }
	t.Cleanup(func() { panels = old })
}

// TestNoPython: peers that do not start are named, and ours is measured.
func TestNoPython(t *testing.T) {
	fakeGPU(t)
	defer gpu.UseWorker(func(string, ...string) (*measure.Worker, error) { return nil, errors.New("no such python") })()
	with(t, panel{id: "7a", table: "Figure 7a", gpu: []point{at(1, 8, 8, 4096, 64)}})
	if status, out, errs := run("-device=gpu"); status != 0 || !strings.Contains(out, "no such python") || !strings.Contains(out, "| lean, per head |") {
		t.Errorf("status %d: %s%s", status, errs, out)
	}
}

// TestFakeClocks: clocks are read before and after, whatever is measured in between.
func TestFakeClocks(t *testing.T) {
	fakeGPU(t)
	dir := t.TempDir()
	const smi = "#!/bin/sh\ncase $1 in *driver*) echo 570.1 ;; *) echo 1980 MHz, 2619 MHz ;; esac\n"
	if err := os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte(smi), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+string(filepath.ListSeparator)+os.Getenv("PATH"))
	with(t, panel{id: "9", table: "Figure 9", kind: scale, gpu: []point{at(1, 8, 8, 4096, 64)}})
	status, out, errs := run("-device=gpu", "-peers=false")
	if status != 0 || !strings.Contains(out, "driver 570.1, CUDA 12.4") || !strings.Contains(out, "SM and memory clock before 1980 MHz, 2619 MHz") ||
		!strings.Contains(out, "- SM and memory clock after 1980 MHz, 2619 MHz\n") {
		t.Errorf("status %d: %s%s", status, errs, out)
	}
}
